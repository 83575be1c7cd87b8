"""What every selector promises. Inherit, set `name` and `options`, and pytest collects the promises."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest
import torch

from offload_decode.attention import attend
from offload_decode.errors import ConfigError
from offload_decode.kv import HostKV, tensor_view
from offload_decode.models.loading import wrap
from offload_decode.selectors.registry import create
from offload_decode.store.reader import KVStore
from offload_decode.types import Document, StepStats
from prefill_jobs.job import prefill_tokens
from tests.tiny import VOCAB, tiny_model

LAYER, ROWS = 1, 6


def stored(folder, tokens, heads, kv_heads):
    """A store of a random Llama; its sizes are ragged against pages of 16 tokens."""
    ids = (
        torch.randint(3, VOCAB, (tokens,), generator=torch.Generator().manual_seed(5))
        .numpy()
        .astype(np.int32)
    )
    model = tiny_model("llama", num_attention_heads=heads, num_key_value_heads=kv_heads, num_hidden_layers=2)
    prefill_tokens(wrap(model), ids, [Document("all", 0, tokens)], folder / "store", chunk=64)
    return KVStore.open(folder / "store")


class SelectorContract:
    """Promises of `offload_decode.selectors.base.Selector`."""

    name: ClassVar[str]
    options: ClassVar[dict[str, object]] = {}

    @pytest.fixture(scope="class", params=[(1, 4, 2), (37, 4, 4), (130, 8, 1)], ids=str)
    @classmethod
    def store(cls, request, tmp_path_factory):
        return stored(tmp_path_factory.mktemp("store"), *request.param)

    def make(self, store, **options):
        host = HostKV(store, torch.device("cpu"))
        return create(self.name, {**self.options, **options}, host, store.manifest.shape)

    def queries(self, store):
        shape = store.manifest.shape
        return torch.randn(shape.kv_heads, ROWS, shape.head_dim, generator=torch.Generator().manual_seed(6))

    @pytest.mark.parametrize("budget", ["0", "1", "7", "16", "100%", "5000"])
    def test_ids_are_valid_unique_and_within_the_budget(self, store, budget):
        selector = self.make(store, budget=budget)
        selection = selector.select(LAYER, self.queries(store))
        if selection.ids is None:
            return
        n = store.manifest.n_tokens
        k = selector.budgets[LAYER]
        assert selection.ids.shape[:2] == (store.manifest.shape.kv_heads, ROWS)
        assert selection.ids.shape[2] <= k
        for row in selection.ids.flatten(0, 1).tolist():
            real = [token for token in row if token >= 0]
            assert len(set(real)) == len(real)
            assert all(token < n for token in real)

    def test_scores_are_the_inner_products(self, store):
        queries = self.queries(store)
        selection = self.make(store, budget="9").select(LAYER, queries)
        if selection.ids is None or selection.scores is None:
            return
        for head, (ids, scores) in enumerate(zip(selection.ids, selection.scores, strict=True)):
            keys = tensor_view(store.keys(LAYER, head)).float()
            exact = (queries[head] @ keys.T).gather(1, ids.clamp(min=0))
            exact = exact.masked_fill(ids < 0, -torch.inf)
            torch.testing.assert_close(scores, exact, atol=1e-4, rtol=1e-4)

    @pytest.mark.parametrize("budget", ["100%", "100000"])
    def test_a_budget_of_everything_is_dense_attention(self, store, budget):
        queries, heads = self.queries(store), range(store.manifest.shape.kv_heads)
        selector = self.make(store, budget=budget)
        state = selector.host.attend(LAYER, queries, selector.select(LAYER, queries), 0.3, None, StepStats())
        keys, values = (
            torch.stack([tensor_view(read(LAYER, head)) for head in heads])[None]
            for read in (store.keys, store.values)
        )
        dense = attend(queries[None], keys, values, 0.3)
        torch.testing.assert_close(state.out, dense.out[0], atol=1e-5, rtol=0)
        torch.testing.assert_close(state.lse, dense.lse[0], atol=1e-5, rtol=0)

    def test_a_dense_layer_selects_everything(self, store):
        selector = self.make(store, budget="1", dense_layers="1")
        assert selector.select(LAYER, self.queries(store)).ids is None

    def test_an_unknown_option_is_refused(self, store):
        with pytest.raises(ConfigError, match="no option"):
            self.make(store, colour="green")
