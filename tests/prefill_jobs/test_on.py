"""Stores that begin as another one: what they hold, what they share, and which are refused."""

import errno
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from offload_decode.common.errors import (
    ConfigError,
    CorpusError,
    IndexDamaged,
    IndexNotWritten,
    StoreDamaged,
    StoreExists,
    StoreMismatch,
    StoreNotFound,
)
from offload_decode.indexes import arrays
from offload_decode.indexes.clusters.index import ClusteredIndex
from offload_decode.kv.indexes import (
    heads_of,
    index_path,
    indexes_folder,
    kind_folder,
    staging_folder,
    verify,
)
from offload_decode.models.loading import LoadedModel
from offload_decode.prefill_jobs import buckets, indexing
from offload_decode.prefill_jobs.append import append_texts
from offload_decode.prefill_jobs.corpus import TextDocument
from offload_decode.prefill_jobs.destinations import Place, destination_of
from offload_decode.prefill_jobs.folders import Skipped
from offload_decode.prefill_jobs.indexing import alone, build_indexes
from offload_decode.prefill_jobs.job import PrefillReport, Settings, make, prefill_texts, prepare, settled
from offload_decode.prefill_jobs.renew import compared, renew_as
from offload_decode.store import growth
from offload_decode.store.reader import BASE, KVStore
from offload_decode.store.tree import AS_IT_WAS, CHANGED, GONE, UNREADABLE, bases_of, begun_as
from tests.prefill_jobs.killing import tree
from tests.prefill_jobs.test_append import CHAT, TEXTS, loaded, settings


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of tiny stores are shared to a page of memory, and not to 64 KiB."""
    monkeypatch.setattr("offload_decode.store.layout.ALIGNMENT", 4096)


FURTHER = TEXTS[0]._replace(name="f.txt")


def on(base: Path, model: LoadedModel, texts: Sequence[TextDocument], out: Path) -> PrefillReport:
    return prefill_texts(model, texts, out, Settings(base=base))


def numbers(path: Path) -> dict[str, bytes]:
    """All that a store gives, however it lies on disk."""
    store = KVStore.open(path)
    shape, found = store.manifest.shape, {"tokens": store.tokens, "queries": store.query_positions}
    for layer, own in enumerate(shape.layers):
        window = store.window(layer) if own.local else ()
        at_seam = store.kept_at(layer, store.manifest.seam or 0)
        kept = (*window, *store.states(layer), *at_seam.window, *at_seam.states)
        found |= {f"kept {layer} {number}": part for number, part in enumerate(kept)}
    for layer in shape.full_layers:
        for head in range(shape.kv_heads):
            parts = store.keys(layer, head), store.values(layer, head), store.queries(layer, head)
            for number, part in enumerate((*parts, store.key_norms(layer, head), *store.pages(layer, head))):
                found[f"{layer} {head} {number}"] = part
    return {name: np.ascontiguousarray(part).tobytes() for name, part in found.items()}


@pytest.mark.parametrize(
    ("family", "how"),
    [
        *((family, settings()) for family in ("llama", "gemma2", "qwen3_next", "deepseek_v3")),
        ("gemma2", settings(kv="int8")),
        ("llama", settings("quoka", kv="int4-values", budget="50%")),
        ("llama", settings(chunk=5000)),
    ],
    ids=str,
)
def test_three_deep_each_is_one_prefill(tmp_path: Path, family: str, how: Settings) -> None:
    """Windows, recurrent states and latents included; appended to, it still is."""
    model = loaded(family)
    prefill_texts(model, TEXTS[2:4], tmp_path / "0.kv", how)
    texts = TEXTS[2:4]
    for deep, further in enumerate((TEXTS[4:], TEXTS[:1], TEXTS[1:2]), start=1):
        report = on(tmp_path / f"{deep - 1}.kv", model, further, tmp_path / f"{deep}.kv")
        texts = [*texts, *further]
        whole = tmp_path / f"whole {deep}.kv"
        prefill_texts(model, texts, whole, how)
        assert numbers(tmp_path / f"{deep}.kv") == numbers(whole)
        assert (report.shared > 0) == (how.chunk == 16)
        assert report.n_tokens == KVStore.open(whole).manifest.n_tokens
        KVStore.open(tmp_path / f"{deep}.kv").verify()
    shutil.rmtree(tmp_path / "2.kv")
    more = [TEXTS[0]._replace(name="f.txt")]
    append_texts(model, more, tmp_path / "3.kv")
    prefill_texts(model, [*texts, *more], tmp_path / "whole.kv", how)
    assert numbers(tmp_path / "3.kv") == numbers(tmp_path / "whole.kv")
    assert (BASE in KVStore.open(tmp_path / "3.kv").cost()) == (how.chunk == 16)


def test_the_tree_tells_what_a_store_has_like_each_of_its_bases(tmp_path: Path) -> None:
    """A renewal within the base leaves less of that base, and no more of those which that begins as."""
    model, store = loaded("llama"), tmp_path / "3.kv"
    texts = [
        TextDocument(f"{name}.txt", f"{name} has {n}. " * (20 + 7 * n)) for n, name in enumerate("abcde")
    ]
    prefill_texts(model, texts[:2], tmp_path / "0.kv", settings())
    for deep in (1, 2, 3):
        on(tmp_path / f"{deep - 1}.kv", model, texts[deep + 1 : deep + 2], tmp_path / f"{deep}.kv")
    texts[1] = texts[1]._replace(text=f"{texts[1].text}x")
    renew_as(compared(KVStore.open(store), model.tokenizer, model.prompt, texts), model, store)
    found = [*bases_of(KVStore.open(store))]
    assert [Path(base.path).name for base in found] == ["2.kv", "1.kv", "0.kv"]
    for base in found:
        tokens = KVStore.open(Path(base.path)).tokens[: base.tokens]
        assert np.array_equal(KVStore.open(store).tokens[: base.tokens], tokens)


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_next"])
def test_one_is_renewed_from_its_own_part_from_within_the_base_and_from_the_beginning(
    tmp_path: Path, family: str
) -> None:
    model, texts = loaded(family), list(TEXTS)
    prefill_texts(model, texts[:3], tmp_path / "base.kv", settings())
    base, store = tree(tmp_path / "base.kv"), tmp_path / "s.kv"
    on(tmp_path / "base.kv", model, texts[3:], store)
    given = KVStore.open(store).manifest.base
    assert given is not None
    for number, changed, whole in ((4, "{} More.", True), (2, "{} More.", False), (0, "X{}", False)):
        texts[number] = texts[number]._replace(text=changed.format(texts[number].text))
        plan = compared(KVStore.open(store), model.tokenizer, model.prompt, texts)
        renew_as(plan, model, store)
        prefill_texts(model, texts, tmp_path / f"{number}.kv", settings())
        assert numbers(store) == numbers(tmp_path / f"{number}.kv")
        renewed = KVStore.open(store)
        renewed.verify()
        left = (renewed.manifest.base or {"tokens": 0})["tokens"]
        assert left == (given["tokens"] if whole else plan.kept_tokens)
        assert plan.kept_tokens >= given["tokens"] or not whole
    assert tree(tmp_path / "base.kv") == base


def cells_of(path: Path) -> dict[str, bytes]:
    """The arrays of every head's index of a store."""
    store, found = KVStore.open(path), {}
    for layer, head in heads_of(store):
        base = index_path(kind_folder(path, "clusters"), layer, head)
        index = ClusteredIndex.load(base, store.keys(layer, head), digest=store.digest(layer, head))
        parts = {
            **index.cells._asdict(),
            **{f"{n} of groups": part for n, part in enumerate(index.summaries)},
        }
        found |= {f"{layer} {head} {name}": part.tobytes() for name, part in parts.items()}
    return found


