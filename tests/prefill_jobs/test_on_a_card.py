"""A prefill on a card: what stays there, what comes and what is written behind it change no bit."""

import shutil
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from offload_decode.common.errors import StoreError
from offload_decode.kv.placement import RESERVE
from offload_decode.models.loading import wrap
from offload_decode.prefill_jobs import chunks, gpu_blocks
from offload_decode.prefill_jobs.chunks import AsyncWriter
from offload_decode.prefill_jobs.continuing import replaced
from offload_decode.prefill_jobs.gpu_blocks import GPUBlocks
from offload_decode.prefill_jobs.job import Settings, prefill_tokens
from offload_decode.prefill_jobs.methods.base import Dense
from offload_decode.store.reader import KVStore
from offload_decode.store.staging import Committed, partial_path
from offload_decode.store.writer import KVStoreWriter
from offload_decode.types import Document
from tests.card import Card, references, stand_in
from tests.card.present import MEMORY
from tests.families import VOCAB
from tests.prefill_jobs.killing import tree
from tests.tiny import tiny_model

N, CHUNK, BLOCK = 90, 16, 20
FAMILIES = ["llama", "gemma2", "gpt-oss", "gemma3n", "deepseek_v3", "granitemoehybrid"]
TOKENS = np.random.default_rng(2).integers(3, VOCAB, N).astype(np.int32)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(chunks, "BLOCK_TOKENS", BLOCK)
    monkeypatch.setattr(gpu_blocks, "BLOCK_TOKENS", BLOCK)


@pytest.fixture
def seen(monkeypatch):
    """The blocks of the last prefill on a card."""
    made = []

    class Seen(GPUBlocks):
        def __init__(self, *given):
            super().__init__(*given)
            self.came = Counter()
            made[:] = [self]

        def _copy(self, layer, first, room, rows):
            self.came[layer] += rows - room.rows
            super()._copy(layer, first, room, rows)

    monkeypatch.setattr(chunks, "GPUBlocks", Seen)
    return made


def prefilled(path, family="llama", told=lambda *_: None, kv="auto", **changes):
    device = "cpu" if Card.present is None else "cuda"
    settings = Settings(options={"chunk": CHUNK}, kv=kv)
    model = wrap(tiny_model(family, **changes).to(device))
    prefill_tokens(model, TOKENS, [Document("all", 0, N)], path, settings, progress=told)
    return KVStore.open(path)


def on_a_card(path, *given, memory=MEMORY, **more):
    with references(), stand_in(memory) as card:
        prefilled(path, *given, **more)
    return card


def on_the_host(path, *given, **more):
    with references():
        return prefilled(path, *given, **more)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_store_has_the_bytes_of_one_made_on_the_host(family, tmp_path):
    """Dense and sliding layers, sinks, soft caps, shared keys, latents and recurrent states."""
    on_the_host(tmp_path / "host", family)
    on_a_card(tmp_path / "card", family)
    assert tree(tmp_path / "card") == tree(tmp_path / "host")


