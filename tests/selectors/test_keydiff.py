"""KeyDiff against the mean cosine of every key with every key."""

import torch

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
        assert ids.shape[1] == queries.rows.shape[1]

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
