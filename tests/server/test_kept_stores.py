"""How long a server keeps its stores, and how much disk they have."""

import os
import threading
import time
from contextlib import closing, contextmanager

import pytest

from offload_decode.common.errors import ConfigError
from offload_decode.server import jobs
from offload_decode.server.catalog import Catalog
from offload_decode.server.kept_stores import Keeping, KeptStores, folder_bytes
from offload_decode.server.requests import TooLarge
from offload_decode.store.files import SEAL
from tests.server.test_catalog import make_store, shelf, until
from tests.server.test_job import text
from tests.server.test_jobs import DONE, HALF, WAIT, catalog, over, refused, says, started

__all__ = ["catalog", "says", "shelf", "started"]


def unused(shelf, name, seconds):
    """Have a store be made, and its last use lie, so far back."""
    for file in (shelf / name / SEAL, shelf / ".kept" / name):
        os.utime(file, (time.time() - seconds,) * 2)


@pytest.fixture
def book(shelf, catalog):
    make_store(shelf / "book.kv")
    catalog.refresh()
    return catalog.entry("book")


def test_what_was_said_of_a_store_is_kept_with_its_last_use(shelf, catalog, book):
    kept = KeptStores(catalog)
    assert kept.of(book) == Keeping()
    kept.set(book, True, 100)
    unused(shelf, "book.kv", 1000)
    found = KeptStores(catalog).of(book)
    assert (found.pinned, found.expires_after, found.expired) == (True, 100, False)
    kept.set(book, False, 100)
    assert not kept.of(book).expired
    unused(shelf, "book.kv", 1000)
    assert kept.expired() == ["book"]
    KeptStores(catalog, read_only=True).use(book)
    assert KeptStores(catalog).expired() == ["book"]
    kept.use(book)
    assert kept.expired() == KeptStores(catalog).expired() == []
    kept.forget(book.path)
    assert kept.of(book) == Keeping()


def test_only_stores_where_stores_are_made_expire(tmp_path):
    with closing(Catalog([make_store(tmp_path / "book.kv")])) as catalog:
        kept, book = KeptStores(catalog), catalog.entry("book")
        refused(ConfigError, "only stores in the folder", kept.set, book, True, None)
        kept.use(book)
        assert kept.of(book).last_used is not None
        kept.forget(book.path)
        assert kept.of(book) == Keeping()


@pytest.mark.parametrize(
    "spoilt",
    [
        "",
        "[]",
        "{}",
        '{"pinned": 0, "expires_after": 1}',
        '{"pinned": false, "expires_after": "1"}',
        '{"pinned": false, "expires_after": -1}',
    ],
)
def test_nothing_expires_by_a_file_that_cannot_be_read(shelf, catalog, book, spoilt):
    kept = KeptStores(catalog)
    kept.set(book, False, 1)
    (shelf / ".kept" / "book.kv").write_text(spoilt)
    unused(shelf, "book.kv", 1000)
    assert kept.of(book) == Keeping()
    assert kept.expired() == []


def test_an_expired_store_is_deleted_and_a_pinned_one_is_not(started, shelf, catalog, monkeypatch):
    monkeypatch.setattr(jobs, "EXPIRY_S", 0.05)
    for seed, name in enumerate(("gone", "kept", "pinned")):
        make_store(shelf / f"{name}.kv", seed=seed)
    catalog.refresh()
    running = started()
    for name, said in (("gone", {}), ("kept", {"expires_after": None}), ("pinned", {"pinned": True})):
        running.keep(name, **{"expires_after": 100, **said})
        unused(shelf, f"{name}.kv", 1000)
    until(lambda: not (shelf / "gone.kv").exists())
    assert sorted(path.name for path in shelf.glob("*.kv")) == ["kept.kv", "pinned.kv"]


def test_a_store_made_by_hand_under_the_name_of_an_expiring_one_stays(shelf, catalog, book):
    kept = KeptStores(catalog)
    kept.set(book, False, 100)
    unused(shelf, "book.kv", 1000)
    os.utime(shelf / "book.kv" / SEAL)
    assert kept.expired() == []
    kept.forget_gone()
    assert kept.of(book).expires_after == 100
    (shelf / "book.kv").rename(
        shelf / "book.kv.partial"
    )  # as while an append puts the longer one in its place
    kept.forget_gone()
    (shelf / "book.kv.partial").rename(shelf / "book.kv")
    assert kept.of(book).expires_after == 100
    (shelf / "book.kv").rename(shelf / "gone")
    (shelf / ".kept" / "folder").mkdir()
    kept.forget_gone()
    (shelf / "gone").rename(shelf / "book.kv")
    assert kept.of(book) == Keeping()


def test_a_store_that_is_being_answered_from_or_was_pinned_meanwhile_does_not_expire(
    started, shelf, catalog, monkeypatch
):
    monkeypatch.setattr(jobs, "EXPIRY_S", 0.05)
    for seed, name in enumerate(("gone", "answering", "pinned")):
        make_store(shelf / f"{name}.kv", seed=seed)
    catalog.refresh()
    deleting, may = threading.Event(), threading.Event()

    @contextmanager
    def released(name):
        deleting.set()
        may.wait(10)
        yield

    running = started(released=released, answering=lambda name: name == "answering")
    for name in ("gone", "answering", "pinned"):
        running.keep(name, expires_after=100)
    with running._changed:
        for name in ("answering", "gone", "pinned"):
            unused(shelf, f"{name}.kv", 1000)
    assert deleting.wait(10)
    running.keep("pinned", pinned=True)
    may.set()
    until(lambda: not (shelf / "gone.kv").exists())
    running.close()
    assert sorted(path.name for path in shelf.glob("*.kv")) == ["answering.kv", "pinned.kv"]


def test_files_with_two_names_are_counted_once(tmp_path):
    (tmp_path / "a").write_bytes(bytes(100))
    os.link(tmp_path / "a", tmp_path / "b")
    assert folder_bytes(tmp_path) == 100


def test_no_job_begins_where_the_disk_is_used_up(started, shelf, book):
    refused(TooLarge, "delete one", started(disk=folder_bytes(shelf)).prefill, "new", "tiny", [text("facts")])
    assert not list((shelf / ".jobs").glob("job*"))


def test_a_job_that_uses_the_disk_up_ends_and_takes_nothing(started, shelf, says, monkeypatch):
    monkeypatch.setattr(jobs, "DISK_S", 0.0)
    says([HALF, WAIT, HALF, DONE])
    running = started(disk=100_000)
    job = running.prefill("new", None, [text("facts")])
    until(lambda: running.progress(job.id) is not None)
    staged = shelf / "new.kv.partial"
    staged.mkdir()
    (staged / "lock").touch()
    (staged / "rows").write_bytes(bytes(200_000))
    running._process.stdin.write("go\n")
    running._process.stdin.flush()
    (failed,) = over(running, job)
    assert (failed.state, "that the server allows" in failed.error) == ("failed", True)
    assert not staged.exists()
