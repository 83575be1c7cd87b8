"""A store that begins as another: the bytes of one that was written at once, whatever its layers keep."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offload_decode.common.errors import StoreBusy, StoreDamaged, StoreError, StoreMismatch
from offload_decode.store import growth as sharing
from offload_decode.store import layout
from offload_decode.store import writer as exchange
from offload_decode.store.format import token_hash
from offload_decode.store.growth import Growth
from offload_decode.store.reader import KVStore
from offload_decode.store.staging import PROGRESS, REPLACED, STORE, partial_path
from offload_decode.store.writer import KVStoreWriter
from offload_decode.types import Document, LayerKind, LayerShape, ModelShape, StateShape
from tests.store.jobs import Job, flipped, make_job, tree

CHUNK = 32
STATES = (StateShape("conv0", (6, 3), "float16"), StateShape("recurrent0", (2, 4, 5), "float32"))
PLAIN = ModelShape.uniform((LayerKind.FULL, LayerKind.SLIDING), 4, 2, 64, 45)
HYBRID = ModelShape(
    (
        LayerShape(LayerKind.NONE, states=STATES),
        LayerShape(LayerKind.FULL, 1, 24, 24, latent=True, states=STATES[:1]),
        LayerShape(LayerKind.CHUNKED, 4, 10, 6, window=7),
        LayerShape(LayerKind.SLIDING, 2, 8, 8, window=CHUNK + 1),
        LayerShape(LayerKind.NONE),
    ),
    query_heads=4,
)


class Corpus:
    """Keys, values, queries and states that depend on the token alone, and stores of the first tokens."""

    def __init__(self, shape: ModelShape = PLAIN, tokens: int = 3000, **fields: Any) -> None:
        self.whole = make_job(tokens, shape=shape, **fields)
        self.shape = shape
        self.rows = {
            layer: np.random.default_rng(layer)
            .standard_normal((own.kv_heads, tokens, own.key_dim + own.value_dim))
            .astype(self.whole.manifest.numpy_dtype)
            for layer, own in enumerate(shape.layers)
            if own.kind is not LayerKind.NONE
        }

    def job(self, tokens: int) -> Job:
        """The prefill of its first tokens: a document of 50 tokens each."""
        own = self.whole.tokens[:tokens]
        manifest = replace(
            self.whole.manifest,
            n_tokens=tokens,
            token_hash=token_hash(own),
            seam=tokens // CHUNK * CHUNK,
            prefill={"method": "dense", "chunk": CHUNK},
        )
        ends = [*range(50, tokens, 50), tokens]
        documents = [
            Document(f"{n}.txt", max(0, end - 50) if end % 50 == 0 else end // 50 * 50, end)
            for n, end in enumerate(ends)
        ]
        return replace(self.whole, manifest=manifest, tokens=own, documents=tuple(documents))

    def open(self, path: Path, tokens: int, growth: Growth | None = None) -> KVStoreWriter:
        job = self.job(tokens)
        return KVStoreWriter.open(path, job.manifest, job.tokens, job.documents, growth)

    def feed(self, writer: KVStoreWriter, until: int | None = None) -> None:
        total = writer.manifest.n_tokens if until is None else until
        for start in range(writer.done, total, CHUNK):
            stop = min(start + CHUNK, total)
            for layer, own in enumerate(self.shape.layers):
                if layer in self.rows:
                    part = self.rows[layer][:, start:stop]
                    keys = part[..., : own.key_dim]
                    writer.append(layer, keys, keys if own.latent else part[..., own.key_dim :])
                if own.states:
                    writer.put_states(layer, self.states(layer, stop))
                if own.kind is LayerKind.FULL:
                    slots, positions, heads = writer.samples(start, stop)
                    asked = (positions * 10 + heads)[None, :, None] + np.arange(own.key_dim) / 64
                    asked = np.repeat(asked, own.kv_heads, axis=0) + np.arange(own.kv_heads)[:, None, None]
                    writer.put_queries(layer, slots, asked.astype(writer.manifest.numpy_dtype))
            writer.commit(stop)

    def states(self, layer: int, tokens: int) -> list[Any]:
        rng = np.random.default_rng(1000 * layer + tokens)
        return [rng.standard_normal(own.shape).astype(own.dtype) for own in self.shape.layers[layer].states]

    def write(self, path: Path, tokens: int) -> KVStore:
        with self.open(path, tokens) as writer:
            self.feed(writer)
            writer.publish()
        return KVStore.open(path)

    def grow(self, path: Path, tokens: int) -> Growth:
        growth = growth_of(path)
        with self.open(path, tokens, growth) as writer:
            self.feed(writer)
            writer.publish()
        return growth

    def check_whole(self, folder: Path, tokens: int) -> None:
        """The store there that grew has the bytes of one that was written at once."""
        assert tree(folder / "s.kv") == tree(self.write(folder / "whole.kv", tokens).path)


def growth_of(path: Path) -> Growth:
    return Growth(KVStore.open(path), lambda stage, done, total: None)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "CHUNK_TOKENS", 512)


@pytest.mark.parametrize("shape", [PLAIN, HYBRID], ids=["plain", "hybrid"])
@pytest.mark.parametrize(
    "sizes",
    [
        (1, 2, 31, 32, 33),  # less than a chunk, a whole one, and one more
        (64, 65, 96, 128),
        (100, 101, 103, 300),  # twice within a chunk
        (45, 46, 77, 78),  # around the window
        (500, 900),
    ],
    ids=str,
)
def test_a_store_that_grew_is_one_that_was_written_at_once(
    tmp_path: Path, shape: ModelShape, sizes: tuple[int, ...]
) -> None:
    corpus = Corpus(shape)
    corpus.write(tmp_path / "grown.kv", sizes[0])
    for tokens in sizes[1:]:
        corpus.grow(tmp_path / "grown.kv", tokens)
        whole = corpus.write(tmp_path / f"{tokens}.kv", tokens)
        assert tree(tmp_path / "grown.kv") == tree(whole.path), tokens
        assert not partial_path(tmp_path / "grown.kv").exists()
    KVStore.open(tmp_path / "grown.kv").verify()


@pytest.mark.parametrize(
    "fields",
    [
        *({"kv": kv, "dtype": "bfloat16"} for kv in ("int8", "int4-values")),
        *({"query_samples": samples} for samples in (1, 24, 1000, 5000)),
    ],
    ids=str,
)
def test_encoded_rows_with_their_errors_and_any_number_of_samples(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    corpus = Corpus(**fields)
    corpus.write(tmp_path / "s.kv", 330)
    corpus.grow(tmp_path / "s.kv", 345)
    corpus.grow(tmp_path / "s.kv", 800)
    corpus.check_whole(tmp_path, 800)


@pytest.mark.usefixtures("small_chunks")
def test_whole_chunk_files_are_shared_and_never_written(tmp_path: Path) -> None:
    corpus = Corpus()
    corpus.write(tmp_path / "s.kv", 1300)
    before = tree(tmp_path / "s.kv")
    keep = {name: os.open(tmp_path / "s.kv" / name, os.O_RDONLY) for name in before}
    growth = corpus.grow(tmp_path / "s.kv", 2900)
    assert growth.shared == 2 * 2 * 2 * 512 * 128, "keys and values, two heads, two files each"
    assert growth.copied > 0
    for name, descriptor in keep.items():
        assert os.pread(descriptor, len(before[name]) + 1, 0) == before[name], name
        os.close(descriptor)
    grown, whole = KVStore.open(tmp_path / "s.kv"), corpus.write(tmp_path / "whole.kv", 2900)
    grown.verify()
    for head in (0, 1):
        for name in ("keys", "values", "key_norms", "queries"):
            np.testing.assert_array_equal(getattr(grown, name)(0, head), getattr(whole, name)(0, head))


def test_chunks_double_when_they_would_be_too_many() -> None:
    earlier = layout.ArraySpec("k", (2, 2000, 64), (1, 512, 64), "float16")
    assert layout.grown_rows(4000, earlier, most=8) == 512
    assert layout.grown_rows(4097, earlier, most=8) == 1024
    assert layout.grown_rows(9000, replace(earlier, chunk=(1, 2000, 64)), most=8) is None


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("clones", [True, False])
def test_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clones: bool) -> None:
    """On a file system that shares blocks instead, and on one that does neither."""

    def cloned(here: int, start: int, there: int, at: int, count: int) -> bool:
        assert all(number % sharing.BLOCK == 0 for number in (start, at, count))
        if clones:
            os.pwrite(there, os.pread(here, count, start), at)
        return clones

    monkeypatch.setattr(sharing, "link", lambda source, target: False)
    monkeypatch.setattr(sharing, "_cloned", cloned)
    corpus = Corpus()
    corpus.write(tmp_path / "s.kv", 1300)
    growth = corpus.grow(tmp_path / "s.kv", 2900)
    assert (growth.shared > 0) == clones
    KVStore.open(tmp_path / "s.kv").verify()
    whole = corpus.write(tmp_path / "whole.kv", 2900)
    np.testing.assert_array_equal(KVStore.open(tmp_path / "s.kv").keys(0, 1), whole.keys(0, 1))


def test_the_earlier_store_answers_until_the_end(tmp_path: Path) -> None:
    corpus = Corpus()
    corpus.write(tmp_path / "s.kv", 330)
    before = tree(tmp_path / "s.kv")
    with corpus.open(tmp_path / "s.kv", 600, growth_of(tmp_path / "s.kv")) as writer:
        corpus.feed(writer, until=416)
        assert tree(tmp_path / "s.kv") == before
    with corpus.open(tmp_path / "s.kv", 600, growth_of(tmp_path / "s.kv")) as writer:
        assert writer.done == 416
        corpus.feed(writer)
        sealed = writer.seal()
        assert tree(tmp_path / "s.kv") == before
        assert KVStore.open(sealed).manifest.n_tokens == 600
        with pytest.raises(StoreBusy):
            corpus.open(tmp_path / "s.kv", 600, growth_of(tmp_path / "s.kv"))
        writer.publish()
    corpus.check_whole(tmp_path, 600)


def test_a_reader_of_the_earlier_store_is_told(tmp_path: Path) -> None:
    corpus = Corpus()
    earlier = corpus.write(tmp_path / "s.kv", 330)
    mapped = earlier.keys(0, 0)
    kept = mapped.copy()
    corpus.grow(tmp_path / "s.kv", 600)
    np.testing.assert_array_equal(mapped, kept)
    for read in (lambda: earlier.check_mapped(0), lambda: earlier.keys(0, 1), lambda: earlier.window(1)):
        with pytest.raises((StoreMismatch, StoreDamaged)):
            read()
    with pytest.raises(StoreMismatch, match="another store now"):
        earlier.check_mapped(0)
    assert not Growth(KVStore.open(tmp_path / "s.kv"), lambda *_: None).begin(partial_path(tmp_path / "s.kv"))


def test_a_damaged_store_does_not_grow(tmp_path: Path) -> None:
    corpus = Corpus()
    corpus.write(tmp_path / "s.kv", 330)
    harm = flipped(tmp_path / "s.kv/layers/000/values/c.1.0.0", 8000)
    with harm, pytest.raises(StoreDamaged, match=r"values/c\.1\.0\.0 \(changed\)"):
        corpus.open(tmp_path / "s.kv", 600, growth_of(tmp_path / "s.kv"))


def test_another_corpus_is_refused_until_the_first_is_removed(tmp_path: Path) -> None:
    corpus = Corpus()
    corpus.write(tmp_path / "s.kv", 330)
    with corpus.open(tmp_path / "s.kv", 600, growth_of(tmp_path / "s.kv")) as writer:
        corpus.feed(writer, until=416)
    with pytest.raises(StoreMismatch, match="or go on with the same corpus"):
        corpus.open(tmp_path / "s.kv", 700, growth_of(tmp_path / "s.kv"))


def test_what_a_kill_after_the_exchange_leaves(tmp_path: Path) -> None:
    """The staging folder holds the earlier store then, and its progress is no longer of anything."""
    corpus = Corpus()
    corpus.write(tmp_path / "s.kv", 330)
    with corpus.open(tmp_path / "s.kv", 600, growth_of(tmp_path / "s.kv")) as writer:
        corpus.feed(writer)
        writer.seal()
    partial = partial_path(tmp_path / "s.kv")
    exchange.exchange(partial / STORE, tmp_path / "s.kv", partial / REPLACED)
    assert (partial / PROGRESS).exists()
    corpus.grow(tmp_path / "s.kv", 800)
    corpus.check_whole(tmp_path, 800)
    assert not partial.exists()


def test_names_that_cannot_be_exchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "_at_once", lambda one, other: False)
    corpus = Corpus()
    corpus.write(tmp_path / "s.kv", 330)
    corpus.grow(tmp_path / "s.kv", 600)
    corpus.check_whole(tmp_path, 600)
    assert not partial_path(tmp_path / "s.kv").exists()
    (tmp_path / "aside").mkdir()
    exchange.restore(tmp_path / "gone", tmp_path / "aside")
    assert (tmp_path / "gone").is_dir()


def test_folders_change_places(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    exchange.exchange(tmp_path / "a", tmp_path / "b", tmp_path / "aside")
    assert (tmp_path / "b/a").exists()
    assert (tmp_path / "a/b").exists() or (tmp_path / "aside/b").exists()
    with pytest.raises(OSError, match=r"."):
        exchange.exchange(tmp_path / "missing", tmp_path / "b", tmp_path / "aside2")


def test_a_full_disk_leaves_the_earlier_store_and_no_rubbish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = Corpus()
    corpus.write(tmp_path / "s.kv", 330)
    before = tree(tmp_path / "s.kv")

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(sharing, "_copy", full)
        with pytest.raises(StoreError, match="free some space and run the same append again"):
            corpus.open(tmp_path / "s.kv", 600, growth_of(tmp_path / "s.kv"))
    assert tree(tmp_path / "s.kv") == before
    assert not (partial_path(tmp_path / "s.kv") / STORE).exists()
    corpus.grow(tmp_path / "s.kv", 600)
    corpus.check_whole(tmp_path, 600)