def own_bytes(store: Path) -> int:
    """Of the native files of its indexes, without links."""
    return sum(file.stat().st_size for file in kind_folder(store, "clusters").glob("*.cells"))


def test_indexes_share_what_they_begin_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three deep and appended to, they hold what one that shares nothing does."""
    monkeypatch.setattr(arrays, "_LEAST", 4096)
    model = loaded("llama")
    first = [text._replace(name=f"{n}{text.name}") for n in range(5) for text in TEXTS[:3]]
    prefill_texts(model, first, tmp_path / "0.kv", settings())
    build_indexes(tmp_path / "0.kv", "clusters", k=8)
    for deep, text in enumerate(TEXTS[2:], start=1):
        base, store, apart = (tmp_path / f"{name}.kv" for name in (deep - 1, deep, f"apart {deep}"))
        report = on(base, model, [text], store)
        assert ([each.kind for each in report.indexes], report.left) == (["clusters"], ())
        with monkeypatch.context() as patched:
            patched.setattr(ClusteredIndex, "share", lambda self, earlier, stays: None)
            on(base, model, [text], apart)
        assert cells_of(store) == cells_of(apart)
        assert own_bytes(store) < own_bytes(apart) * 2 / 3
    shutil.rmtree(tmp_path / "2.kv.indexes")
    append_texts(model, [TEXTS[0]], store)
    append_texts(model, [TEXTS[0]], apart)
    assert cells_of(store) == cells_of(apart)
    assert own_bytes(store) < own_bytes(apart) * 2 / 3
    assert not [*verify(KVStore.open(store), "clusters", lambda stage, done, total: None)]
    link = next(kind_folder(store, "clusters").glob("*.base0"))
    link.write_bytes(link.read_bytes()[:-1] + b"x")
    with pytest.raises(IndexDamaged, match="not those that were written"):
        cells_of(store)


def test_an_index_that_is_replaced_while_another_one_grows_from_it_is_not_linked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is shared was read in the file that was mapped: another of that name has other bytes there."""
    monkeypatch.setattr(arrays, "_LEAST", 4096)
    model, base = loaded("llama"), tmp_path / "base.kv"
    prefill_texts(model, TEXTS, base, settings())
    build_indexes(base, "clusters", k=8)
    share = ClusteredIndex.share

    def replaced(self: ClusteredIndex, earlier: ClusteredIndex, stays: bool) -> None:
        share(self, earlier, stays)
        for file in kind_folder(base, "clusters").glob("*.cells"):
            shutil.copyfile(file, f"{file}.new")
            os.replace(f"{file}.new", file)

    with monkeypatch.context() as patched:
        patched.setattr(ClusteredIndex, "share", replaced)
        with pytest.raises(IndexNotWritten, match="has been replaced meanwhile"):
            on(base, model, [FURTHER], tmp_path / "x.kv")
    on(base, model, [FURTHER], tmp_path / "x.kv")
    assert not [*verify(KVStore.open(tmp_path / "x.kv"), "clusters", lambda stage, done, total: None)]


