"""A collection holds the documents of a folder as they are, however often its making is interrupted."""

import os
import shutil
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from offload_decode.collections import journal
from offload_decode.collections.collection import HEADER, Changing, Collection
from offload_decode.collections.journal import DOCUMENTS
from offload_decode.collections.words import WORDS, number_of, scores
from offload_decode.common import files
from offload_decode.common.errors import (
    ConfigError,
    CorpusError,
    DoesNotFit,
    StoreBusy,
    StoreDamaged,
    StoreExists,
    StoreForeign,
    StoreMismatch,
    StoreNotFound,
)
from offload_decode.kv.indexes import examine
from offload_decode.prefill_jobs.buckets import collections
from offload_decode.prefill_jobs.collect import CollectReport, collect
from offload_decode.prefill_jobs.folders import Rules
from offload_decode.prefill_jobs.indexing import build_indexes
from offload_decode.prefill_jobs.job import Maker, Settings, prefill, prepare
from offload_decode.store.reader import KVStore
from tests.prefill_jobs.killing import tree
from tests.tiny import plain_lora

SETTINGS = Settings(options={"chunk": "32"})


@pytest.fixture(scope="module")
def maker(inputs: Path) -> Maker:
    return Maker(str(inputs / "model"), SETTINGS)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.txt").write_text("alpha " * 8)
    (folder / "sub" / "b.txt").write_text("beta " * 10)
    return folder


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def collected(maker: Maker, texts: Path, out: Path) -> dict[str, bytes]:
    """The files of the collection that `out` is from here on."""
    collect(str(texts), out, maker)
    return tree(out)


def counts(report: CollectReport) -> tuple[int, int, int, int]:
    return report.made, report.kept, len(report.gone), len(report.failed)


def held(out: Path) -> dict[str, Path]:
    """The store of each document; nothing else lies among the stores."""
    collection = Collection(out)
    stores = {entry.name: collection.store(entry) for entry in collection.entries}
    assert sorted(stores.values()) == sorted(out.glob("stores/*/*"))
    return stores


def test_what_was_left_out_of_a_document_is_told_when_its_store_is_made(maker, texts, out):
    (texts / "c.md").write_text("![plot](data:image/png;base64,iVBORw0KGgo=) text")
    assert collect(str(texts), out, maker).notes == [("c.md", "left out: 1 embedded file")]
    assert collect(str(texts), out, maker).notes == []


def test_each_store_is_that_of_a_prefill_of_its_document(maker, texts, out, tmp_path):
    report = collect(str(texts), out, maker)
    assert (counts(report), report.documents) == ((2, 0, 0, 0), 2)
    stores = held(out)
    assert [document.name for document in KVStore.open(stores["sub/b.txt"]).documents] == ["sub/b.txt"]
    prefill(str(texts / "a.txt"), model=maker.model, out=tmp_path / "a.kv", settings=SETTINGS)
    assert tree(stores["a.txt"]) == tree(tmp_path / "a.kv")
    assert report.tokens == sum(KVStore.open(store).manifest.n_tokens for store in stores.values())


def test_documents_of_the_same_bytes_are_named(maker, texts, out):
    for name in ("0.txt", "sub/d.txt"):
        (texts / name).write_text("beta " * 10)
    report = collect(str(texts), out, maker)
    assert report.documents == 4
    assert report.copies == [("sub/b.txt", "0.txt"), ("sub/d.txt", "0.txt")]


def test_unchanged_documents_are_kept_without_loading_the_model(maker, texts, out, collected):
    again = Maker(Collection(out).header.model_id, SETTINGS)
    os.utime(texts / "a.txt", (1, 1))
    assert counts(collect(str(texts), out, again)) == (0, 2, 0, 0)
    assert "loaded" not in vars(again)
    assert tree(out) == collected


def test_changed_documents_are_prefilled_again_and_missing_ones_dropped(maker, texts, out, collected):
    before = held(out)
    (texts / "a.txt").write_text("alpha, changed")
    (texts / "sub" / "b.txt").rename(texts / "c.txt")
    assert counts(collect(str(texts), out, maker)) == (2, 0, 1, 0)
    after = held(out)
    assert set(after) == {"a.txt", "c.txt"}
    assert not set(before.values()) & set(after.values())


