"""Chunked prefill writes the keys and values that one unchunked forward pass computes."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from offload_decode.hf.compat import with_cache
from offload_decode.models.loading import wrap
from offload_decode.prefill_jobs import chunks
from offload_decode.prefill_jobs.job import Settings, prefill_tokens
from offload_decode.store.reader import KVStore
from offload_decode.types import Document, LayerKind
from tests.families import VOCAB
from tests.tiny import tiny_model

N = 75


def corpus(n=N):
    return torch.randint(3, VOCAB, (n,), generator=torch.Generator().manual_seed(2)).numpy().astype(np.int32)


def prefilled(model, folder, query_samples=1024, **options):
    tokens = corpus()
    prefill_tokens(
        wrap(model),
        tokens,
        [Document("all", 0, N)],
        folder,
        Settings(options=options, query_samples=query_samples),
    )
    return KVStore.open(folder)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt-oss", "phi3", "mistral-sliding"])
@pytest.mark.parametrize("chunk", [16, 200])
def test_chunked_equals_unchunked(family, chunk, tmp_path, monkeypatch):
    monkeypatch.setattr(chunks, "BLOCK_TOKENS", 20)  # earlier tokens come back in several ragged blocks
    plain = tiny_model(family)
    plain.set_attn_implementation("eager")
    store = prefilled(tiny_model(family), tmp_path / "store", chunk=chunk)
    cache = DynamicCache(config=plain.config)
    with torch.inference_mode():
        plain(torch.from_numpy(corpus()).long()[None], **with_cache(plain, cache))
    for layer, own in enumerate(store.manifest.shape.layers):
        expected = cache.layers[layer]
        if own.kind is LayerKind.SLIDING:
            keys, values = store.window(layer)
        else:
            keys, values = (
                np.stack([read(layer, head) for head in range(store.manifest.shape.kv_heads)])
                for read in (store.keys, store.values)
            )
        assert keys.shape == expected.keys[0].shape
        np.testing.assert_allclose(keys, expected.keys[0], atol=2e-5)
        np.testing.assert_allclose(values, expected.values[0], atol=2e-5)


def test_the_sampled_queries_are_those_of_the_model(tmp_path):
    """With every query sampled, softmax(q·k) of the stored rows is the model's own attention pattern."""
    plain = tiny_model("llama")
    store = prefilled(copy.deepcopy(plain), tmp_path / "store", query_samples=10_000, chunk=16)
    plain.set_attn_implementation("eager")
    with torch.inference_mode():
        patterns = plain(torch.from_numpy(corpus()).long()[None], output_attentions=True).attentions
    shape = store.manifest.shape
    assert len(store.query_positions) == N * shape.group
    for layer in shape.full_layers:
        for head in range(shape.kv_heads):
            queries, keys = (
                torch.from_numpy(store.queries(layer, head).copy()),
                torch.from_numpy(store.keys(layer, head).copy()),
            )
            for sample, position in enumerate(store.query_positions.tolist()):
                own = head * shape.group + int(store.query_heads[sample])
                scores = queries[sample] @ keys[: position + 1].T * shape.head_dim**-0.5
                expected = patterns[layer][0, own, position, : position + 1]
                torch.testing.assert_close(scores.softmax(-1), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_store_keeps_the_dtype_of_the_model(dtype, tmp_path):
    store = prefilled(tiny_model("llama").to(dtype), tmp_path / "store", chunk=16)
    assert store.manifest.dtype == str(dtype).removeprefix("torch.")
    assert store.keys(0, 0).dtype.name == store.manifest.dtype
