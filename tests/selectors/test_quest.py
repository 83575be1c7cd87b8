"""Quest against its definition, with bounds of every kind; and its two-stage form against the oracle."""

from typing import ClassVar

import pytest
import torch

from offload_decode.attention.pages_reference import page_tokens
from offload_decode.attention.queries import Queries
from offload_decode.common.errors import ConfigError
from offload_decode.kv.host_cache import HostKV
from offload_decode.selectors import quest, registry
from offload_decode.testing.selector_contract import LAYER, SelectorContract, floats, selected_ids
from offload_decode.testing.stores import stored
from offload_decode.types import StepStats


class QuestContract(SelectorContract):
    """Stage one of both selectors searches layer 1, which is dense by default."""

    def make(self, store, device="cpu", **options):
        return super().make(store, device, **{"dense_layers": "", **options})

    @pytest.mark.parametrize(
        "options", [{"page_size": 0}, {"page_size": -3}, {"metadata": "fp8"}, {"corner": 2}]
    )
    def test_options_that_cannot_be_are_refused(self, store, options):
        with pytest.raises(ConfigError, match=r"at least one token|choose one of: fp16, int8|choose 0 to 1"):
            self.make(store, **options)

    def test_a_page_larger_than_the_store_is_one_page(self, store):
        n = store.manifest.n_tokens
        held = self.make(store, page_size=10**23, budget="2")
        assert held.selector.page_size == n
        ids = selected_ids(held, self.queries(store))
        assert ((ids >= 0).sum(-1) == min(2, n)).all()


class TestQuest(QuestContract):
    name = "quest"

    @pytest.mark.parametrize("budget", ["3", "16", "40"])
    def test_chosen_pages_are_the_edges_and_those_of_the_highest_bounds(self, store, budget):
        held, queries = self.make(store, budget=budget), self.queries(store)
        selection = held.select(LAYER, queries)
        if getattr(selection, "pages", None) is None:
            return
        keys = torch.stack([floats(store.keys(LAYER, head)) for head in range(store.manifest.shape.kv_heads)])
        whole, rest = divmod(keys.shape[1], held.selector.page_size)
        pages = keys[:, : whole * held.selector.page_size].unflatten(1, (whole, held.selector.page_size))
        lower, upper = held.selector.bounds(LAYER).widened()
        assert (lower <= pages.amin(2)).all()
        assert (upper >= pages.amax(2)).all()

        chosen = selection.pages
        if rest:
            assert (chosen[:, :, 0] == whole).all()
            chosen = chosen[:, :, 1:]
        rows = queries.by_token()[:, 0].transpose(1, 2)  # [Hkv, T, G, D]
        if held.selector.per_head:
            rows = queries.vectors.unsqueeze(2)
        rows, options = rows.unsqueeze(3), held.selector.options
        middle, reach = (upper + lower) / 2, options.corner * (upper - lower) / 2
        scores = (rows * middle[:, None, None] + rows.abs() * reach[:, None, None]).sum(-1).amax(2)
        if options.edges and chosen.shape[2] >= quest.FEW:
            scores[:, :, :1] = torch.inf
            scores[:, :, whole - (not rest) :] = torch.inf
        best = scores.topk(chosen.shape[2]).values
        torch.testing.assert_close(scores.gather(2, chosen), best, atol=1e-4, rtol=1e-6)

    @pytest.mark.parametrize("budget", ["1", "7", "16", "33"])
    def test_the_budget_is_used_up_and_the_page_being_filled_is_first(self, store, budget):
        held, queries = self.make(store, budget=budget), self.queries(store)
        ids = selected_ids(held, queries)
        if ids is None:
            return
        assert ((ids >= 0).sum(-1) == min(int(budget), store.manifest.n_tokens)).all()
        ragged = store.manifest.n_tokens % held.selector.page_size
        if ragged:
            assert (ids[:, :, 0] == store.manifest.n_tokens - ragged).all()


class TestQuestInt8(TestQuest):
    options: ClassVar[dict[str, object]] = {"metadata": "int8"}


class TestQuestPerHead(TestQuest):
    options: ClassVar[dict[str, object]] = {"per_head": True, "page_size": 3}


class TestQuestPagesOfOne(TestQuest):
    options: ClassVar[dict[str, object]] = {"page_size": 1}


class TestQuestPagesOf7Int8(TestQuest):
    options: ClassVar[dict[str, object]] = {"page_size": 7, "metadata": "int8", "per_head": False}


class TestQuestOfThePaper(TestQuest):
    name = "quest-paper"
    options: ClassVar[dict[str, object]] = {"per_head": False}


