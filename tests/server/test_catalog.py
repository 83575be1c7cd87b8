import logging
import os
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from unicodedata import normalize

import pytest

from offload_decode import demo_models
from offload_decode.common.errors import ConfigError
from offload_decode.prefill_jobs.indexing import build_indexes
from offload_decode.server import catalog as module
from offload_decode.server.catalog import Catalog
from offload_decode.server.requests import NoSuchName
from offload_decode.store.reader import KVStore
from tests.store.jobs import FULL, make_job


def make_store(path: Path, seed: int = 0, model: str = "test/model", adapter: str = "") -> Path:
    """Made beside its place and renamed into it, as a prefill does."""
    job = make_job(40, "float32", (FULL,), query_samples=8, seed=seed)
    prefill = job.manifest.prefill | ({"adapter": adapter} if adapter else {})
    return replace(job, manifest=replace(job.manifest, model_id=model, prefill=prefill)).write(path)


@pytest.fixture
def shelf(tmp_path):
    folder = tmp_path / "shelf"
    folder.mkdir()
    return folder


@pytest.fixture
def opened():
    with ExitStack() as stack:
        yield lambda *places, model=None: stack.enter_context(closing(Catalog(places, model)))


def names(catalog: Catalog) -> list[str]:
    return [entry.name for entry in catalog.entries()]