def test_a_document_that_grew_begins_as_its_earlier_store(maker, texts, out, tmp_path):
    """Its store is that of a prefill; where the earlier one is damaged all of it is run."""
    (texts / "a.txt").write_text(text := "alpha " * 40)
    collect(str(texts), out, maker)
    (texts / "a.txt").write_text(longer := text + "omega")
    report = collect(str(texts), out, maker)
    assert 0 < report.prefilled < 0.8 * KVStore.open(held(out)["a.txt"]).manifest.n_tokens
    flipped = held(out)["a.txt"] / "layers/000/window_keys/c.0.0.0"
    for damaged, end in ((False, ""), (True, " and omega")):
        if damaged:
            flipped.write_bytes(bytes([flipped.read_bytes()[0] ^ 1]) + flipped.read_bytes()[1:])
            (texts / "a.txt").write_text(longer + end)
            report = collect(str(texts), out, maker)
            assert not report.failed
            assert report.prefilled == KVStore.open(held(out)["a.txt"]).manifest.n_tokens
        whole = tmp_path / f"{damaged}.kv"
        prefill(str(texts / "a.txt"), model=maker.model, out=whole, settings=SETTINGS)
        assert tree(held(out)["a.txt"]) == tree(whole)


def test_what_was_begun_without_a_damaged_earlier_store_goes_on(maker, texts, out, tmp_path):
    """Each run sees that store again, which opens, and begins nothing anew for it."""
    (texts / "a.txt").write_text(text := "alpha " * 40)
    collect(str(texts), out, maker)
    damaged = held(out)["a.txt"] / "layers/000/window_keys/c.0.0.0"
    damaged.write_bytes(bytes([damaged.read_bytes()[0] ^ 1]) + damaged.read_bytes()[1:])
    (texts / "a.txt").write_text(text + "omega")
    for first, last in ((0, 64), (64, 128), (128, None)):
        done: list[int] = []

        def interrupt(stage: str, at: int, total: int, about: str, done=done, last=last) -> None:
            if "a.txt, " in about:
                done.append(int(about.split()[1]))
                if done[-1] == last:
                    raise Killed

        with pytest.raises(Killed) if last else nullcontext():
            collect(str(texts), out, maker, progress=interrupt)
        assert done[0] == first
    prefill(str(texts / "a.txt"), model=maker.model, out=tmp_path / "whole.kv", settings=SETTINGS)
    assert tree(held(out)["a.txt"]) == tree(tmp_path / "whole.kv")


def test_a_changed_document_keeps_its_index_or_is_told_of(maker, texts, out):
    """What has grown, or changed late, has it; what has changed from its beginning is to be indexed again."""
    (texts / "a.txt").write_text(text := "alpha " * 40)
    collect(str(texts), out, maker)

    def store() -> Path:
        collection = Collection(out)
        return next(collection.store(entry) for entry in collection.entries if entry.name == "a.txt")

    for change, lost in ((text + "omega", []), ("omega " + text, [("a.txt", "flat")])):
        build_indexes(store(), "flat")
        (texts / "a.txt").write_text(change)
        report = collect(str(texts), out, maker)
        assert (report.made, report.lost) == (1, lost)
        built = examine(KVStore.open(store()), "flat")
        assert (built is not None and built.whole) == (not lost)


def test_an_emptied_document_keeps_its_earlier_text_which_is_told(maker, texts, out, collected):
    (texts / "a.txt").write_text("")
    (texts / "new.txt").write_text("")
    told = {one.name: one.reason for one in collect(str(texts), out, maker).failed}
    assert told == {
        "a.txt": "it holds no text: its earlier text stays; delete the file, or leave it out (--exclude)",
        "new.txt": "it holds no text",
    }
    assert set(held(out)) == {"a.txt", "sub/b.txt"}


def test_a_store_that_was_removed_is_made_again(maker, texts, out, collected):
    shutil.rmtree(held(out)["a.txt"])
    assert counts(collect(str(texts), out, maker)) == (1, 1, 0, 0)
    assert tree(out) == collected


