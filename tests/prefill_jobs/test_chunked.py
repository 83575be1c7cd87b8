"""Chunked prefill writes the keys and values that one unchunked forward pass computes. `chunk=auto`: as many
tokens as fit a card, as ever on a CPU; what was begun goes on as it was begun.
"""

import copy
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from offload_decode.attention import dense
from offload_decode.attention.dense import attend_bf16
from offload_decode.common.errors import ConfigError, StoreMismatch
from offload_decode.hf.compat import with_cache
from offload_decode.kv.placement import RESERVE
from offload_decode.models.loading import wrap
from offload_decode.models.size_estimate import estimate_of
from offload_decode.planning.sizes import CARD_CHUNKS, CPU_CHUNK, prefill_bytes
from offload_decode.prefill_jobs import chunks, job
from offload_decode.prefill_jobs.destinations import destination_of
from offload_decode.prefill_jobs.job import Settings, chunk_for, prefill_tokens
from offload_decode.store.reader import KVStore
from offload_decode.types import Document, LayerKind
from tests.card import stand_in
from tests.families import VOCAB
from tests.prefill_jobs.killing import tree
from tests.tiny import eager, tiny_model, token_store

N = 75
TOKENS = torch.randint(3, VOCAB, (N,), generator=torch.Generator().manual_seed(2)).numpy().astype(np.int32)
DOCUMENTS = [Document("all", 0, N)]


def prefilled(model, folder, chunk, **settings):
    return KVStore.open(token_store(folder, wrap(model), TOKENS, chunk, **settings))


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt-oss", "phi3", "mistral-sliding"])
@pytest.mark.parametrize("chunk", [16, 200])
def test_chunked_equals_unchunked(family, chunk, tmp_path, monkeypatch):
    monkeypatch.setattr(chunks, "BLOCK_TOKENS", 20)  # earlier tokens come back in several ragged blocks
    plain = eager(tiny_model(family))
    store = prefilled(tiny_model(family), tmp_path / "store", chunk=chunk)
    cache = DynamicCache(config=plain.config)
    with torch.inference_mode():
        plain(torch.from_numpy(TOKENS).long()[None], **with_cache(plain, cache))
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
        patterns = plain(torch.from_numpy(TOKENS).long()[None], output_attentions=True).attentions
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


MEASURED = """
import sys
import numpy as np
from pathlib import Path
from offload_decode.models.loading import wrap
from offload_decode.types import Document
from offload_decode.prefill_jobs import chunks
from offload_decode.prefill_jobs.job import prefill_tokens
from tests.tiny import tiny_model
n = int(sys.argv[2])
chunks.BLOCK_TOKENS = 1024  # both runs hold whole blocks
model = tiny_model(num_key_value_heads=4, head_dim=128)
tokens = np.random.default_rng(0).integers(3, 131, n).astype(np.int32)
report = prefill_tokens(wrap(model), tokens, [Document("all", 0, n)], Path(sys.argv[1]))
print(report.peak_memory, report.bytes)
"""


def measured(folder, tokens):
    command = [sys.executable, "-c", MEASURED, str(folder / str(tokens)), str(tokens)]
    out = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout
    return [int(number) for number in out.split()]


@pytest.mark.slow
def test_memory_stays_while_the_store_grows(tmp_path):
    (short, little), (long, much) = measured(tmp_path, 3_000), measured(tmp_path, 15_000)
    assert much - little > 140e6
    assert long - short < 0.25 * (much - little)


def half_prefilled(folder: Path, kv: str = "auto") -> KVStore:
    tokens = np.random.default_rng(2).integers(3, VOCAB, 300).astype(np.int32)
    model = wrap(tiny_model("llama").to(torch.bfloat16))
    return KVStore.open(token_store(folder, model, tokens, chunk=64, kv=kv))


