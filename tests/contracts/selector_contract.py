"""What every selector promises. Inherit, set `name` and `options`, and pytest collects the promises.

A fixture `store` gives the stores.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest
import torch

from indexes.rows.encodings import encode
from offload_decode.attention.queries import Queries
from offload_decode.attention.states import attend
from offload_decode.errors import ConfigError
from offload_decode.kernels.rows import Rows
from offload_decode.kv.host import HostKV
from offload_decode.models.loading import wrap
from offload_decode.pages.reference import page_tokens
from offload_decode.selectors.registry import create, get
from offload_decode.store.format import kv_encodings
from offload_decode.store.memory import MemoryStore
from offload_decode.store.reader import KVStore
from offload_decode.types import (
    Document,
    LayerKind,
    LayerShape,
    ModelShape,
    PageSelection,
    Selection,
    StepStats,
)
from prefill_jobs.job import Settings, prefill_tokens
from tests.families import VOCAB
from tests.tiny import tiny_model

LAYER = 1


def stored(folder, tokens, heads, kv_heads, kv="auto"):
    """A store of a random Llama; its sizes are ragged against pages of 16 tokens."""
    ids = (
        torch.randint(3, VOCAB, (tokens,), generator=torch.Generator().manual_seed(5))
        .numpy()
        .astype(np.int32)
    )
    model = tiny_model(
        "llama",
        hidden_size=8 * heads,  # which transformers wants to be a multiple of the heads
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        num_hidden_layers=2,
    )
    settings = Settings(options={"chunk": 64}, kv=kv)
    prefill_tokens(wrap(model), ids, [Document("all", 0, tokens)], folder / "store", settings)
    return KVStore.open(folder / "store")


def of_widths(tokens, heads, kv_heads, key_dim, value_dim, kv="auto", latent=False):
    """A store of random rows whose values have a width of their own, or are their keys."""
    full = LayerShape(LayerKind.FULL, kv_heads, key_dim, value_dim, latent=latent)
    rng, rows = np.random.default_rng(5), (2, kv_heads, tokens)
    keys, values = (rng.standard_normal((*rows, dim), np.float32) for dim in (key_dim, value_dim))
    queries = rng.standard_normal((2, kv_heads, heads // kv_heads * tokens // 2, key_dim), np.float32)
    keys, values = (
        encode(part, encoding) if encoding else part
        for part, encoding in zip((keys, values), kv_encodings(kv), strict=True)
    )
    return MemoryStore(ModelShape((full, full), heads), keys, keys if latent else values, queries=queries)


def selected_ids(held, queries):
    """Token ids `[Hkv, R, k]` of a selection of tokens or of pages; None for everything."""
    selection = held.select(LAYER, queries)
    if isinstance(selection, Selection):
        assert selection.ids is None or selection.ids.shape[:2] == queries.rows.shape[:2]
        return selection.ids
    ids = page_tokens(selection.pages, selection.page_size, held.selector.host.length, selection.limit)
    if not selection.shared:
        return ids
    ids = ids.unflatten(1, (queries.batch, 1, queries.tokens)).expand(-1, -1, queries.group, -1, -1)
    return ids.flatten(1, 3)


def floats(array):
    """Stored rows, plain or encoded, in float32 `[N, D]`."""
    return Rows(array).read(slice(None), torch.device("cpu"))


class SelectorContract:
    """Promises of `offload_decode.selection.selector.Selector`."""

    name: ClassVar[str]
    options: ClassVar[dict[str, object]] = {}

    def make(self, store, **options):
        host = HostKV(store, torch.device("cpu"))
        return create(self.name, {**self.options, **options}, host, store.manifest.shape)

    def queries(self, store):
        shape = store.manifest.shape
        rows = torch.randn(
            shape.kv_heads, 3 * shape.group, shape.head_dim, generator=torch.Generator().manual_seed(6)
        )
        return Queries(rows, scaling=0.3, group=shape.group, tokens=3)

    @pytest.mark.parametrize("budget", ["0", "1", "7", "16", "100%", "5000"])
    def test_ids_are_valid_unique_and_within_the_budget(self, store, budget):
        held = self.make(store, budget=budget)
        ids = selected_ids(held, self.queries(store))
        if ids is None:
            return
        for row in ids.flatten(0, 1).tolist():
            real = [token for token in row if token >= 0]
            assert len(set(real)) == len(real) <= held.selector.budgets[LAYER].largest
            assert all(token < store.manifest.n_tokens for token in real)

    def test_scores_are_the_inner_products(self, store):
        queries = self.queries(store)
        selection = self.make(store, budget="9").select(LAYER, queries)
        if isinstance(selection, PageSelection) or selection.ids is None or selection.scores is None:
            pytest.skip("no scores are told")
        for head, (ids, scores) in enumerate(zip(selection.ids, selection.scores, strict=True)):
            keys = floats(store.keys(LAYER, head))
            exact = (queries.rows[head] @ keys.T).gather(1, ids.clamp(min=0))
            exact = exact.masked_fill(ids < 0, -torch.inf)
            torch.testing.assert_close(scores, exact, atol=1e-4, rtol=1e-4)

    @pytest.mark.parametrize("budget", ["100%", "100000"])
    def test_a_budget_of_everything_is_dense_attention(self, store, budget):
        queries, heads = self.queries(store), range(store.manifest.shape.kv_heads)
        held = self.make(store, budget=budget)
        state = held.selector.host.attend(LAYER, queries, held.select(LAYER, queries), StepStats())
        keys, values = (
            torch.stack([floats(read(LAYER, head)) for head in heads])[None]
            for read in (store.keys, store.values)
        )
        dense = attend(queries.rows[None], keys, values, 0.3)
        torch.testing.assert_close(state.out, dense.out[0], atol=1e-5, rtol=0)
        torch.testing.assert_close(state.lse, dense.lse[0], atol=1e-5, rtol=0)

    def test_a_dense_layer_selects_everything(self, store):
        held = self.make(store, budget="1", dense_layers="1")
        assert selected_ids(held, self.queries(store)) is None

    def test_every_head_keeps_to_a_budget_of_its_own(self, store):
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

    def test_a_head_with_a_budget_of_everything_is_dense_beside_others(self, store):
        shape, n = store.manifest.shape, store.manifest.n_tokens
        if shape.kv_heads == 1 or n == 1 or get(self.name).remembers:
            pytest.skip("needs heads that differ")
        budget = "/".join(["1"] * (shape.kv_heads - 1) + ["100%"])
        held, queries = self.make(store, budget=budget), self.queries(store)
        selection = held.select(LAYER, queries)
        state = held.selector.host.attend(LAYER, queries, selection, StepStats())
        keys, values = (
            floats(read(LAYER, shape.kv_heads - 1))[None, None] for read in (store.keys, store.values)
        )
        dense = attend(queries.rows[None, -1:], keys, values, 0.3)
        torch.testing.assert_close(state.out[-1], dense.out[0, 0], atol=1e-5, rtol=0)
        if (ids := selected_ids(held, queries)) is not None:
            assert ((ids[:-1] >= 0).sum(-1) == 1).all()

    def test_an_unknown_option_is_refused(self, store):
        with pytest.raises(ConfigError, match="no option"):
            self.make(store, colour="green")
