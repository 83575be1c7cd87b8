"""Draws: uniform, without replacement, anew at every step, the same for a seed."""

import pytest
import torch

from offload_decode.common.errors import ConfigError
from offload_decode.testing.selector_contract import SelectorContract
from tests.selectors.memory_cases import Case, MemoryCases


class TestRandom(SelectorContract, MemoryCases):
    name = "random"

    def test_every_token_is_drawn_equally_often(self):
        case = Case.zeros(50, 8, 2, 4)
        selector, queries = case.make("random", budget="10"), case.queries()
        draws = torch.stack([selector.select(1, queries).ids for _ in range(60)])
        counts = draws.flatten().bincount(minlength=50).float()
        # 2880 rows, each with a token at odds of one in five: 576 on average, 21.5 the deviation.
        assert counts.sum() == 2880 * 10
        assert (counts - 576).abs().max() < 5 * 21.5
        first = draws[..., 0].flatten().bincount(minlength=50).float()  # and at every place of the list
        assert (first - 57.6).abs().max() < 5 * 7.5

    def test_steps_and_rows_differ_and_a_seed_repeats_them(self):
        case = Case.zeros(1000, 8, 2, 4)
        queries = case.queries()
        one, same, other = (case.make("random", budget="20", seed=seed) for seed in ("3", "3", "4"))
        first, second = one.select(1, queries).ids, one.select(1, queries).ids
        assert not torch.equal(first, second)
        assert not torch.equal(first[0, 0], first[0, 1])
        assert not torch.equal(first[0, 0], first[1, 0])
        assert torch.equal(first, same.select(1, queries).ids)
        assert not torch.equal(first, other.select(1, queries).ids)

        forked = one.fork()
        third = one.select(1, queries).ids
        assert torch.equal(third, forked.select(1, queries).ids)
        forked.selector.reset()
        assert torch.equal(first, forked.select(1, queries).ids)
        assert not torch.equal(first, one.select(1, queries).ids)

    def test_the_cost_is_not_that_of_the_store(self):
        case = Case.zeros(10**15, 8, 2, 4)
        ids = case.make("random", budget="100").select(1, case.queries()).ids
        assert ids.max() > 10**14
        assert case.host.read == []

    def test_a_negative_seed_is_refused(self, case):
        with pytest.raises(ConfigError, match="0 or more"):
            case.make("random", seed="-1")