def test_pages_of_memory_larger_than_those_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There shared arrays are read, with the same numbers."""
    first, more = np.arange(10_000, dtype=np.int64), np.arange(20_000, dtype=np.int64)
    layout = {"n": (np.int64, (10_000,))}
    arrays.write(str(tmp_path / "first"), [10_000], {"n": first})
    _, earlier = arrays.read(str(tmp_path / "first"), 1, lambda numbers: layout)
    (base,) = arrays.write(str(tmp_path / "more"), [20_000], {"n": more}, earlier)
    os.link(base, arrays.base_path(tmp_path / "more", 0))
    assert (tmp_path / "more").stat().st_size < 21_000 * 8 - 9_000 * 8
    for size in (4096, 16384):
        monkeypatch.setattr(arrays.mmap, "PAGESIZE", size)
        _, found = arrays.read(str(tmp_path / "more"), 1, lambda numbers: {"n": (np.int64, (numbers[0],))})
        assert np.array_equal(found.arrays["n"], more)
    for place, number in enumerate((0, 1 << 62, -1, 17)):  # what it shares is elsewhere, or ends elsewhere
        data = np.fromfile(tmp_path / "more", np.int64)
        data[8 + place % 2] = number
        data.tofile(tmp_path / "bad")
        (tmp_path / "bad.base0").unlink(missing_ok=True)
        os.link(base, tmp_path / "bad.base0")
        with pytest.raises(RuntimeError):
            arrays.read(str(tmp_path / "bad"), 1, lambda numbers: {"n": (np.int64, (numbers[0],))})


# What is on disk


def inodes(folder: Path) -> dict[int, int]:
    """Bytes of every file under a folder, by inode."""
    files = [file.stat() for file in folder.rglob("*") if file.is_file()]
    return {file.st_ino: file.st_blocks * 512 for file in files}


def test_keys_and_values_lie_on_disk_once(tmp_path: Path) -> None:
    """What was shared is linked; the rest ends within the last page of each head and array."""
    model = loaded("llama")
    prefill_texts(model, TEXTS, tmp_path / "base.kv", settings())
    for name in "xyz":
        report = on(tmp_path / "base.kv", model, [FURTHER], tmp_path / f"{name}.kv")
        assert report.shared > 0
    base = inodes(tmp_path / "base.kv")
    shared = [inodes(tmp_path / f"{name}.kv").keys() & base.keys() for name in "xyz"]
    assert len({*map(frozenset, shared)}) == 1
    keys = KVStore.open(tmp_path / "base.kv").specs["layers/000/keys"]
    seam = KVStore.open(tmp_path / "base.kv").manifest.seam or 0
    linked = KVStore.open(tmp_path / "x.kv").specs["layers/000/keys"]
    assert linked.base_bytes == seam * keys.row_bytes // 4096 * 4096
    assert linked.base == ((keys.chunk_bytes, linked.base_bytes),)


def test_without_hard_links_it_holds_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on another file system; the report says so."""
    model = loaded()
    prefill_texts(model, TEXTS, tmp_path / "base.kv", settings())
    on(tmp_path / "base.kv", model, [FURTHER], tmp_path / "linked.kv")
    monkeypatch.setattr(growth, "link", lambda source, target: False)
    monkeypatch.setattr(growth, "_cloned", lambda *_: False)
    report = on(tmp_path / "base.kv", model, [FURTHER], tmp_path / "copied.kv")
    assert report.shared == 0 < report.copied
    assert not inodes(tmp_path / "copied.kv").keys() & inodes(tmp_path / "base.kv").keys()
    assert numbers(tmp_path / "copied.kv") == numbers(tmp_path / "linked.kv")
    KVStore.open(tmp_path / "copied.kv").verify()


