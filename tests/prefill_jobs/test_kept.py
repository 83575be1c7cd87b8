"""What several processes keep in one folder is made once, and whole."""

import fcntl
import os
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from offload_decode.cli.eval.run import PrefilledStores
from offload_decode.common.errors import OffloadDecodeWarning, StoreBusy, StoreExists
from offload_decode.kv.indexes import indexes_folder
from offload_decode.models.loading import wrap
from offload_decode.prefill_jobs import many
from offload_decode.prefill_jobs.job import Settings
from offload_decode.store import staging
from offload_decode.store.staging import LOCK, locked, partial_path
from tests.store.jobs import make_job
from tests.tiny import text_model, tiny_tokenizer


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many, "LOOK_S", 0.01)
    monkeypatch.setattr(many, "TRY_S", 0.1)


def meanwhile(work: Callable[[], object], others: Callable[[], object]) -> str:
    """What `work` is told to wait for; `others` is done while it waits."""
    told = threading.Event()
    said: list[str] = []

    def show(message: Warning | str, *_: object, **__: object) -> None:
        said.append(str(message))
        told.set()

    with warnings.catch_warnings():
        warnings.simplefilter("always", OffloadDecodeWarning)
        warnings.showwarning = show
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(work)
            assert told.wait(60), running.result(0)
            assert not running.done()
            others()
            running.result(60)
    return said[0]


def test_a_store_that_another_process_makes_is_awaited(tmp_path):
    job, path, finished = make_job(300), tmp_path / "store.kv", []

    def make() -> None:
        with job.open(path):
            finished.append("twice")

    with job.open(path) as writer:

        def others() -> None:
            job.feed(writer)
            writer.publish()

        said = meanwhile(lambda: many.kept(path, make), others)
    assert str(tmp_path) in said
    assert "waits" in said
    assert finished == []
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["store.kv"]


def test_unfinished_work_of_another_process_is_continued(tmp_path):
    job, path, begun = make_job(300), tmp_path / "store.kv", []
    writer = job.open(path)
    writer.__enter__()
    job.feed(writer, until=200)

    def make() -> None:
        with job.open(path) as own:
            begun.append(own.done)
            job.feed(own)
            own.publish()

    meanwhile(lambda: many.kept(path, make), lambda: writer.__exit__(None, None, None))
    assert begun == [200]


def test_indexes_that_another_process_builds_are_waited_for(tmp_path):
    job, path = make_job(300), tmp_path / "store.kv"
    job.write(path)
    folder = indexes_folder(path)
    folder.mkdir()
    held = os.open(folder, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    meanwhile(lambda: many.kept(path, pytest.fail, ["flat"]), lambda: os.close(held))
    assert [entry.name for entry in folder.iterdir()] == ["flat"]


def test_a_path_that_can_hold_no_store_is_refused_at_once(tmp_path):
    job, path = make_job(300), tmp_path / "store.kv"
    job.write(path)
    inside = path / "another.kv"
    with pytest.raises(StoreExists, match="is a store itself"):
        many.kept(inside, lambda: job.write(inside))


def test_one_that_publishes_just_now_is_busy_and_not_broken(tmp_path, monkeypatch):
    partial = partial_path(tmp_path / "store.kv")

    def vanish(path: Path, *_: object, **__: object) -> None:
        if path == partial / LOCK:
            partial.rmdir()
        raise FileNotFoundError(path)

    monkeypatch.setattr(staging, "open", vanish, raising=False)
    with pytest.raises(StoreBusy), locked(partial):
        pytest.fail("nothing is held")


def test_two_that_ask_the_same_texts_prefill_each_of_them_once(tmp_path):
    loaded = wrap(text_model(), tiny_tokenizer(), "tiny")
    texts = ["one text and " * 30, "another text and " * 30, "a third text and " * 30]
    done: list[int] = []

    def ask(_: int) -> list[int]:
        stores = PrefilledStores(loaded, "text", Settings(), ["flat"], keep=tmp_path)
        tokens = []
        for text in texts:
            with stores(text, lambda at: done.append(at)) as store:
                tokens.append(store.manifest.n_tokens)
        return tokens

    with warnings.catch_warnings(), ThreadPoolExecutor(2) as pool:
        warnings.simplefilter("ignore", OffloadDecodeWarning)
        one, other = pool.map(ask, range(2))
    assert one == other
    whole = [at for at in done if at]
    assert sorted(whole) == sorted(one), "each text's last report of tokens came once"


def test_a_lock_that_another_process_makes_meanwhile_is_no_foreign_folder(tmp_path, monkeypatch):
    partial = partial_path(tmp_path / "store.kv")
    listed = os.listdir

    def and_then_locked(folder: Path) -> list[str]:
        found = listed(folder)
        (partial / LOCK).touch()
        (partial / "progress.json").touch()
        return found

    monkeypatch.setattr(os, "listdir", and_then_locked)
    with locked(partial):
        assert sorted(listed(partial)) == [LOCK, "progress.json"]
