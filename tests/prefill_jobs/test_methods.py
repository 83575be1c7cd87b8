"""Sparse prefill: what each method chooses, by its definition, and what becomes of the choice."""

from __future__ import annotations

import filecmp
import os

import numpy as np
import pytest
import torch
from transformers.cache_utils import DynamicCache

from offload_decode.attention.queries import Queries
from offload_decode.errors import ConfigError, StoreMismatch
from offload_decode.kernels.rows import Rows
from offload_decode.models.loading import wrap
from offload_decode.store.reader import KVStore
from offload_decode.types import Document, LayerKind, ModelShape
from prefill_jobs.job import Settings, prefill_tokens
from prefill_jobs.methods.registry import METHODS, create
from tests.families import VOCAB
from tests.tiny import tiny_model

N, CHUNK = 90, 16
SPARSE = sorted(set(METHODS) - {"dense"})
SHAPE = ModelShape.uniform((LayerKind.FULL, LayerKind.FULL), query_heads=4, kv_heads=2, head_dim=8)


class Written:
    """Forty earlier tokens of two layers, drawn at random."""

    length = 40

    def drawn(self, layer, head):
        generator = torch.Generator().manual_seed(10 * layer + head)
        return torch.randn(self.length, 8, generator=generator) * torch.linspace(0.2, 3, self.length)[:, None]

    def keys(self, layer, head):
        return Rows(self.drawn(layer, head).numpy())

    def key_norms(self, layer, head):
        return self.drawn(layer, head).norm(dim=-1)


def asked(tokens=12):
    rows = torch.randn(2, 2 * tokens, 8, generator=torch.Generator().manual_seed(3)) + 0.5
    return Queries(rows, scaling=0.3, group=2, tokens=tokens)


def unit(vectors):
    return vectors / vectors.norm(dim=-1, keepdim=True)


def chosen(name, **options):
    ids = create(name, options, SHAPE).select(1, asked(), Written())
    assert ids.shape[0] == 2
    assert all(len(set(row)) == len(row) for row in ids.tolist())
    return [set(row) for row in ids.tolist()]


def prefilled(folder, method="dense", progress=lambda *_: None, model=None, **options):
    tokens = np.random.default_rng(2).integers(3, VOCAB, N).astype(np.int32)
    settings = Settings(method, {"chunk": CHUNK, **options})
    loaded = wrap(model if model is not None else tiny_model("llama"))
    prefill_tokens(loaded, tokens, [Document("all", 0, N)], folder, settings, progress=progress)
    return KVStore.open(folder)


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
@pytest.mark.parametrize("reduce", ["max", "mean"])
def test_quoka_is_algorithm_1(similarity, reduce):
    found = chosen("quoka", budget="9", queries="4", similarity=similarity, reduce=reduce)
    for head, rows in enumerate(asked().rows.unflatten(1, (2, 12))):
        kept = [own[(unit(own) @ unit(own.mean(0))).argsort()[:4]] for own in rows]
        keys = Written().drawn(1, head)
        if similarity == "cosine":
            kept, keys = [unit(own) for own in kept], unit(keys)
        scores = (sum(kept) / 2) @ keys.T
        scores = scores.amax(0) if reduce == "max" else scores.mean(0)
        assert found[head] == set(scores.topk(9).indices.tolist())


def test_sample_takes_what_evenly_sampled_queries_attend_to():
    found = chosen("sample", budget="25%", queries="3")
    for head, rows in enumerate(asked().rows.unflatten(1, (2, 12))):
        logits = 0.3 * rows[:, [2, 6, 10]] @ Written().drawn(1, head).T
        assert found[head] == set(logits.softmax(-1).sum((0, 1)).topk(10).indices.tolist())


def test_window_takes_the_first_and_the_last():
    assert chosen("window", budget="10") == [{0, 1, 2, 3, *range(34, 40)}] * 2
    assert chosen("window", budget="3") == [{0, 1, 2}] * 2


@pytest.mark.parametrize("method", SPARSE)
@pytest.mark.parametrize(("budget", "sizes"), [("5", (5, 5)), ("10%", (4, 4)), ("3,20%", (3, 8))])
def test_a_budget_is_a_count_or_a_share_of_what_came_before(method, budget, sizes):
    of_method = create(method, {"budget": budget}, SHAPE)
    for layer, size in enumerate(sizes):
        assert of_method.select(layer, asked(), Written()).shape == (2, size)