def test_unreadable_documents_stop_no_other_and_keep_their_stores(maker, texts, out, collected):
    (texts / "a.txt").write_bytes(b"\0\1\2")
    (texts / "new.txt").write_text("news")
    os.chmod(texts / "sub", 0)
    try:
        report = collect(str(texts), out, maker)
    finally:
        os.chmod(texts / "sub", 0o755)
    unread = {one.name for one in report.failed}
    assert "a.txt" in unread
    assert unread <= {"a.txt", "sub"}  # root reads every folder
    assert report.gone == []
    assert set(held(out)) == {"a.txt", "sub/b.txt", "new.txt"}


def test_nothing_is_dropped_where_nothing_is_found(maker, texts, out, collected):
    shutil.rmtree(texts)
    with pytest.raises(CorpusError, match="no corpus at"):
        collect(str(texts), out, maker)
    texts.mkdir()
    with pytest.raises(CorpusError, match="nothing to read"):
        collect(str(texts), out, maker)
    assert tree(out) == collected


def test_most_documents_are_dropped_only_on_demand(maker, texts, out):
    (texts / "c.txt").write_text("gamma")
    collect(str(texts), out, maker)
    before = tree(out)
    few = Rules(globs=("a.txt",))
    with pytest.raises(ConfigError, match=r"2 of the 3 documents of .* such as c\.txt, and would be dropped"):
        collect(str(texts), out, maker, rules=few)
    assert tree(out) == before
    assert collect(str(texts), out, maker, rules=Rules(globs=("[ac].txt",))).gone == ["sub/b.txt"]
    collect(str(texts), out, maker)
    assert collect(str(texts), out, maker, rules=few, drop=True).gone == ["c.txt", "sub/b.txt"]
    assert set(held(out)) == {"a.txt"}


def test_a_list_that_is_full_stops_before_the_prefill(maker, texts, out, monkeypatch):
    monkeypatch.setattr(journal, "LARGEST", journal.LONGEST + 100)  # room for the first line, not the second
    with pytest.raises(DoesNotFit, match="several collections"):
        collect(str(texts), out, maker)
    assert set(held(out)) == {"a.txt"}


class Killed(BaseException):
    """The process ends here."""


