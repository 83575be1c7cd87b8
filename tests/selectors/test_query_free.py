"""KeyDiff against the mean cosine of every key with every key, uniform draws, and StreamingLLM's tokens."""

import pytest
import torch

from offload_decode.common.errors import ConfigError
from offload_decode.testing.selector_contract import SelectorContract
from tests.selectors.memory_cases import Case, MemoryCases, assert_best


class TestKeyDiff(SelectorContract, MemoryCases):
    name = "keydiff"

    def test_the_keys_least_like_all_others_are_selected(self, case):
        queries = case.queries()
        ids = case.make("keydiff", budget="11").select(3, queries).ids
        keys = case.keys(3)
        unit = keys / keys.norm(dim=-1, keepdim=True)
        likeness = (unit @ unit.transpose(1, 2)).mean(-1)
        assert_best(-likeness, ids[:, 0], 11)
        assert torch.equal(ids, ids[:, :1].expand_as(ids))
        assert ids.shape[1] == queries.vectors.shape[1]

    def test_keys_are_read_once_and_a_smaller_budget_takes_a_prefix(self, case):
        held, queries = case.make("keydiff", budget="11"), case.queries()
        ids = held.select(3, queries).ids
        read = len(case.host.read)
        assert torch.equal(held.selector.choose(3, case.queries(seed=1), 1).ids, ids[..., :1])
        assert torch.equal(held.fork().select(3, queries).ids, ids)
        assert len(case.host.read) == read == case.shape.kv_heads
        assert held.selector.choose(3, queries, case.host.length).ids.shape[-1] == case.host.length

    def test_a_key_of_nothing_is_no_harm(self, case):
        case = Case.zeros(case.host.length, case.shape.query_heads, case.shape.kv_heads, case.shape.head_dim)
        assert len(case.make("keydiff", budget="100%").select(3, case.queries()).ids[0, 0].unique()) == (
            case.host.length
        )


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


class TestStreaming(SelectorContract, MemoryCases):
    name = "streaming"

    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            ({"budget": "7"}, [0, 1, 2, 3, -1, -2, -3]),
            ({"budget": "3"}, [0, 1, 2]),
            ({"budget": "3", "sinks": "1"}, [0, -1, -2]),
            ({"budget": "2", "sinks": "0"}, [-1, -2]),
            ({"budget": "0"}, []),
        ],
        ids=str,
    )
    def test_sinks_come_first_then_the_latest(self, case, options, expected):
        if case.host.length == 1:
            expected = [0][: len(expected)]
        ids = case.make("streaming", **options).select(1, case.queries()).ids
        expected = [token % case.host.length for token in expected]
        assert all(row == expected for row in ids.flatten(0, 1).tolist())
        assert case.host.read == []

    def test_more_sinks_than_tokens_are_all_tokens(self, case):
        ids = case.make("streaming", budget="100%", sinks="1000").select(1, case.queries()).ids
        assert ids[-1, -1].tolist() == list(range(case.host.length))

    def test_negative_sinks_are_refused(self, case):
        with pytest.raises(ConfigError, match="0 or more"):
            case.make("streaming", sinks="-1")
