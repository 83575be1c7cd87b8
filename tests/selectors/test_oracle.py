"""The oracle against one plain matrix product, and against `topk`, which shares no code with it."""

import torch

from offload_decode.kv.host_cache import HostKV
from offload_decode.selectors import registry
from offload_decode.testing.selector_contract import LAYER, SelectorContract
from tests.selectors.memory_cases import MemoryCases, assert_best


class TestOracle(SelectorContract, MemoryCases):
    name = "oracle"

    def test_the_best_inner_products_are_selected_with_their_scores(self, case):
        queries = case.queries()
        chosen = case.make("oracle", budget="9").select(2, queries)
        exact = queries.rows @ case.keys(2).transpose(1, 2)
        assert_best(exact, chosen.ids, 9)
        torch.testing.assert_close(chosen.scores, exact.gather(-1, chosen.ids), atol=1e-4, rtol=1e-5)

    def test_an_index_that_is_exact_selects_the_same(self, store):
        queries, host = self.queries(store), HostKV(store, torch.device("cpu"))
        ours, from_index = (
            registry.create(name, {"budget": "6"}, host, store.manifest.shape).select(LAYER, queries)
            for name in ("oracle", "topk")
        )
        torch.testing.assert_close(ours.scores, from_index.scores, atol=1e-5, rtol=1e-5)
        assert torch.equal(ours.ids.sort(-1).values, from_index.ids.sort(-1).values)

    def test_a_budget_of_nothing_is_nothing(self, case):
        queries = case.queries()
        assert case.make("oracle", budget="0").select(2, queries).ids.shape == (*queries.rows.shape[:2], 0)