def last_values(store: KVStore) -> np.ndarray:
    layer = store.manifest.shape.full_layers[-1]
    heads = range(store.manifest.shape.kv_heads)
    return np.stack([np.asarray(store.values(layer, head), np.float32) for head in heads])


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many keys were met at once in products of bfloat16."""
    met: list[int] = []

    def noted(*given: torch.Tensor) -> object:
        met.append(given[1].shape[2])
        return attend_bf16(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(dense, "attend_bf16", noted)
    return met


def test_the_store_is_that_of_float32_products_but_for_rounding(taken, tmp_path, monkeypatch):
    monkeypatch.setattr(dense, "has_bf16_products", lambda: False)
    wanted = last_values(half_prefilled(tmp_path / "without"))
    assert not taken
    monkeypatch.setattr(dense, "has_bf16_products", lambda: True)
    found = last_values(half_prefilled(tmp_path / "with"))
    assert set(taken) == {64, 128, 192}, "a last chunk of 44 rows is too short"
    off = np.abs(found - wanted).max() / np.abs(wanted).max()
    assert 0 < off < 2**-5, "values that went through a model in bfloat16"


def test_rows_in_fewer_bits_are_met_in_float32(taken, tmp_path, monkeypatch):
    monkeypatch.setattr(dense, "has_bf16_products", lambda: True)
    half_prefilled(tmp_path / "store", kv="int4-values")
    assert not taken


# The chunk that fits


def test_a_gpu_takes_as_many_tokens_as_fit():
    with stand_in() as card:
        loaded = wrap(tiny_model().to("cuda"))
        about = estimate_of(loaded.model, "tiny", loaded.shape)
        assert chunk_for(loaded, 1 << 20, "auto") == CARD_CHUNKS[0] == 32_768
        for chunk, fewer in pairwise(CARD_CHUNKS):
            need = prefill_bytes(about, chunk, 1 << 20, True) + torch.cuda.memory_allocated()
            card.memory.total = need * RESERVE // (RESERVE - 1) + RESERVE
            assert chunk_for(loaded, 1 << 20, "auto") == chunk
            card.memory.total -= need // 1000
            assert chunk_for(loaded, 1 << 20, "auto") == fewer
        card.memory.total = 1000
        assert chunk_for(loaded, 1 << 20, "auto") == CPU_CHUNK == 512, (
            "and what does not fit fails as it runs"
        )


def test_a_memory_cap_counts():
    with stand_in(1 << 40):
        loaded = wrap(tiny_model().to("cuda"))
        torch.cuda.set_per_process_memory_fraction(2**-14)
        assert chunk_for(loaded, 1 << 20, "auto") < CARD_CHUNKS[0]


def test_on_a_cpu_the_chunk_is_512(tmp_path):
    prefill_tokens(wrap(tiny_model()), TOKENS, DOCUMENTS, tmp_path / "store")
    assert KVStore.open(tmp_path / "store").manifest.prefill == {"method": "dense", "chunk": 512}


@pytest.mark.parametrize(
    ("method", "options", "chunk"),
    [
        ("dense", {}, None),
        ("dense", {"chunk": "auto"}, None),
        ("dense", {"chunk": "64"}, 64),
        ("quoka", {}, 512),
        ("quoka", {"chunk": " auto "}, None),
    ],
)
def test_methods_that_choose_by_chunks_keep_their_default_chunk(method, options, chunk):
    assert Settings(method, options).chunk == chunk


def test_invalid_chunk_is_refused():
    with pytest.raises(ConfigError, match="chunk must be int, not 'large'"):
        Settings(options={"chunk": "large"})


class Stopped(Exception):
    pass


def test_begun_and_finished_stores_keep_their_chunk_though_another_fits_now(tmp_path, monkeypatch):
    def stop(stage, done, total):
        if done == 48:
            raise Stopped

    loaded, path = wrap(tiny_model()), tmp_path / "store"
    prefill_tokens(loaded, TOKENS, DOCUMENTS, tmp_path / "told", Settings(options={"chunk": 16}))
    monkeypatch.setattr(job, "CARD_CHUNKS", (64, 32, 16))
    fits = [16]
    monkeypatch.setattr(job, "chunk_for", lambda *_: fits[-1])
    with pytest.raises(Stopped):
        prefill_tokens(loaded, TOKENS, DOCUMENTS, path, progress=stop)
    fits.append(32)
    with pytest.raises(StoreMismatch, match="another prefill"):
        prefill_tokens(loaded, TOKENS, DOCUMENTS, path, Settings(options={"chunk": 32}))
    prefill_tokens(loaded, TOKENS, DOCUMENTS, path)
    assert tree(path) == tree(tmp_path / "told")
    work = job._planned(loaded, Settings(), None, TOKENS, DOCUMENTS)
    assert work.method.options.chunk == 32
    assert job.settled(work, destination_of(path)).kept
    with pytest.raises(StoreMismatch):
        job.settled(replace(work, chosen=False), destination_of(path))