@pytest.mark.parametrize("method", SPARSE)
@pytest.mark.parametrize("budget", ["100%", str(N)])
def test_a_budget_of_everything_is_dense_prefill_bit_for_bit(method, budget, tmp_path):
    dense, sparse = prefilled(tmp_path / "dense"), prefilled(tmp_path / "sparse", method, budget=budget)
    for layer in dense.manifest.shape.full_layers:
        for head in range(dense.manifest.shape.kv_heads):
            assert np.array_equal(dense.keys(layer, head), sparse.keys(layer, head))
            assert np.array_equal(dense.values(layer, head), sparse.values(layer, head))


@pytest.mark.parametrize("method", SPARSE)
def test_a_chunk_attends_to_itself_and_to_what_was_chosen(method, tmp_path, monkeypatch):
    """The keys and values of layer 1 are those of plain transformers under a mask of layer 0's choices."""
    mask = torch.zeros(1, 4, N, N, dtype=torch.bool)
    for start in range(0, N, CHUNK):
        part = slice(start, start + CHUNK)
        mask[:, :, part, part] = torch.ones(CHUNK, CHUNK).tril().bool()[: N - start, : N - start]
    kind = METHODS[method]
    select = kind.select

    def watched(self, layer, queries, earlier):
        ids = select(self, layer, queries, earlier)
        if layer == 0:
            kept = range(earlier.length) if ids is None else ids
            for head in range(4):
                own = kept if ids is None else kept[head // 2]
                mask[0, head, earlier.length : earlier.length + CHUNK, own] = True
        return ids

    monkeypatch.setattr(kind, "select", watched)
    store = prefilled(tmp_path / "store", method, budget="30%")
    assert not mask.tril().equal(torch.ones_like(mask).tril())

    plain = tiny_model("llama")
    plain.set_attn_implementation("eager")
    cache = DynamicCache(config=plain.config)
    with torch.inference_mode():
        added = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
        plain(torch.from_numpy(store.tokens.copy()).long()[None], attention_mask=added, past_key_values=cache)
    for stored, expected in ((store.keys, cache.layers[1].keys), (store.values, cache.layers[1].values)):
        for head in range(2):
            np.testing.assert_allclose(stored(1, head), expected[0, head], atol=2e-5)


def test_the_store_says_how_it_was_made(tmp_path):
    store = prefilled(tmp_path / "store", "quoka", budget="25%", reduce="mean")
    assert store.manifest.prefill == {
        "method": "quoka",
        "chunk": CHUNK,
        "budget": "25%",
        "queries": 16,
        "similarity": "cosine",
        "reduce": "mean",
    }


@pytest.mark.parametrize("method", SPARSE)
def test_interrupted_and_resumed_is_the_same_bytes(method, tmp_path):
    class Stopped(Exception):
        pass

    def stop(stage, done, total):
        if stage == "prefill" and done == 3 * CHUNK:
            raise Stopped

    prefilled(tmp_path / "whole", method, budget="20%")
    with pytest.raises(Stopped):
        prefilled(tmp_path / "again", method, stop, budget="20%")
    with pytest.raises(StoreMismatch, match="another prefill"):
        prefilled(tmp_path / "again", method, budget="21%")
    prefilled(tmp_path / "again", method, budget="20%")
    files = [
        os.path.relpath(os.path.join(folder, name), tmp_path / "whole")
        for folder, _, names in os.walk(tmp_path / "whole")
        for name in names
    ]
    same, different, missing = filecmp.cmpfiles(tmp_path / "whole", tmp_path / "again", files, shallow=False)
    assert (len(same), different, missing) == (len(files), [], [])


@pytest.mark.parametrize(
    ("method", "options", "said"),
    [
        ("quaka", {}, "unknown prefill method 'quaka'; known are: dense, quoka, sample, window"),
        ("dense", {"budget": "5"}, "prefill method 'dense' has no option 'budget'; it has: chunk"),
        ("dense", {"chunk": "0"}, "chunk 0 is out of range"),
        ("quoka", {"chunk": "-1"}, "chunk -1 is out of range"),
        ("quoka", {"budget": "mass=0.9"}, "cannot be used by a prefill: give a count"),
        ("window", {"budget": "3/4"}, "cannot be used by a prefill: give a count"),
        ("window", {"budget": "much"}, "none of these: a count"),
        ("sample", {"budget": "1,2,3"}, "lists 3 layers, but 2 layers are searched"),
        ("sample", {"queries": "0"}, "queries 0 is out of range"),
        ("quoka", {"similarity": "cos"}, "unknown similarity 'cos'"),
    ],
)
def test_mistakes_show_before_the_first_chunk(method, options, said):
    with pytest.raises(ConfigError, match=said):
        create(method, options, SHAPE)
