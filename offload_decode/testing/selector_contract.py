"""What every selector promises. Inherit, set `name` and `options`, and pytest collects the promises."""

import dataclasses
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from offload_decode.attention.queries import Queries, attend
from offload_decode.attention.rows import Rows
from offload_decode.common.errors import ConfigError
from offload_decode.evals.recorded_queries import selected_ids as by_row
from offload_decode.kv.host_cache import HostKV
from offload_decode.selectors.budgeted import Budgeted
from offload_decode.selectors.registry import create, get
from offload_decode.store.base import Store
from offload_decode.testing import devices
from offload_decode.testing.stores import STORES, WIDTHS, of_parameter
from offload_decode.types import PageSelection, StepStats

LAYER = 1


def selected_ids(budgeted: Budgeted, queries: Queries) -> Tensor | None:
    """Token ids `[Hkv, R, k]` of a selection of tokens or of pages; None for everything."""
    ids = by_row(budgeted.select(LAYER, queries), queries, budgeted.selector.host.length)
    assert ids is None or ids.shape[:2] == queries.vectors.shape[:2]
    return ids


def floats(array: Any) -> Tensor:
    """Stored rows, plain or encoded, in float32 `[N, D]`."""
    return Rows(array).read(slice(None), torch.device("cpu"))


def assert_same(ids: Tensor | None, others: Tensor | None) -> None:
    """The same tokens in the same order, or everything twice."""
    assert (ids is None) == (others is None)
    assert ids is None or others is None or torch.equal(ids, others)


