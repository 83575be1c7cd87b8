from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from offload_decode.store.sampling import sample_plan


@given(st.integers(1, 5000), st.integers(1, 16), st.integers(1, 3000))
def test_samples_are_distinct_ordered_and_spread(n_tokens: int, group: int, n: int) -> None:
    positions, heads = sample_plan(n_tokens, group, n)
    count = min(n, n_tokens * group)
    assert positions.shape == heads.shape == (count,)
    assert positions.dtype == heads.dtype == np.int64
    assert len(set(zip(positions.tolist(), heads.tolist(), strict=True))) == count
    assert (np.diff(positions) >= 0).all()
    assert 0 <= positions.min() <= positions.max() < n_tokens
    assert 0 <= heads.min() <= heads.max() < group
    # Spread: any stretch of the corpus has its share of the samples, to within one.
    cuts = np.searchsorted(positions, np.arange(0, n_tokens + 1))
    assert np.abs(cuts - np.arange(0, n_tokens + 1) * count / n_tokens).max() <= 1


def test_as_many_as_there_are() -> None:
    positions, heads = sample_plan(3, 2, 100)
    assert positions.tolist() == [0, 0, 1, 1, 2, 2]
    assert heads.tolist() == [0, 1, 0, 1, 0, 1]


def test_no_overflow_at_a_billion_tokens() -> None:
    positions, _ = sample_plan(10**9, 8, 4096)
    assert (np.diff(positions) > 0).all()
    assert positions[-1] < 10**9
