"""What the benchmark of collections and its candidate compute."""

from __future__ import annotations

import numpy as np
import torch

from benchmarks.candidates.document_means import means_of
from benchmarks.collection import fanned_out
from offload_decode.engine.citations import OPENING


def test_the_slowest_of_more_machines_is_slower_and_a_copy_helps() -> None:
    alone, many, copies = (
        fanned_out(machines, np.random.default_rng(0), spare)
        for machines, spare in ((1, 1), (100, 1), (100, 2))
    )
    assert alone[0] < copies[0] < many[0]
    assert abs(alone[0] - 1) < 0.1
    assert all(median < worst for median, worst in (alone, many, copies))


def test_means_stand_for_every_key_but_the_opening() -> None:
    keys = np.random.default_rng(0).standard_normal((100, 8), np.float32)
    for count in (0, 1, 7):
        means, weights = means_of(keys, count)
        assert len(means) == (count or 100 - OPENING)
        sizes = weights.exp()
        assert torch.allclose(sizes.sum(), torch.tensor(100.0 - OPENING))
        expected = torch.from_numpy(keys[OPENING:].mean(0))
        assert torch.allclose((means * sizes[:, None]).sum(0) / sizes.sum(), expected, atol=1e-5)