def test_it_outlives_its_base_and_a_copy_is_whole(tmp_path: Path) -> None:
    model = loaded()
    prefill_texts(model, TEXTS[1:], tmp_path / "base.kv", settings())
    on(tmp_path / "base.kv", model, TEXTS[:1], tmp_path / "x.kv")
    before, store = numbers(tmp_path / "x.kv"), KVStore.open(tmp_path / "x.kv")
    assert [(base.path, base.now) for base in bases_of(store)] == [(str(tmp_path / "base.kv"), AS_IT_WAS)]
    assert begun_as(KVStore.open(tmp_path / "base.kv")) == ["x.kv"]
    append_texts(model, [TEXTS[0]._replace(name="f.txt")], tmp_path / "base.kv")
    assert [base.now for base in bases_of(store)] == [CHANGED]
    shutil.rmtree(tmp_path / "base.kv")
    assert [base.now for base in bases_of(store)] == [GONE]
    too_long = replace(store.manifest, base={"store": "x" * 4096, "digest": "", "tokens": 1})
    assert [base.now for base in bases_of(KVStore(store.path, too_long, {}, {}))] == [UNREADABLE]
    shutil.copytree(tmp_path / "x.kv", tmp_path / "copy.kv")
    for name in ("x.kv", "copy.kv"):
        KVStore.open(tmp_path / name).verify()
        assert numbers(tmp_path / name) == before


def test_pushed_and_pulled_it_is_whole_with_its_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrays, "_LEAST", 4096)
    pytest.importorskip("obstore")
    model = loaded("llama")
    first = [text._replace(name=f"{n}{text.name}") for n in range(5) for text in TEXTS[:3]]
    prefill_texts(model, first, tmp_path / "base.kv", settings())
    build_indexes(tmp_path / "base.kv", "clusters", k=8)
    on(tmp_path / "base.kv", model, TEXTS[3:], tmp_path / "x.kv")
    buckets.push(tmp_path / "x.kv", f"file://{tmp_path}/bucket/x.kv")
    (tmp_path / "elsewhere").mkdir()
    pulled = tmp_path / "elsewhere/x.kv"
    buckets.pull(f"file://{tmp_path}/bucket/x.kv", pulled)
    KVStore.open(pulled).verify()
    assert tree(pulled) == tree(tmp_path / "x.kv")
    assert cells_of(pulled) == cells_of(tmp_path / "x.kv")
    assert [base.now for base in bases_of(KVStore.open(pulled))] == [GONE]


# Refusals, and jobs that were stopped


def test_what_is_refused(tmp_path: Path) -> None:
    model, base, out = loaded(), tmp_path / "base.kv", tmp_path / "x.kv"
    prefill_texts(model, TEXTS[1:], base, settings())
    for other in (loaded(seed=1), loaded(template=CHAT)):
        with pytest.raises(StoreMismatch):
            on(base, other, TEXTS[:1], out)
    with pytest.raises(ConfigError, match=r"made as that one was: leave out --method, -o, --kv"):
        Settings("window", {"chunk": 32}, kv="int8", base=base)
    with pytest.raises(StoreNotFound):
        on(tmp_path / "gone.kv", model, TEXTS[:1], out)
    with pytest.raises(StoreExists):
        on(base, model, TEXTS[:1], base)
    file = base / "layers/001/keys/c.0.0.0"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(StoreDamaged, match=r"c\.0\.0\.0 \(changed\)"):
        on(base, model, TEXTS[:1], out)
    assert not out.exists()