def killing(monkeypatch: pytest.MonkeyPatch, at: int) -> Callable[[], int]:
    """Ends the process before or after its `at`-th rename or removal; returns how many there were."""
    calls = 0

    def watched(function: Any) -> Any:
        def call(*args: Any, **more: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == at:
                raise Killed
            result = function(*args, **more)
            calls += 1
            if calls == at:
                raise Killed
            return result

        return call

    for owner, name in ((os, "rename"), (os, "replace"), (shutil, "rmtree")):
        monkeypatch.setattr(owner, name, watched(getattr(owner, name)))
    return lambda: calls


def test_killed_at_any_rename_or_removal_it_is_complete_and_resumes(maker, texts, tmp_path, monkeypatch):
    begun = tmp_path / "begun"
    collect(str(texts), begun, maker)
    (texts / "a.txt").write_text("alpha, changed")
    (texts / "c.txt").write_text("gamma")
    shutil.rmtree(texts / "sub")
    wanted = tmp_path / "wanted"
    shutil.copytree(begun, wanted)
    with monkeypatch.context() as patch:
        total = killing(patch, at=0)
        collect(str(texts), wanted, maker)
        calls = total()
    assert calls > 10
    # What happens within a prefill is killed at every step by tests of its own.
    for at in [*range(1, calls - 14, 15), *range(calls - 14, calls + 1)]:
        out = tmp_path / f"killed-{at}"
        shutil.copytree(begun, out)
        with monkeypatch.context() as patch:
            killing(patch, at)
            with pytest.raises(Killed):
                collect(str(texts), out, maker)
        collection = Collection(out)
        for entry in collection.entries:
            KVStore.open(collection.store(entry))
        collect(str(texts), out, maker)
        assert held(out).keys() == {"a.txt", "c.txt"}
        assert found(out, "alpha beta gamma") == {"a.txt", "c.txt"}
        assert {
            name: data for name, data in tree(out).items() if not name.startswith((DOCUMENTS, WORDS))
        } == {name: data for name, data in tree(wanted).items() if not name.startswith((DOCUMENTS, WORDS))}
        shutil.rmtree(out)


def test_interrupted_prefill_resumes(maker, texts, out, monkeypatch):
    done: list[str] = []

    def interrupt(stage: str, at: int, total: int, about: str) -> None:
        done.append(about)
        if "b.txt, 32 of" in about:
            raise Killed

    with pytest.raises(Killed):
        collect(str(texts), out, maker, progress=interrupt)
    assert [entry.name for entry in Collection(out).entries] == ["a.txt"]
    done.clear()
    collect(str(texts), out, maker, progress=lambda *told: done.append(told[3]))
    assert any("b.txt, 32 of" in about for about in done)
    assert not any("b.txt, 0 of" in about for about in done)


@pytest.mark.parametrize("now", ["beta " * 13 + "end", "beta " * 10, "other " * 9])
def test_a_document_that_changes_again_after_an_interrupted_run(maker, texts, out, tmp_path, collected, now):
    """What was begun of the text in between is removed, and its document is that of now."""

    def interrupt(stage: str, at: int, total: int, about: str) -> None:
        if "a.txt, 64 of" in about:
            raise Killed

    (texts / "a.txt").write_text("beta " * 30)
    with pytest.raises(Killed):
        collect(str(texts), out, maker, progress=interrupt)
    assert len([*out.glob("stores/*/*.partial")]) == 1
    (texts / "a.txt").write_text(now)
    assert counts(collect(str(texts), out, maker))[2:] == (0, 0)
    prefill(str(texts / "a.txt"), model=maker.model, out=tmp_path / "whole.kv", settings=SETTINGS)
    assert tree(held(out)["a.txt"]) == tree(tmp_path / "whole.kv")


def test_one_process_changes_it_at_a_time(maker, texts, out):
    with Changing.at(out), pytest.raises(StoreBusy, match="Another process is changing the collection"):
        collect(str(texts), out, maker)


def test_a_collection_has_one_model_and_one_way_of_prefilling(maker, texts, out, collected, tmp_path):
    with pytest.raises(StoreMismatch, match="differs in settings"):
        collect(str(texts), out, Maker(maker.model, Settings(options={"chunk": "16"})))
    with pytest.raises(StoreMismatch, match="differs in weights"):  # though there is nothing to prefill
        collect(str(texts), out, Maker(maker.model, SETTINGS, adapter=str(plain_lora(tmp_path / "lora"))))
    (texts / "new.txt").write_text("news")
    with pytest.raises(StoreMismatch, match="dtype"):
        collect(str(texts), out, Maker(maker.model, SETTINGS, dtype="bfloat16"))
    assert tree(out) == collected
    assert "base" not in Collection(out).header.settings  # which collections of earlier states do not state


def test_other_folders_are_left_alone(maker, texts, out):
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    with pytest.raises(StoreExists, match="is no collection"):
        collect(str(texts), out, maker)
    with pytest.raises(StoreExists, match="is a file"):
        collect(str(texts), out / "thesis.tex", maker)
    with pytest.raises(CorpusError, match="is a file: a collection is made of a folder"):
        collect(str(texts / "a.txt"), out, maker)
    with pytest.raises(StoreNotFound):
        Collection(out)
    assert [path.name for path in out.iterdir()] == ["thesis.tex"]


def test_a_collection_among_the_texts_is_no_text(maker, texts):
    collect(str(texts), texts / "out", maker)
    report = collect(str(texts), texts / "out", maker)
    assert counts(report) == (0, 2, 0, 0)
    assert report.skipped == [("out", "it is a collection of stores")]
    with pytest.raises(CorpusError, match="is a collection of stores"):
        collect(str(texts / "out"), texts / "other", maker)


def test_no_link_leads_out_of_it(maker, texts, out, tmp_path, collected):
    first = Collection(out).entries[0]
    folder = (out / first.store).parent
    shutil.move(folder, tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreDamaged, match="is a link"):
        Collection(out).store(first)
    before = tree(tmp_path / "elsewhere")
    (texts / first.name).unlink()
    with pytest.raises(StoreDamaged, match="is a link"):
        collect(str(texts), out, maker)
    assert tree(tmp_path / "elsewhere") == before


def test_an_invalid_header_is_refused(maker, texts, out, collected):
    text = (out / HEADER).read_text()
    for wrong, error in (
        ("{", StoreDamaged),
        ("[]", StoreForeign),
        (text.replace('"version": 1', '"version": 2'), StoreForeign),
        (text.replace('"dtype"', '"type"'), StoreForeign),
        (text.replace('"float32"', "3"), StoreForeign),
    ):
        (out / HEADER).write_text(wrong)
        with pytest.raises(error):
            Collection(out)


def test_metadata_follow_their_file_and_stay_without_one(maker, texts, out):
    report = collect(str(texts), out, maker, metadata={"a.txt": {"year": 1999}, "no.txt": {}})
    assert report.unknown == ["no.txt"]
    assert [dict(entry.metadata) for entry in Collection(out).entries] == [{"year": 1999}, {}]
    (texts / "a.txt").write_text("changed")
    collect(str(texts), out, maker)
    assert dict(Collection(out).entries[0].metadata) == {"year": 1999}
    assert counts(collect(str(texts), out, maker, metadata={"sub/b.txt": {"x": "y"}})) == (0, 2, 0, 0)
    assert [dict(entry.metadata) for entry in Collection(out).entries] == [{}, {"x": "y"}]


def found(out: Path, question: str) -> set[str]:
    numbered = {number_of(entry.store): entry.name for entry in Collection(out).entries}
    return {numbered[number] for number in scores(out / WORDS, question)}


def test_the_words_are_those_of_the_documents(maker, texts, out, collected):
    assert (found(out, "alpha"), found(out, "beta")) == ({"a.txt"}, {"sub/b.txt"})
    (texts / "a.txt").write_text("gamma")
    (texts / "sub" / "b.txt").unlink()
    collect(str(texts), out, maker)
    assert (found(out, "alpha beta"), found(out, "gamma")) == (set(), {"a.txt"})
    (out / WORDS).unlink()
    assert counts(collect(str(texts), out, maker)) == (0, 1, 0, 0)
    assert found(out, "gamma") == {"a.txt"}


def test_a_link_that_leads_nowhere_today_is_not_gone(maker, texts, out, tmp_path):
    away = tmp_path / "away"
    away.mkdir()
    (away / "c.txt").write_text("gamma " * 6)
    (texts / "other").symlink_to(away)
    rules = Rules(follow_links=True)
    assert counts(collect(str(texts), out, maker, rules=rules)) == (3, 0, 0, 0)
    away.rename(tmp_path / "unmounted")
    assert counts(collect(str(texts), out, maker, rules=rules)) == (0, 2, 0, 1)
    assert "other/c.txt" in held(out)


def test_a_killed_sweep_is_finished(maker, texts, out, collected):
    store = held(out)["a.txt"]
    (texts / "a.txt").unlink()
    left = store.with_name(store.name + ".gone")
    left.mkdir()
    (left / "file").touch()
    assert counts(collect(str(texts), out, maker)) == (0, 1, 1, 0)
    assert set(held(out)) == {"sub/b.txt"}


def test_the_folders_of_stores_are_on_the_disk_too(maker, texts, out, monkeypatch):
    synced: set[str] = set()
    monkeypatch.setattr(files, "_sync", lambda path: synced.add(os.path.abspath(path)))
    collect(str(texts), out, maker)
    assert {str(out.parent), str(out), str(out / "stores")} <= synced
    assert all(str(store.parent) in synced for store in held(out).values())


def test_a_document_too_long_for_the_model_stops_no_other(maker, texts, out, monkeypatch):
    def refused(loaded: Any, documents: Any, *rest: Any) -> Any:
        if documents[0].name == "a.txt":
            raise ConfigError("it is longer than the model's positions")
        return prepare(loaded, documents, *rest)

    monkeypatch.setattr("offload_decode.prefill_jobs.collect.prepare", refused)
    report = collect(str(texts), out, maker)
    assert counts(report) == (1, 0, 0, 1)
    assert report.failed[0].reason == "it is longer than the model's positions"


def test_ctrl_c_does_not_wait_for_lists_on_their_way_into_a_bucket(maker, texts, out, tmp_path, monkeypatch):
    """The main thread would take it only when the network has answered."""
    senders, send = [], collections.send

    def sent(*given: Any) -> bool:
        senders.append(threading.current_thread())
        return send(*given)

    collect(str(texts), out, maker)
    monkeypatch.setattr(collections, "send", sent)
    collections.push_collection(out, f"file://{tmp_path}/bucket", lambda *now: None)
    assert len(senders) == 3
    assert all(thread.daemon for thread in senders)