def until(holds: Callable[[], bool], seconds: float = 60) -> None:
    """Wait for what another thread, or process, brings about."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_stores_and_their_models_have_names(opened, shelf):
    make_store(shelf / "book.kv")
    make_store(shelf / "paper", model=str(shelf / "models" / "tiny"))
    alone = make_store(shelf.parent / "alone.kv")
    catalog = opened(shelf, alone, model="demo")
    assert names(catalog) == ["book", "paper", "alone", "demo", "model", "tiny"]
    book = catalog.entry("book")
    manifest = KVStore.open(shelf / "book.kv").manifest
    assert book.path == shelf / "book.kv"
    assert (book.base, book.model_id) == ("test/model", "test/model")
    assert (book.dtype, book.weights) == ("float32", "auto")
    assert (book.tokens, book.documents, book.recall) == (manifest.n_tokens, 2, None)
    assert book.digest == KVStore.open(shelf / "book.kv").store_digest
    assert abs(book.created - time.time()) < 60
    assert catalog.folders == (shelf,)


def test_a_model_is_shown_by_its_id_and_never_by_a_path(opened, shelf):
    (shelf / "models").mkdir()
    make_store(shelf / "book.kv", model=str(shelf / "models"))
    catalog = opened(shelf, model="org/name")
    assert [entry.base for entry in catalog.entries()] == ["models", "org/name", "models"]
    bare = catalog.entry("models")
    assert (bare.path, bare.tokens, bare.model_id, bare.dtype) == (None, 0, str(shelf / "models"), "float32")
    assert catalog.entry("org/name") == catalog.entry("name")


def test_the_model_that_is_given_and_that_of_a_store_are_one(opened, shelf):
    (shelf / "tiny").mkdir()
    make_store(shelf / "book.kv", model=str(shelf / "tiny"))
    catalog = opened(shelf, model=os.path.relpath(shelf / "tiny"))
    assert names(catalog) == ["book", "tiny"]


@pytest.mark.parametrize("name", demo_models.NAMES)
def test_a_shipped_model_is_no_folder_of_its_name(opened, shelf, name, monkeypatch):
    make_store(shelf / "book.kv", model=name)
    (shelf.parent / name).mkdir()
    monkeypatch.chdir(shelf.parent)
    catalog = opened(shelf, model=name)
    assert names(catalog) == ["book", name]
    assert catalog.entry(name).model_id == name


def test_folders_that_are_no_stores_are_not_served(opened, shelf):
    (shelf / "notes").mkdir()
    (shelf / "text.kv").write_text("no store")
    (shelf / "empty.kv").mkdir()
    (shelf / "pipe.kv").mkdir()
    os.mkfifo(shelf / "pipe.kv" / "zarr.json")
    (shelf / "loop.kv").symlink_to(shelf / "loop.kv")
    make_store(shelf / ".hidden.kv")
    make_store(shelf / "book.kv.partial")
    make_store(shelf / "book.kv.indexes")
    assert names(opened(shelf)) == []


def test_unknown_names_are_refused_with_the_known_ones(opened, shelf):
    catalog = opened(shelf)
    with pytest.raises(NoSuchName, match="nothing to ask"):
        catalog.entry("book")
    for number in range(12):
        make_store(shelf / f"s{number:02}.kv")
    catalog.refresh()
    for name in ("../shelf/s00.kv", str(shelf / "s00.kv"), "s00.kv", "", "s00\0", "\ud800", "x" * 10_000):
        with pytest.raises(NoSuchName) as raised:
            catalog.entry(name)
        assert "there are s00" in str(raised.value)
        assert "3 more" in str(raised.value)
        assert len(str(raised.value)) < 500
        assert str(raised.value).isprintable()


def test_a_name_is_found_however_its_letters_are_composed(opened, shelf):
    one, other = normalize("NFC", "café"), normalize("NFD", "café")
    make_store(shelf / f"{other}.kv")
    catalog = opened(shelf)
    assert catalog.entry(one) is catalog.entry(other)
    assert catalog.entry(one).name == one
    assert catalog.entry(one).path == shelf / f"{other}.kv"


def test_a_missing_folder_of_stores_is_refused(shelf):
    with pytest.raises(ConfigError, match="there is no store"):
        Catalog([shelf / "absent"])


def test_stores_that_are_published_and_removed_are_noticed(opened, shelf):
    alone = make_store(shelf.parent / "alone.kv")
    catalog = opened(shelf, alone)
    gone: set[str] = set()
    catalog.subscribe(gone.update)
    make_store(shelf / "book.kv")
    until(lambda: "book" in names(catalog))
    assert not gone
    os.rename(shelf / "book.kv", shelf.parent / "away.kv")
    shutil.rmtree(alone)
    until(lambda: not names(catalog))
    until(lambda: gone == {"book", "alone", "model"})


def test_folders_are_polled_without_watchfiles(opened, shelf, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "watchfiles", None)
    monkeypatch.setattr(module, "POLL_S", 0.01)
    catalog = opened(shelf)
    make_store(shelf / "book.kv")
    until(lambda: "book" in names(catalog))


def test_a_folder_name_that_is_not_utf8_does_not_stop_watching(opened, shelf, monkeypatch):
    monkeypatch.setattr(module, "POLL_S", 0.05)
    catalog = opened(shelf)
    time.sleep(0.3)  # until the folder is watched
    (shelf / os.fsdecode(b"bad\xff")).mkdir()
    time.sleep(0.3)  # until it is told of that name
    make_store(shelf / "book.kv")
    until(lambda: "book" in names(catalog))


def test_watching_goes_on_after_an_error(opened, shelf, monkeypatch):
    monkeypatch.setattr(module, "POLL_S", 0.01)
    looked: list[int] = []

    def fails(catalog: Catalog) -> None:
        looked.append(1)
        raise RuntimeError("of a subscriber")

    opened(shelf)
    monkeypatch.setattr(Catalog, "refresh", fails)
    until(lambda: len(looked) > 2)


def test_a_store_that_is_indexed_or_replaced_is_another_entry(opened, shelf):
    make_store(shelf / "book.kv")
    make_store(shelf / "paper.kv")
    catalog = opened(shelf)
    gone: list[set[str]] = []
    catalog.subscribe(gone.append)
    before = catalog.entry("book")
    catalog.refresh()
    assert gone == []
    built = build_indexes(shelf / "book.kv", "clusters", k=4)
    catalog.refresh()
    indexed = catalog.entry("book")
    assert (before.recall, indexed.recall) == (None, pytest.approx(built.recall))
    assert (indexed == before, indexed.digest == before.digest) == (False, True)
    os.rename(shelf / "book.kv", shelf.parent / "old.kv")
    os.rename(make_store(shelf.parent / "book.kv", seed=1), shelf / "book.kv")
    catalog.refresh()
    assert catalog.entry("book").digest != before.digest
    assert gone == [{"book"}] * 2


def test_a_damaged_store_is_left_out_and_said_once(opened, shelf, caplog):
    make_store(shelf / "good.kv")
    damaged = make_store(shelf / "bad.kv", seed=1)
    sums = (damaged / "SHA256SUMS").read_text()
    (damaged / "SHA256SUMS").write_text(sums.replace("a", "b"))
    with caplog.at_level(logging.WARNING):
        catalog = opened(shelf)
        catalog.refresh()
        catalog.refresh()
    assert names(catalog) == ["good", "model"]
    assert sum("bad.kv is left out" in line for line in caplog.messages) == 1
    (damaged / "SHA256SUMS").write_text(sums)  # a copy that has come to its end
    catalog.refresh()
    assert names(catalog) == ["bad", "good", "model"]


def test_one_name_in_two_folders(opened, shelf, caplog):
    other = shelf.parent / "other"
    make_store(shelf / "book.kv", model="a/book")
    make_store(shelf / "book", seed=2, model="b/book")
    make_store(other / "book.kv", seed=1, model="a/book")
    with caplog.at_level(logging.WARNING):
        catalog = opened(shelf, other)
    found = {entry.name: entry.path for entry in catalog.entries()}
    assert len(found) == 5
    assert found["book"] == shelf / "book"
    assert sum("is called 'book-" in line for line in caplog.messages) == 4
    again = {entry.name: entry.path for entry in opened(shelf, other).entries()}
    assert again == found
    # A name that is free again is not that of another corpus all of a sudden: only who comes next has it.
    shutil.rmtree(shelf / "book")
    catalog.refresh()
    left = {name: path for name, path in found.items() if name != "book" and path is not None}
    assert {entry.name: entry.path for entry in catalog.entries() if entry.path} == left
    make_store(shelf / "book", seed=2, model="b/book")
    catalog.refresh()
    assert catalog.entry("book").path == shelf / "book"


def test_names_can_be_shown_whatever_folders_are_called(opened, shelf):
    made = make_store(shelf / "plain.kv")
    for name in (b"bad\xff.kv", b"new\nline.kv", "Bücher.kv".encode()):
        shutil.copytree(made, shelf / os.fsdecode(name))
    shown = [entry.name for entry in opened(shelf).entries()]
    assert shown == ["Bücher", "bad\ufffd", "new\ufffdline", "plain", "model"]


def test_a_store_that_is_hidden_is_not_served(opened, shelf):
    path = make_store(shelf / "book.kv")
    catalog = opened(shelf)
    gone: set[str] = set()
    catalog.subscribe(gone.update)
    catalog.hide(path)
    assert names(catalog) == []
    assert gone == {"book", "model"}
    catalog.hide(path, hidden=False)
    assert names(catalog) == ["book", "model"]


def test_a_model_with_an_adapter_is_another_model(opened, shelf):
    make_store(shelf / "book.kv")
    make_store(shelf / "legal.kv", adapter="/adapters/law")
    make_store(shelf / "terms.kv", adapter="/adapters/law")
    catalog = opened(shelf)
    assert names(catalog) == ["book", "legal", "terms", "model", "model+law"]
    assert [catalog.entry(name).adapter for name in ("book", "model", "model+law")] == [
        "",
        "",
        "/adapters/law",
    ]
    assert catalog.entry("legal").base == "test/model+law"


def test_a_store_is_read_once(opened, shelf, monkeypatch):
    make_store(shelf / "book.kv")
    catalog = opened(shelf)
    monkeypatch.setattr(KVStore, "open", None)
    before = catalog.entry("book")
    catalog.refresh()
    assert catalog.entry("book") == before


def test_a_store_of_a_text_longer_than_the_training_is_noted_and_logged_once(shelf, opened, caplog):
    job = make_job(40, "float32", (FULL,), query_samples=8)
    trained = {"length": 16, "unscaled": 16}
    replace(job, manifest=replace(job.manifest, trained=trained)).write(shelf / "long.kv")
    catalog = opened(shelf)
    catalog.refresh()
    note = catalog.entry("long").note
    assert note.startswith("40 tokens with a question and an answer are more than the 16 that the model")
    assert caplog.text.count(note) == 1


def test_a_bare_model_that_is_given_with_an_adapter_has_it_in_its_name(tmp_path):
    (bare,) = Catalog([tmp_path], "demo", str(tmp_path / "legal")).entries()
    assert (bare.name, bare.adapter) == ("demo+legal", str(tmp_path / "legal"))