def stopped(base: Path, model: LoadedModel, out: Path) -> None:
    """Begin a store on another one, and stop after a chunk."""

    def stop(stage: str, done: int, total: int) -> None:
        if stage == "prefill" and done > (KVStore.open(base).manifest.seam or 0):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prefill_texts(model, TEXTS[2:3], out, Settings(base=base), progress=stop)


def test_a_stopped_one_goes_on_and_is_kept(tmp_path: Path) -> None:
    model, base, out = loaded(), tmp_path / "base.kv", tmp_path / "x.kv"
    prefill_texts(model, TEXTS[:2], base, settings())
    on(base, model, TEXTS[2:3], tmp_path / "whole.kv")
    before = tree(base)
    stopped(base, model, out)
    report = on(base, model, TEXTS[2:3], out)
    assert report.resumed_from > (KVStore.open(base).manifest.seam or 0)
    assert tree(out) == tree(tmp_path / "whole.kv")
    assert tree(base) == before


@pytest.mark.parametrize("linked", [True, False], ids=["linked", "copied"])
@pytest.mark.parametrize("appended", [False, True], ids=["on", "append"])
@pytest.mark.parametrize("running", [False, True], ids=["stopped", "running"])
def test_bytes_of_a_base_that_change_meanwhile_are_never_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, running: bool, appended: bool, linked: bool
) -> None:
    """While it is stopped, and while it runs; also where a store on a base is appended to."""
    if not linked:
        monkeypatch.setattr(growth, "link", lambda source, target: False)
    model, out = loaded("llama"), tmp_path / "x.kv"
    prefill_texts(model, TEXTS, tmp_path / "base.kv", settings())
    if appended:
        on(tmp_path / "base.kv", model, [TEXTS[0]._replace(name="g.txt")], out)
    earlier = KVStore.open(out if appended else tmp_path / "base.kv")
    seam, file = earlier.manifest.seam or 0, tmp_path / "x.kv.partial/store/layers/000/keys/base.0.0"
    stops = [] if running else [KeyboardInterrupt]
    other = bytes([earlier.keys(0, 0).view(np.uint8)[0, 0] ^ 1])

    def harm() -> None:
        with file.open("r+b") as opened:  # in place, as a disk does it
            opened.write(other)

    def meanwhile(stage: str, done: int, total: int) -> None:
        if stage == "prefill" and done > seam:
            if stops:
                raise stops.pop()
            harm()

    more = [TEXTS[1]._replace(name="f.txt")]

    def go_on() -> None:
        if appended:
            append_texts(model, more, out, progress=meanwhile)
        else:
            prefill_texts(model, more, out, Settings(base=earlier.path), progress=meanwhile)

    if not running:
        with pytest.raises(KeyboardInterrupt):
            go_on()
        harm()
    with pytest.raises(StoreDamaged, match="took over from another store have changed"):
        go_on()
    assert out.exists() == appended
    assert not appended or KVStore.open(out).manifest == earlier.manifest


def test_a_stopped_one_is_refused_when_its_base_has_changed(tmp_path: Path) -> None:
    model, base, out = loaded(), tmp_path / "base.kv", tmp_path / "x.kv"
    prefill_texts(model, TEXTS[:2], base, settings())
    stopped(base, model, out)
    append_texts(model, TEXTS[3:4], base)
    with pytest.raises(StoreMismatch, match="begun with another base"):
        on(base, model, TEXTS[2:3], out)


def test_a_base_that_moved_is_the_same_base(tmp_path: Path) -> None:
    """For a store on it that was stopped, which says where it lies now, and for one that is there."""
    model, base, out = loaded(), tmp_path / "base.kv", tmp_path / "x.kv"
    prefill_texts(model, TEXTS[:2], base, settings())
    stopped(base, model, out)
    base = base.rename(tmp_path / "renamed.kv")
    assert on(base, model, TEXTS[2:3], out).resumed_from
    assert [(found.path, found.now) for found in bases_of(KVStore.open(out))] == [(str(base), AS_IT_WAS)]
    (tmp_path / "bases").mkdir()
    base = base.rename(tmp_path / "bases/base.kv")
    place = Place(out)
    assert settled(prepare(model, TEXTS[2:3], Settings(base=base), place), place)
    append_texts(model, TEXTS[3:4], base)
    with pytest.raises(StoreMismatch, match="of another"):
        settled(prepare(model, TEXTS[2:3], Settings(base=base), place), place)