@pytest.mark.parametrize("kv", ["auto", "int8"])
def test_blocks_that_stay_and_blocks_that_are_copied_give_the_same_bytes(kv, tmp_path, seen, monkeypatch):
    whole = tree(on_the_host(tmp_path / "host", kv=kv).path)
    all_stay = on_a_card(tmp_path / "all", kv=kv)
    most, peak = seen[0].kept, all_stay.memory.peak
    layer = seen[0]._layers[0]
    if kv == "auto":
        # The first chunk comes when the second meets it, and both when they are given a place; then none.
        assert seen[0].came[layer] == CHUNK + 2 * CHUNK
    assert most == -(-(N // CHUNK * CHUNK) // BLOCK)
    with monkeypatch.context() as patch:
        patch.setattr(GPUBlocks, "grow", lambda *_: None)
        none_stay = on_a_card(tmp_path / "none", kv=kv)
    assert seen[0].came[layer] == sum(range(0, N, CHUNK)), "every chunk has all before it come"
    some = (none_stay.memory.peak + peak) // 2 * RESERVE // (RESERVE - 1)
    some_stay = on_a_card(tmp_path / "some", kv=kv, memory=some)
    assert 0 < seen[0].kept < most
    assert some_stay.memory.peak <= some - some // RESERVE
    for name in ("all", "none", "some"):
        assert tree(tmp_path / name) == whole, name


@pytest.mark.parametrize("kv", ["auto", "int8"])
def test_chunks_that_run_again_give_the_queries_of_the_host(kv, tmp_path):
    """One query in 64 tokens becomes one in 32 where 60 tokens of 90 are left."""
    settings, left = Settings(options={"chunk": CHUNK}, query_samples=1, kv=kv), [Document("all", 0, 60)]
    with references():
        model = wrap(tiny_model("llama"))
        prefill_tokens(model, TOKENS, [Document("all", 0, N)], tmp_path / "s", settings)
        prefill_tokens(model, TOKENS[:60], left, tmp_path / "whole", settings)
    with references(), stand_in(MEMORY):
        model = wrap(tiny_model("llama").to("cpu" if Card.present is None else "cuda"))
        earlier = KVStore.open(tmp_path / "s")
        done = replaced(model, earlier, TOKENS[:60], left, tmp_path / "s", "renew", lambda *_: None)
    assert (done.kept_tokens, done.again) == (32, 16)
    assert tree(tmp_path / "s") == tree(tmp_path / "whole")


def test_fragmented_memory_keeps_fewer_blocks_and_no_half_of_one(tmp_path, seen, monkeypatch):
    whole = tree(on_the_host(tmp_path / "host").path)
    grow, made, calls = GPUBlocks.grow, GPUBlocks._allocate, []

    def in_pieces(self, tokens):
        calls.append(tokens)
        if len(calls) > 5:  # one block of all three layers, two layers of the next
            raise torch.OutOfMemoryError("CUDA out of memory")
        return made(self, tokens)

    def growing(self, length):
        with monkeypatch.context() as patch:
            patch.setattr(GPUBlocks, "_allocate", in_pieces)
            grow(self, length)

    monkeypatch.setattr(GPUBlocks, "grow", growing)
    on_a_card(tmp_path / "card")
    assert {len(rooms) for rooms in seen[0]._kept.values()} == {1}
    assert tree(tmp_path / "card") == whole


def test_chunks_that_read_from_the_store_leave_no_gap_in_kept_blocks(tmp_path, monkeypatch):
    """Every other chunk is given all ids, and reads them from the store; blocks are filled by the others."""
    whole = tree(on_the_host(tmp_path / "host").path)

    def select(self, layer, queries, earlier):
        every = torch.arange(earlier.length).expand(self.shape.kv_heads, -1)
        return every if earlier.length // CHUNK % 2 else None

    monkeypatch.setattr(Dense, "select", select)
    on_a_card(tmp_path / "card")
    assert tree(tmp_path / "card") == whole


def test_readers_wait_for_rows_that_are_not_written_yet(tmp_path, monkeypatch):
    """With a writer that writes rows when somebody waits, or after a while."""
    whole = tree(on_the_host(tmp_path / "host").path)
    asked, append, wait = threading.Event(), KVStoreWriter.append, AsyncWriter.wait

    def waited(self, given):
        if given is not None:
            asked.set()
        wait(self, given)
        asked.clear()

    monkeypatch.setattr(chunks, "QUEUED", 1000)
    monkeypatch.setattr(AsyncWriter, "wait", waited)
    monkeypatch.setattr(KVStoreWriter, "append", lambda *given: (asked.wait(1), append(*given)))
    monkeypatch.setattr(GPUBlocks, "grow", lambda *_: None)
    on_a_card(tmp_path / "card")
    assert tree(tmp_path / "card") == whole


def test_a_chunk_waits_for_the_card_to_check_its_ids_and_to_use_pinned_memory_again(tmp_path):
    def told(stage, done, total):
        if stage == "prefill" and not done:
            card.waits.clear()  # those of loading

    with references(), stand_in() as card:
        prefilled(tmp_path / "card", told=told)
        waits = Counter((wait.kind, Path(wait.file).name) for wait in card.waits)
    assert waits.pop(("read", "hooks.py")) == -(-N // CHUNK)
    assert set(waits) == {("joined", "transfers.py")}


class Stopped(Exception):
    pass


def test_reported_tokens_are_on_disk_and_a_kill_loses_at_most_two_chunks(tmp_path, monkeypatch):
    """The staging folder as a kill would leave it before and after every write, gone on from."""
    whole = tree(on_the_host(tmp_path / "host").path)
    partial, left, ran = partial_path(tmp_path / "card"), [], []

    def watched(patch, name):
        plain = getattr(KVStoreWriter, name)

        def write(self, *given):
            copy = tmp_path / f"left{len(left)}.partial"
            shutil.copytree(partial, copy)
            left.append((copy, len(ran) * CHUNK))
            plain(self, *given)

        patch.setattr(KVStoreWriter, name, write)

    def told(stage, done, total):
        if stage == "prefill":
            assert Committed.load(partial).tokens >= done

    begin = chunks.WrittenPrefix.begin_chunk
    with monkeypatch.context() as patch:
        patch.setattr(chunks.WrittenPrefix, "begin_chunk", lambda *given: (ran.append(1), begin(*given))[1])
        for name in ("append", "commit", "put_queries"):
            watched(patch, name)
        on_a_card(tmp_path / "card", told=told)
    for copy, begun in left:
        # Of those that were begun, the last is under way, and the one before it is being written.
        assert Committed.load(copy).tokens >= begun - 2 * CHUNK
    for copy, _ in (left[5], left[len(left) // 2], left[-1]):
        on_a_card(copy.with_suffix(""))
        assert tree(copy.with_suffix("")) == whole


def test_an_error_in_the_writer_ends_the_job_with_its_own_type(tmp_path, monkeypatch):
    whole, calls = tree(on_the_host(tmp_path / "host").path), []
    with monkeypatch.context() as patch:
        append = KVStoreWriter.append

        def full(self, *given):
            calls.append(threading.current_thread().name)
            if len(calls) == 8:
                raise StoreError("the disk is full")
            append(self, *given)

        patch.setattr(KVStoreWriter, "append", full)
        with pytest.raises(StoreError, match="the disk is full"):
            on_a_card(tmp_path / "card")
    assert {name.rpartition("_")[0] for name in calls} == {"store writer"}
    assert len(calls) == 8, "nothing is written behind what failed"
    assert not any(thread.name.startswith("store writer") for thread in threading.enumerate())
    on_a_card(tmp_path / "card")
    assert tree(tmp_path / "card") == whole


def test_stopped_prefill_leaves_no_thread_and_resumes(tmp_path):
    def stop(stage, done, total):
        if stage == "prefill" and done == 3 * CHUNK:
            raise Stopped

    whole = tree(on_the_host(tmp_path / "host").path)
    with pytest.raises(Stopped):
        on_a_card(tmp_path / "card", told=stop)
    assert not any(thread.name.startswith("store writer") for thread in threading.enumerate())
    assert Committed.load(partial_path(tmp_path / "card")).tokens >= 3 * CHUNK
    on_a_card(tmp_path / "card")
    assert tree(tmp_path / "card") == whole


def test_after_an_error_nothing_is_written_and_wait_raises_it(card):
    class Writer:
        done = 0

    begun, written = threading.Event(), []

    def fail():
        begun.wait()
        raise StoreError("the disk is full")

    def job():
        with AsyncWriter(Writer(), torch.device("cuda", 0)) as output:
            output.submit(fail)
            last = output.submit(lambda: written.append("behind what failed"))
            begun.set()
            output.wait(last)
            written.append("the job went on")

    with pytest.raises(StoreError, match="the disk is full"):
        job()
    assert not written


def test_few_writes_are_queued_and_their_order_is_kept(card):
    class Writer:
        done = 0

    written, waiting = [], []
    with AsyncWriter(Writer(), torch.device("cuda", 0)) as output:

        def slow(rows):
            time.sleep(0.005)
            waiting.append(sum(not one.done() for one in output._futures))
            written.append(rows.tolist())

        rows = torch.zeros(2, device="cuda")
        for number in range(20):
            output.submit(slow, rows.fill_(number) if number < 1 else rows + number)
    assert written == [[number] * 2 for number in map(float, range(20))]
    assert max(waiting) == chunks.QUEUED
