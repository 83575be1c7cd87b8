"""`chunk=auto`: as many tokens as fit a card, as ever on a CPU; what was begun goes on as it was begun."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from offload_decode.common.errors import ConfigError, StoreMismatch
from offload_decode.kv.placement import RESERVE
from offload_decode.models.loading import wrap
from offload_decode.models.size_estimate import outline_of
from offload_decode.planning.sizes import CARD_CHUNKS, CPU_CHUNK, prefill_bytes
from offload_decode.prefill_jobs import job
from offload_decode.prefill_jobs.destinations import destination_of
from offload_decode.prefill_jobs.job import Settings, chunk_for, prefill_tokens
from offload_decode.store.reader import KVStore
from offload_decode.types import Document
from tests.card import stand_in
from tests.families import VOCAB
from tests.prefill_jobs.killing import tree
from tests.tiny import tiny_model

N = 90
TOKENS = np.random.default_rng(2).integers(3, VOCAB, N).astype(np.int32)
DOCUMENTS = [Document("all", 0, N)]


def test_a_gpu_takes_as_many_tokens_as_fit():
    with stand_in() as card:
        loaded = wrap(tiny_model().to("cuda"))
        about = outline_of(loaded.model, "tiny", loaded.shape)
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
    work = job._planned(loaded, TOKENS, DOCUMENTS, Settings(), "plain", ())
    assert work.method.options.chunk == 32
    assert job.settled(work, destination_of(path)).kept
    with pytest.raises(StoreMismatch):
        job.settled(replace(work, chosen=False), destination_of(path))
