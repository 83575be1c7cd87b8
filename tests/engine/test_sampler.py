"""The sampler: every temperature that is a number gives tokens of the distribution; no other is taken."""

import math

import pytest
import torch

from offload_decode.common.errors import ConfigError
from offload_decode.engine import conversation
from offload_decode.engine.conversation import Sampler

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
    [
        *({"temperature": wrong} for wrong in (-1, math.nan, math.inf)),
        *({"top_p": wrong} for wrong in (0, -1, 1.01, math.nan)),
        *({"seed": wrong} for wrong in (-1, 2**64)),
    ],
)
def test_sampling_that_makes_no_sense_is_refused(settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        Sampler(**settings)


@pytest.mark.parametrize("few", [1, 2, 1024])
@pytest.mark.parametrize("top_p", [0.05, 0.6, 0.86, 1.0])
def test_tokens_come_as_often_as_the_nucleus_weighs_them(top_p, few, monkeypatch):
    monkeypatch.setattr(conversation, "_FEW", few)
    weights = torch.tensor([0.1, 0.5, 0.05, 0.35])
    kept = {0.05: [1], 0.6: [1, 3], 0.86: [1, 3, 0], 1.0: [0, 1, 2, 3]}[top_p]
    expected = torch.zeros(4)
    expected[kept] = weights[kept] / weights[kept].sum()
    drawn = Sampler(1.0, top_p, seed=3)(weights.log().expand(20_000, -1))
    found = drawn.bincount(minlength=4) / 20_000
    assert (found[expected == 0] == 0).all()
    torch.testing.assert_close(found, expected, atol=0.02, rtol=0)


def test_greedy_takes_the_first_of_the_largest():
    logits = torch.tensor([[1.0, 3.0, 3.0], [2.0, -math.inf, 2.0]])
    assert Sampler()(logits).tolist() == Sampler()(logits.double()).tolist() == [1, 0]


def test_a_token_without_weight_is_never_drawn():
    logits = torch.tensor([[-math.inf, 0.0, -math.inf]]).expand(1000, -1)
    assert set(Sampler(1.0)(logits).tolist()) == {1}
