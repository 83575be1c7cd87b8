"""Each selector against its contract and its definition; and that adding one takes one file."""

import re
from typing import ClassVar

import pytest
import torch

from offload_decode.common.errors import ConfigError
from offload_decode.kv.host_cache import HostKV
from offload_decode.prefill_jobs.indexing import build_indexes
from offload_decode.selectors import registry
from offload_decode.testing.selector_contract import LAYER, SelectorContract, floats
from offload_decode.testing.stores import stored
from offload_decode.types import StepStats
from tests.long_stores import FORMS, cells_read, long_store, rebuilt
from tests.selectors.memory_cases import MemoryCases, assert_best


class TestTopKFlat(SelectorContract):
    name = "topk"

    def test_the_selected_keys_are_the_highest_scored(self, store):
        queries = self.queries(store)
        selection = self.make(store, budget="5").select(LAYER, queries)
        for head in range(store.manifest.shape.kv_heads):
            scores = queries.vectors[head] @ floats(store.keys(LAYER, head)).T
            best = scores.topk(min(5, scores.shape[1])).values.sort(-1).values
            chosen = scores.gather(1, selection.ids[head]).sort(-1).values
            torch.testing.assert_close(chosen, best, atol=1e-5, rtol=0)


class TestOracle(SelectorContract, MemoryCases):
    name = "oracle"

    def test_the_best_inner_products_are_selected_with_their_scores(self, case):
        queries = case.queries()
        chosen = case.make("oracle", budget="9").select(2, queries)
        exact = queries.vectors @ case.keys(2).transpose(1, 2)
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
        assert case.make("oracle", budget="0").select(2, queries).ids.shape == (*queries.vectors.shape[:2], 0)


class TestTopKClusters(SelectorContract):
    """The default kind, on stores that it prunes: against flat search and against plain attention."""

    name = "topk"

    @pytest.fixture(scope="class", params=FORMS, ids="-".join)
    @classmethod
    def store(cls, request, tmp_path_factory):
        return long_store(tmp_path_factory.mktemp("store") / "long.kv", *request.param)

    def test_it_is_what_is_searched_by_default(self, store):
        assert self.make(store).selector.report()["index"] == "clusters"

    @pytest.mark.parametrize("k", [1, 16, 64, 256])
    def test_cells_are_left_out(self, store, k):
        index = rebuilt(store, LAYER, 0)
        read = [cells_read(index, query.numpy(), k) for query in self.queries(store).vectors[0]]
        assert 0 < max(read) < len(index.cells.counts)

    @pytest.mark.parametrize("k", [1, 16, 64, 256])
    def test_nearly_all_of_the_best_keys_are_found(self, store, k):
        queries = self.queries(store)
        selection = self.make(store, budget=str(k)).select(LAYER, queries)
        shares, masses = [], []
        for head, ids in enumerate(selection.ids):
            scores = queries.vectors[head] @ floats(store.keys(LAYER, head)).T
            best, found = scores.topk(k), scores.gather(1, ids)
            shares.append((found >= best.values[:, -1:] - 1e-4).float().mean(1))
            masses.append((found.logsumexp(1) - best.values.logsumexp(1)).exp())
        assert torch.cat(shares).mean() > 0.95
        assert torch.cat(masses).min() > 0.98, "a key that is missed is one of the least of the best"

    def test_attention_is_that_of_flat_search_but_for_what_is_missed(self, store):
        queries = self.queries(store)
        clusters, flat = (self.make(store, budget="64", index=index) for index in ("clusters", "flat"))
        chosen, best = clusters.select(LAYER, queries), flat.select(LAYER, queries)
        ours = clusters.selector.host.attend(LAYER, queries, chosen, StepStats())
        theirs = flat.selector.host.attend(LAYER, queries, best, StepStats())
        for head in range(store.manifest.shape.kv_heads):
            keys, values = (floats(read(LAYER, head)) for read in (store.keys, store.values))
            scores = 0.3 * queries.vectors[head] @ keys.T
            others = torch.ones_like(scores, dtype=torch.bool).scatter_(1, chosen.ids[head], False)
            plain = scores.masked_fill(others, -torch.inf)
            torch.testing.assert_close(ours.out[head], plain.softmax(1) @ values, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(ours.lse[head], plain.logsumexp(1), atol=1e-5, rtol=1e-5)
            # Where a share of the weights goes to other tokens, the output moves by that share of a distance.
            weights = (scores.softmax(1).clone(), scores.softmax(1).clone())
            weights[0].masked_fill_(others, 0)
            weights[1][torch.ones_like(others).scatter_(1, best.ids[head], False)] = 0
            ours_w, best_w = (each / each.sum(1, keepdim=True) for each in weights)
            moved = (ours_w - best_w).abs().sum(1)
            assert moved.mean() < 0.05
            limit = moved * values.norm(dim=1).max() + 1e-4
            assert ((ours.out[head] - theirs.out[head]).norm(dim=1) <= limit).all()


class TestTopKFaissIvf(SelectorContract):
    name = "topk"
    options: ClassVar[dict[str, object]] = {"index": "faiss-ivf"}

    @pytest.fixture(scope="class", params=[(130, 4, 2), (130, 4, 2, "int8")], ids=str)
    @classmethod
    def store(cls, request, tmp_path_factory):
        pytest.importorskip("faiss")
        store = stored(tmp_path_factory.mktemp("store"), *request.param)
        build_indexes(store.path, "faiss-ivf", recall=1.0, k=130)
        return store


class TestDense(SelectorContract):
    name = "dense"


def test_an_unknown_selector_names_the_known_ones():
    with pytest.raises(ConfigError, match=re.escape(f"known are: {', '.join(registry.names())}")):
        registry.get("nearest")