def test_in_a_bucket_it_names_its_base_without_a_path_of_this_machine(tmp_path: Path) -> None:
    """And it is kept wherever its staging folder and its base lie today."""
    pytest.importorskip("obstore")
    model, base = loaded(), tmp_path / "here/base.kv"
    prefill_texts(model, TEXTS[:2], base, settings())
    (tmp_path / "bucket").mkdir()
    for staging, kept in (("one", False), ("another/place", True)):
        place = destination_of(f"file://{tmp_path}/bucket/x.kv", tmp_path / staging)
        work = prepare(model, TEXTS[2:3], Settings(base=base), place)
        assert (work.manifest.base or {})["store"] == "base.kv"
        assert (settled(work, place) is not None) == kept
        if not kept:
            make(model, work, place, lambda stage, done, total: None)


def test_a_base_that_fills_no_chunk_is_not_named(tmp_path: Path) -> None:
    """Nothing of it is taken over, and the store is that of one prefill."""
    model = loaded()
    prefill_texts(model, TEXTS[:2], tmp_path / "base.kv", settings(chunk=5000))
    on(tmp_path / "base.kv", model, TEXTS[2:3], tmp_path / "x.kv")
    prefill_texts(model, TEXTS[:3], tmp_path / "whole.kv", settings(chunk=5000))
    assert tree(tmp_path / "x.kv") == tree(tmp_path / "whole.kv")
    assert [*bases_of(KVStore.open(tmp_path / "x.kv"))] == []


def test_documents_of_the_base_are_skipped_and_other_texts_of_their_names_refused(tmp_path: Path) -> None:
    """As in an append."""
    model, base, out = loaded(), tmp_path / "base.kv", tmp_path / "x.kv"
    prefill_texts(model, TEXTS[:2], base, settings())
    with pytest.raises(CorpusError, match=r"b\.txt is in .*base\.kv already, with another text"):
        on(base, model, [TEXTS[1]._replace(text="Another."), TEXTS[2]], out)
    with pytest.raises(CorpusError, match=r"all of these documents are in .*base\.kv already: give others"):
        on(base, model, TEXTS[:2], out)
    assert not out.exists()
    report = on(base, model, TEXTS[1:3], out)
    assert report.skipped == (Skipped("b.txt", f"it is in {base} already"),)
    assert [one.name for one in KVStore.open(out).documents] == ["a.txt", "b.txt", "c.txt"]


def test_an_index_that_was_only_begun_is_named_and_one_that_is_unpublished_extended(tmp_path: Path) -> None:
    model, base = loaded("llama"), tmp_path / "base.kv"
    prefill_texts(model, TEXTS[:2], base, settings())
    build_indexes(base, "flat")
    built, staging = kind_folder(base, "flat"), staging_folder(base, "flat")
    shutil.copytree(built, staging)
    built.rename(built.with_name("flat.old"))  # a build was killed while it was published
    assert [each.kind for each in on(base, model, TEXTS[2:3], tmp_path / "x.kv").indexes] == ["flat"]
    built.rename(staging)
    next(staging.glob("*.json")).unlink()
    for report in (on(base, model, TEXTS[3:4], tmp_path / "y.kv"), append_texts(model, TEXTS[2:3], base)):
        assert report.indexes == ()
        (told,) = report.left
        assert "the 'flat' index was not extended, because the 'flat' index of" in told
        assert "is unfinished (5 of 6 heads)" in told


def test_indexes_of_the_base_that_cannot_be_published_stop_no_store_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The base may be another user's, or being indexed. Of an index of the store's own it is an error."""
    model, base = loaded("llama"), tmp_path / "base.kv"
    prefill_texts(model, TEXTS[:2], base, settings())
    build_indexes(base, "flat")
    kind_folder(base, "flat").rename(staging_folder(base, "flat"))
    with alone(indexes_folder(base)):
        assert "unfinished" in on(base, model, TEXTS[2:3], tmp_path / "x.kv").left[0]

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(indexing, "publish", full)
    assert "unfinished" in on(base, model, TEXTS[2:3], tmp_path / "y.kv").left[0]
    with pytest.raises(
        IndexNotWritten, match=r"base\.kv\.indexes cannot be written \(No space left on device\)"
    ):
        append_texts(model, TEXTS[3:4], base)