class SelectorContract:
    """Promises of `offload_decode.selectors.base.Selector`, over stores of several shapes."""

    name: ClassVar[str]
    options: ClassVar[dict[str, object]] = {}

    @pytest.fixture(scope="session", params=[*STORES, *WIDTHS], ids=str)
    @classmethod
    def store(cls, request: pytest.FixtureRequest) -> Store:
        """A store of every shape, plain and in fewer bits."""
        return of_parameter(request.param)

    def make(self, store: Store, device: str = "cpu", **options: object) -> Budgeted:
        """The selector over a store, held to its budgets, for a model on `device`."""
        host = HostKV(store, torch.device(device))
        return create(self.name, {**self.options, **options}, host, store.manifest.shape)

    def queries(self, store: Store, seed: int = 6) -> Queries:
        """Queries of a pass of three tokens."""
        shape = store.manifest.shape
        rows = torch.randn(
            shape.kv_heads, 3 * shape.group, shape.head_dim, generator=torch.Generator().manual_seed(seed)
        )
        return Queries(rows, scaling=0.3, group=shape.group, tokens=3)

    def test_it_says_what_it_is(self) -> None:
        kind = get(self.name)
        assert kind.name == self.name
        for attribute in ("paper", "reads", "holds"):
            assert str(getattr(kind, attribute)).strip(), attribute
        assert (kind.__doc__ or "").strip(), "its docstring is what `offload-decode selectors` shows"
        assert dataclasses.fields(kind.options_type)
        kind.options_type()  # every option has a default

    @pytest.mark.parametrize("budget", ["0", "1", "7", "16", "100%", "5000"])
    def test_ids_are_valid_unique_and_within_the_budget(self, store: Store, budget: str) -> None:
        budgeted = self.make(store, budget=budget)
        ids = selected_ids(budgeted, self.queries(store))
        limits = budgeted.selector.budgets[LAYER]
        if ids is None or limits is None:
            return
        assert ids.dtype == torch.int64
        for row in ids.flatten(0, 1).tolist():
            real = [token for token in row if token != -1]
            assert len(set(real)) == len(real) <= limits.largest
            assert all(0 <= token < store.manifest.n_tokens for token in real)

    def test_scores_are_the_inner_products(self, store: Store) -> None:
        queries = self.queries(store)
        selection = self.make(store, budget="9").select(LAYER, queries)
        if isinstance(selection, PageSelection) or selection.ids is None or selection.scores is None:
            pytest.skip("no scores are told")
        for head, (ids, scores) in enumerate(zip(selection.ids, selection.scores, strict=True)):
            keys = floats(store.keys(LAYER, head))
            exact = (queries.vectors[head] @ keys.T).gather(1, ids.clamp(min=0))
            exact = exact.masked_fill(ids < 0, -torch.inf)
            torch.testing.assert_close(scores, exact, atol=1e-4, rtol=1e-4)

    @pytest.mark.parametrize("budget", ["100%", "100000"])
    def test_a_budget_of_everything_is_dense_attention(self, store: Store, budget: str) -> None:
        queries, heads = self.queries(store), range(store.manifest.shape.kv_heads)
        budgeted = self.make(store, budget=budget)
        state = budgeted.selector.host.attend(LAYER, queries, budgeted.select(LAYER, queries), StepStats())
        keys, values = (
            torch.stack([floats(read(LAYER, head)) for head in heads])[None]
            for read in (store.keys, store.values)
        )
        dense = attend(queries.vectors[None], keys, values, 0.3)
        torch.testing.assert_close(state.out, dense.out[0], atol=1e-5, rtol=0)
        torch.testing.assert_close(state.lse, dense.lse[0], atol=1e-5, rtol=0)

    def test_a_dense_layer_selects_everything(self, store: Store) -> None:
        budgeted = self.make(store, budget="1", dense_layers="1")
        assert selected_ids(budgeted, self.queries(store)) is None

    def test_every_head_keeps_to_a_budget_of_its_own(self, store: Store) -> None:
        heads = store.manifest.shape.kv_heads
        budget = "/".join(str(2 * head + 1) for head in range(heads))
        if get(self.name).remembers:
            if heads > 1 and store.manifest.n_tokens > 1:
                with pytest.raises(ConfigError, match="equally many tokens"):
                    self.make(store, budget=budget)
            return
        ids = selected_ids(self.make(store, budget=budget), self.queries(store))
        for head, own in enumerate(() if ids is None else ids):
            assert ((own >= 0).sum(-1) == min(2 * head + 1, store.manifest.n_tokens)).all()

    def test_a_head_with_a_budget_of_everything_is_dense_beside_others(self, store: Store) -> None:
        shape, n = store.manifest.shape, store.manifest.n_tokens
        if shape.kv_heads == 1 or n == 1 or get(self.name).remembers:
            pytest.skip("needs heads that differ")
        budget = "/".join(["1"] * (shape.kv_heads - 1) + ["100%"])
        budgeted, queries = self.make(store, budget=budget), self.queries(store)
        selection = budgeted.select(LAYER, queries)
        state = budgeted.selector.host.attend(LAYER, queries, selection, StepStats())
        keys, values = (
            floats(read(LAYER, shape.kv_heads - 1))[None, None] for read in (store.keys, store.values)
        )
        dense = attend(queries.vectors[None, -1:], keys, values, 0.3)
        torch.testing.assert_close(state.out[-1], dense.out[0, 0], atol=1e-5, rtol=0)
        if (ids := selected_ids(budgeted, queries)) is not None:
            assert ((ids[:-1] >= 0).sum(-1) == 1).all()

    def test_the_same_question_is_given_the_same_tokens(self, store: Store) -> None:
        queries = self.queries(store)
        budgeted, other = self.make(store, budget="7"), self.make(store, budget="7")
        first = selected_ids(budgeted, queries)
        assert_same(selected_ids(other, queries), first)
        budgeted.selector.reset()
        assert_same(selected_ids(budgeted, queries), first)

    def test_a_fork_goes_on_from_here_and_goes_its_own_way(self, store: Store) -> None:
        first, then, other = (self.queries(store, seed) for seed in (6, 7, 8))
        budgeted, alone = self.make(store, budget="7"), self.make(store, budget="7")
        selected_ids(budgeted, first)
        selected_ids(alone, first)
        forked, stray = budgeted.fork(), budgeted.fork()
        selected_ids(stray, other)
        stray.selector.reset()
        expected = selected_ids(alone, then)
        assert_same(selected_ids(forked, then), expected)
        assert_same(selected_ids(budgeted, then), expected)

    def test_a_row_that_chooses_by_itself_chooses_the_same_alone(self, store: Store) -> None:
        budgeted, queries = self.make(store, budget="7"), self.queries(store)
        if not budgeted.selector.per_row or budgeted.selector.one_question:
            pytest.skip("its rows choose together")
        together = selected_ids(budgeted, queries)
        for token in range(queries.tokens):
            rows = queries.by_token()[:, 0, :, token].contiguous()
            alone = selected_ids(budgeted, Queries(rows, queries.scaling, group=queries.group, tokens=1))
            if together is None or alone is None:
                assert together is alone is None
                return
            of_token = together.reshape(len(together), queries.group, queries.tokens, -1)[:, :, token]
            assert_same(alone.sort(-1).values, of_token.sort(-1).values)

    def test_on_a_device_it_chooses_what_it_chooses_on_the_host(self, store: Store) -> None:
        """Host and device do not mix, and numpy does not read what is on a device: docs/extending.md."""
        queries = self.queries(store)
        with devices.beside_device():
            expected = selected_ids(self.make(store, budget="7"), queries)
            with devices.on_device():
                there = dataclasses.replace(queries, vectors=queries.vectors.to("cuda")).sent()
                ids = selected_ids(self.make(store, "cuda", budget="7"), there)
                assert_same(None if ids is None else ids.cpu(), expected)

    def test_an_unknown_option_is_refused(self, store: Store) -> None:
        with pytest.raises(ConfigError, match="no option"):
            self.make(store, colour="green")
