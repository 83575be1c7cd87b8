"""The sampler: every temperature that is a number gives tokens of the distribution; no other is taken."""

from __future__ import annotations

import pytest
import torch

from offload_decode.engine.sampler import Sampler
from offload_decode.errors import ConfigError

LOGITS = torch.tensor([[1.0, 3.0, 2.9999], [30.0, -3e4, 29.0]])


@pytest.mark.parametrize("temperature", [1e-320, 1e-300, 1e-38, 1e-9])
def test_the_lowest_temperatures_are_greedy(temperature):
    assert Sampler(temperature)(LOGITS).tolist() == [1, 0]


@pytest.mark.parametrize("temperature", [1e30, 1e300])
def test_the_highest_temperatures_are_uniform(temperature):
    drawn = Sampler(temperature)(torch.tensor([[1.0, 3.0, -50.0]]).expand(3000, -1))
    assert drawn.bincount().min() > 900


@pytest.mark.parametrize(
    "settings",
    [{"temperature": value} for value in (-1, float("inf"), float("nan"))]
    + [{"top_p": value} for value in (0, -1, 1.1, float("nan"))],
)
def test_what_is_no_temperature_and_no_share_is_refused(settings):
    with pytest.raises(ConfigError):
        Sampler(**settings)
