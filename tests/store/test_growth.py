"""A store that begins as another has the bytes of one that was written at once; what layers keep."""

import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offload_decode.common.errors import StoreBusy, StoreDamaged, StoreError, StoreForeign, StoreMismatch
from offload_decode.store import growth as sharing
from offload_decode.store import layout
from offload_decode.store import writer as exchange
from offload_decode.store.format import Manifest, token_hash
from offload_decode.store.growth import Growth
from offload_decode.store.reader import KVStore
from offload_decode.store.staging import PROGRESS, REPLACED, STORE, WINDOWS, partial_path
from offload_decode.store.writer import KVStoreWriter
from offload_decode.types import Document, LayerKind, LayerShape, ModelShape, StateShape
from tests.store.jobs import Array, Job, flipped, make_job, tree

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
    """A prefill, and stores of its first tokens, in chunks of CHUNK."""

    def __init__(self, shape: ModelShape = PLAIN, tokens: int = 3000, **fields: Any) -> None:
        prefill = {"method": "dense", "chunk": CHUNK}
        whole = make_job(tokens, shape=shape, **fields)
        self.shape, self.states = shape, whole.states
        self.whole = replace(whole, chunk=CHUNK, manifest=replace(whole.manifest, prefill=prefill))

    def job(self, tokens: int) -> Job:
        """The prefill of its first tokens: a document of 50 tokens each."""
        first = self.whole.tokens[:tokens]
        seam = tokens // CHUNK * CHUNK
        manifest = replace(self.whole.manifest, n_tokens=tokens, token_hash=token_hash(first), seam=seam)
        ends = enumerate(pairwise([*range(0, tokens, 50), tokens]))
        documents = tuple(Document(f"{n}.txt", start, end) for n, (start, end) in ends)
        return replace(self.whole, manifest=manifest, tokens=first, documents=documents)

    def open(self, path: Path, tokens: int) -> KVStoreWriter:
        return self.job(tokens).open(path)

    def append(self, path: Path, tokens: int) -> KVStoreWriter:
        """A writer of more tokens than the store there has."""
        return self.job(tokens).open(path, growth_of(path))

    def feed(self, writer: KVStoreWriter, until: int | None = None) -> None:
        self.job(writer.manifest.n_tokens).feed(writer, until=until)

    def write(self, path: Path, tokens: int) -> KVStore:
        return KVStore.open(self.job(tokens).write(path))

    def grow(self, path: Path, tokens: int) -> Growth:
        growth = growth_of(path)
        self.job(tokens).write(path, growth=growth)
        return growth

    def queries(self, positions: Array, heads: Array) -> dict[int, Array]:
        """Those of the prefill at some places, by layer."""
        shape = self.shape
        grouped = {
            n: self.whole.queries[n].reshape(shape.kv_heads, shape.group, -1, shape.head_dim)
            for n in shape.full_layers
        }
        return {layer: own[:, heads, positions] for layer, own in grouped.items()}

    def check_whole(self, folder: Path, tokens: int) -> None:
        """The store there that grew has the bytes of one that was written at once."""
        assert tree(folder / "s.kv") == tree(self.write(folder / "whole.kv", tokens).path)


def growth_of(path: Path, cut: int | None = None) -> Growth:
    """One up to the seam, or to a mark."""
    earlier = KVStore.open(path)
    at = earlier.manifest.seam if cut is None else cut
    assert at is not None
    return Growth(earlier, at, lambda stage, done, total: None, "append", lambda positions, heads: {})


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    """One whose first 330 tokens are stored at `tmp_path / "s.kv"`."""
    corpus = Corpus()
    corpus.write(tmp_path / "s.kv", 330)
    return corpus


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