class TestQuestTopK(QuestContract):
    name = "quest+topk"

    @pytest.mark.parametrize("budget", ["1", "5", "12"])
    def test_with_pages_for_everything_it_is_exact_top_k(self, store, budget):
        queries = self.queries(store)
        selection = self.make(store, budget=budget, coarse=1000).select(LAYER, queries)
        if selection.ids is None:
            return
        for head in range(store.manifest.shape.kv_heads):
            scores = queries.vectors[head] @ floats(store.keys(LAYER, head)).T
            best = scores.topk(selection.ids.shape[2]).values
            torch.testing.assert_close(scores.gather(1, selection.ids[head]), best, atol=1e-5, rtol=1e-6)
            torch.testing.assert_close(selection.scores[head], best, atol=1e-5, rtol=1e-6)

    @pytest.mark.parametrize("budget", ["4", "9"])
    def test_each_row_takes_its_best_tokens_of_its_groups_pages(self, store, budget):
        held, queries = self.make(store, budget=budget, coarse=2), self.queries(store)
        selection = held.select(LAYER, queries)
        if selection.ids is None:
            return
        tokens = min(2 * int(budget), store.manifest.n_tokens)
        pages = held.selector.best_pages(
            held.selector.bounds(LAYER), store.manifest.n_tokens, held.selector.lists(queries), tokens, True
        )
        ids = page_tokens(pages.pages, pages.page_size, store.manifest.n_tokens, pages.limit)
        if pages.shared:
            ids = ids[:, None].expand(-1, queries.group, -1, -1).flatten(1, 2)
        for head in range(store.manifest.shape.kv_heads):
            scores = queries.vectors[head] @ floats(store.keys(LAYER, head)).T
            own = scores.gather(1, ids[head].clamp(min=0)).masked_fill(ids[head] < 0, -torch.inf)
            best = own.topk(selection.ids.shape[2]).values
            torch.testing.assert_close(selection.scores[head], best, atol=1e-5, rtol=1e-6)

    @pytest.mark.parametrize("coarse", [0, -1])
    def test_a_first_stage_of_nothing_is_refused(self, store, coarse):
        with pytest.raises(ConfigError, match="1 or more"):
            self.make(store, coarse=coarse)


class TestQuestTopKPerHeadInt8(TestQuestTopK):
    options: ClassVar[dict[str, object]] = {"per_head": True, "page_size": 7, "metadata": "int8"}


@pytest.fixture(scope="module")
def batched(tmp_path_factory):
    return stored(tmp_path_factory.mktemp("store"), 90, 4, 2)


@pytest.mark.parametrize("name", ["quest", "quest+topk"])
@pytest.mark.parametrize("per_head", [False, True])
def test_a_batch_is_its_questions_one_by_one(batched, name, per_head, monkeypatch):
    """Rows of a batch, of a question in parts, and of one question alone attend to the same tokens."""
    options = {"budget": "9", "dense_layers": "", "page_size": 3, "per_head": per_head}
    held = registry.create(name, options, HostKV(batched, torch.device("cpu")), batched.manifest.shape)
    rows = torch.randn(2, 2, 2, 5, 16, generator=torch.Generator().manual_seed(1))  # Hkv, batch, G, T, D

    def attended(part):
        queries = Queries(part.flatten(1, 3), 0.3, group=2, tokens=part.shape[3])
        state = held.selector.host.attend(LAYER, queries, held.select(LAYER, queries), StepStats())
        return state.out.reshape(part.shape)

    together = attended(rows)
    for sequence in range(2):
        for token in range(5):
            alone = (slice(None), slice(sequence, sequence + 1), slice(None), slice(token, token + 1))
            torch.testing.assert_close(together[alone], attended(rows[alone]), atol=1e-5, rtol=1e-6)
    monkeypatch.setattr(quest, "SCORES", 100)
    torch.testing.assert_close(attended(rows), together, atol=1e-5, rtol=1e-6)


def test_the_first_two_layers_of_the_model_are_dense_by_default(batched):
    host = HostKV(batched, torch.device("cpu"))
    held = registry.create("quest", {"budget": "4"}, host, batched.manifest.shape)
    assert held.selector.budgets == {0: None, 1: None}


def test_bytes_count_the_pages_that_are_read_once_for_each_kv_head(batched):
    host = HostKV(batched, torch.device("cpu"))
    options = {"budget": "26", "dense_layers": "", "per_head": False}
    held = registry.create("quest", options, host, batched.manifest.shape)
    queries = Queries(torch.ones(2, 6, 16), 0.3, group=2, tokens=3)  # every token's list is the same
    stats = StepStats()
    selection = held.select(LAYER, queries)
    host.attend(LAYER, queries, selection, stats)
    assert selection.pages.shape == (2, 3, 2)  # the ragged page of 10 tokens and one of 16
    assert stats.bytes_moved == 2 * 2 * (10 + 16) * 16 * 4