@pytest.mark.parametrize("kv", ["auto", "int8"])
@pytest.mark.parametrize("shape", [PLAIN, HYBRID], ids=["plain", "hybrid"])
@pytest.mark.parametrize(("tokens", "cut"), [(330, 256), (345, 320), (300, 64), (500, 128)])
def test_a_store_begins_as_another_up_to_a_mark(
    tmp_path: Path, shape: ModelShape, kv: str, tokens: int, cut: int
) -> None:
    corpus = Corpus(shape, marks=2 * CHUNK, query_samples=20, kv=kv)
    earlier = corpus.write(tmp_path / "s.kv", 330)
    with corpus.job(tokens).open(tmp_path / "s.kv", growth_of(tmp_path / "s.kv", cut)) as writer:
        assert writer.done == cut
        corpus.feed(writer)
        writer.publish()
    corpus.check_whole(tmp_path, tokens)
    assert earlier.manifest.n_marks == 5


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


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(("tokens", "cut"), [(1300, 1280), (2000, 1024), (400, 384)])
def test_a_store_that_shrinks_shares_chunk_files_too(tmp_path: Path, tokens: int, cut: int) -> None:
    corpus = Corpus(marks=2 * CHUNK)
    corpus.write(tmp_path / "s.kv", 2900)
    growth = replace(growth_of(tmp_path / "s.kv", cut), queries=corpus.queries)
    corpus.job(tokens).write(tmp_path / "s.kv", growth=growth)
    assert growth.shared == 2 * 2 * (cut // 512) * 512 * 128, "keys and values, two heads"
    shrunk, whole = KVStore.open(tmp_path / "s.kv"), corpus.write(tmp_path / "whole.kv", tokens)
    shrunk.verify()
    assert shrunk.manifest == whole.manifest
    for head in (0, 1):
        for name in ("keys", "values", "key_norms", "queries", "every_query"):
            np.testing.assert_array_equal(getattr(shrunk, name)(0, head), getattr(whole, name)(0, head))
        for ours, theirs in zip(shrunk.pages(0, head), whole.pages(0, head), strict=True):
            np.testing.assert_array_equal(ours, theirs)


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


def test_the_earlier_store_answers_until_the_end(corpus: Corpus, tmp_path: Path) -> None:
    before = tree(tmp_path / "s.kv")
    with corpus.append(tmp_path / "s.kv", 600) as writer:
        corpus.feed(writer, until=416)
        assert tree(tmp_path / "s.kv") == before
    with corpus.append(tmp_path / "s.kv", 600) as writer:
        assert writer.done == 416
        corpus.feed(writer)
        sealed = writer.seal()
        assert tree(tmp_path / "s.kv") == before
        assert KVStore.open(sealed).manifest.n_tokens == 600
        with pytest.raises(StoreBusy):
            corpus.append(tmp_path / "s.kv", 600)
        writer.publish()
    corpus.check_whole(tmp_path, 600)


def test_a_reader_of_the_earlier_store_is_told(corpus: Corpus, tmp_path: Path) -> None:
    earlier = KVStore.open(tmp_path / "s.kv")
    mapped = earlier.keys(0, 0)
    kept = mapped.copy()
    corpus.grow(tmp_path / "s.kv", 600)
    np.testing.assert_array_equal(mapped, kept)
    for read in (lambda: earlier.check_mapped(0), lambda: earlier.keys(0, 1), lambda: earlier.window(1)):
        with pytest.raises((StoreMismatch, StoreDamaged)):
            read()
    with pytest.raises(StoreMismatch, match="another store now"):
        earlier.check_mapped(0)
    growth_of(tmp_path / "s.kv").begin(partial_path(tmp_path / "s.kv"))


def test_a_damaged_store_does_not_grow(corpus: Corpus, tmp_path: Path) -> None:
    harm = flipped(tmp_path / "s.kv/layers/000/values/c.1.0.0", 8000)
    with harm, pytest.raises(StoreDamaged, match=r"values/c\.1\.0\.0 \(changed\)"):
        corpus.append(tmp_path / "s.kv", 600)


@pytest.mark.parametrize(("tokens", "whole"), [(700, False), (500, True)])
def test_what_was_begun_makes_way_for_more_of_its_documents_and_for_a_whole_corpus(
    corpus: Corpus, tmp_path: Path, tokens: int, whole: bool
) -> None:
    """While it does, the earlier store stays, and nothing of what was begun is taken for the new one."""
    before = tree(tmp_path / "s.kv")
    with corpus.append(tmp_path / "s.kv", 600) as writer:
        corpus.feed(writer, until=416)
    growth = replace(growth_of(tmp_path / "s.kv"), whole=whole)
    with corpus.job(tokens).open(tmp_path / "s.kv", growth) as writer:
        assert (growth.discarded, writer.done) == (96, 320)  # of 416, 320 are the earlier store's
        assert tree(tmp_path / "s.kv") == before
    again = replace(growth, discarded=0)
    corpus.job(tokens).write(tmp_path / "s.kv", growth=again)
    assert again.discarded == 0
    corpus.check_whole(tmp_path, tokens)


def test_what_was_begun_does_not_make_way_for_other_documents(corpus: Corpus, tmp_path: Path) -> None:
    with corpus.append(tmp_path / "s.kv", 600) as writer:
        corpus.feed(writer, until=416)
    begun = tree(partial_path(tmp_path / "s.kv"))
    with pytest.raises(StoreMismatch, match="or go on with the same corpus"):
        corpus.append(tmp_path / "s.kv", 500)
    assert tree(partial_path(tmp_path / "s.kv")) == begun
    corpus.grow(tmp_path / "s.kv", 600)
    corpus.check_whole(tmp_path, 600)


def test_what_a_kill_after_the_exchange_leaves(corpus: Corpus, tmp_path: Path) -> None:
    """The staging folder holds the earlier store then, and its progress is no longer of anything."""
    with corpus.append(tmp_path / "s.kv", 600) as writer:
        corpus.feed(writer)
        writer.seal()
    partial = partial_path(tmp_path / "s.kv")
    exchange.exchange(partial / STORE, tmp_path / "s.kv", partial / REPLACED)
    assert (partial / PROGRESS).exists()
    corpus.grow(tmp_path / "s.kv", 800)
    corpus.check_whole(tmp_path, 800)
    assert not partial.exists()


def test_names_that_cannot_be_exchanged(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "_at_once", lambda one, other: False)
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
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = tree(tmp_path / "s.kv")

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(sharing, "_copy", full)
        with pytest.raises(StoreError, match="free some space and run the same append again"):
            corpus.append(tmp_path / "s.kv", 600)
    assert tree(tmp_path / "s.kv") == before
    assert not (partial_path(tmp_path / "s.kv") / STORE).exists()
    corpus.grow(tmp_path / "s.kv", 600)
    corpus.check_whole(tmp_path, 600)


# Layers of several geometries: states, latents, windows of their own widths, nothing at all.


def shaped(latent: bool) -> Corpus:
    layers = (
        LayerShape(LayerKind.NONE, states=STATES),
        LayerShape(LayerKind.FULL, 1, 24, 24 if latent else 8, latent=latent, states=STATES[:1]),
        LayerShape(LayerKind.CHUNKED, 4, 10, 6, window=7),
        LayerShape(LayerKind.NONE),
    )
    return Corpus(ModelShape(layers, query_heads=4), 2 * CHUNK)


def states_begun(corpus: Corpus, path: Path) -> Path:
    """Where the windows and states lie of a store whose first chunk is committed."""
    with corpus.open(path, 2 * CHUNK) as writer:
        assert writer.states(0) is None
        corpus.feed(writer, until=CHUNK)
    return partial_path(path) / WINDOWS


@pytest.mark.parametrize("latent", [False, True])
def test_what_each_layer_keeps_is_read_back(tmp_path: Path, latent: bool) -> None:
    corpus = shaped(latent)
    store, shape = corpus.write(tmp_path / "a.kv", 2 * CHUNK), corpus.shape
    store.verify()
    assert store.manifest.shape == shape
    assert store.values(1, 0).shape == (2 * CHUNK, shape.value_dim)
    assert not latent or store.values(1, 0) is store.keys(1, 0)
    keys, values = store.window(2)
    assert (keys.shape, values.shape) == ((4, 6, 10), (4, 6, 6))
    for layer in shape.state_layers:
        for read, expected in zip(store.states(layer), corpus.states(layer, 2 * CHUNK), strict=True):
            np.testing.assert_array_equal(read, expected)
    assert store.cost()["states"] == 2 * 6 * 3 * 2 + 2 * 4 * 5 * 4


def test_a_prefill_goes_on_with_the_states_of_its_last_commit(tmp_path: Path) -> None:
    corpus = shaped(latent=False)
    # A commit that was begun when the process was killed.
    (states_begun(corpus, tmp_path / "a.kv") / f"state-000-{2 * CHUNK}").write_bytes(b"half")
    with corpus.open(tmp_path / "a.kv", 2 * CHUNK) as writer:
        for read, expected in zip(writer.states(0) or (), corpus.states(0, CHUNK), strict=True):
            np.testing.assert_array_equal(read, expected)
        corpus.feed(writer)
        writer.publish()
    assert tree(tmp_path / "a.kv") == tree(corpus.write(tmp_path / "whole.kv", 2 * CHUNK).path)


def test_a_state_that_changed_on_disk_is_damage(tmp_path: Path) -> None:
    corpus = shaped(latent=False)
    file = states_begun(corpus, tmp_path / "a.kv") / f"state-000-{CHUNK}"
    file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
    with pytest.raises(StoreDamaged, match="state of layer 0"):
        corpus.open(tmp_path / "a.kv", 2 * CHUNK)


@pytest.mark.parametrize(
    "wrong",
    [
        {"states": [{"name": "../conv0", "shape": [1], "dtype": "float32"}]},
        {"states": [{"name": "conv0", "shape": [1 << 40], "dtype": "float32"}]},
        {"states": [{"name": "conv0", "shape": [1 << 20, 1 << 20], "dtype": "float32"}]},
        {"states": [{"name": "conv0", "shape": [], "dtype": "float32"}]},
        {"states": [{"name": "conv0", "shape": [2], "dtype": "object"}]},
        {"states": [{"name": "conv0", "shape": [2], "dtype": "float32"}] * 2},
        {"window": 5},
        {"latent": 1},
        {"latent": True},
        {"kind": "linear"},
        {"kv_heads": 0},
    ],
    ids=str,
)
def test_a_layer_that_makes_no_sense_is_refused(wrong: dict[str, object]) -> None:
    data = shaped(latent=False).whole.manifest.to_json()
    data["shape"]["layers"][1] |= wrong
    with pytest.raises(StoreForeign, match="manifest cannot be used"):
        Manifest.from_json(data)
