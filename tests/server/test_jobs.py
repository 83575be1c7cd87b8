"""Jobs: with the real process where stores are made, and with a small one that says what it is told to where
it matters how a job begins, waits and ends.
"""

import errno
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import pytest

from offload_decode.common.errors import (
    ConfigError,
    StoreBusy,
    StoreError,
    StoreExists,
)
from offload_decode.models.loading import load
from offload_decode.prefill_jobs.corpus import TextDocument
from offload_decode.prefill_jobs.indexing import build_indexes
from offload_decode.prefill_jobs.job import Settings, prefill_texts
from offload_decode.server import jobs
from offload_decode.server.catalog import Catalog
from offload_decode.server.job import JOBS, Job, JobFiles, Upload
from offload_decode.server.jobs import JobProgress, Jobs
from offload_decode.server.requests import Busy, NoSuchName, ReadOnly, WrongField
from offload_decode.store.reader import KVStore
from tests.server.test_catalog import make_store, shelf, until
from tests.server.test_job import FACTS, MORE, text
from tests.store.jobs import tree

__all__ = ["shelf"]


@pytest.fixture
def catalog(shelf, tiny):
    with closing(Catalog([shelf], str(tiny))) as opened:
        yield opened


@pytest.fixture
def book(shelf, catalog):
    """A store that is there already."""
    make_store(shelf / "book.kv")
    catalog.refresh()


@pytest.fixture
def started(catalog):
    with ExitStack() as stack:
        yield lambda **how: stack.enter_context(closing(Jobs(catalog, device="cpu", **how)))


@pytest.fixture
def running(started):
    return started()


# A process that says `said`, each line when it is its turn: WAIT is for a line on stdin.
# With CUT it says half a word.
WAIT, DIE, CUT = "wait", "die", "cut"
SCRIPT = """
import json, os, signal, sys
for line in json.loads(sys.argv[1]):
    if line == "wait":
        if not sys.stdin.readline():
            os._exit(1)
    elif line == "cut":
        print('{"sta', end="", flush=True)
    elif line == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        print(json.dumps(line), flush=True)
"""


@pytest.fixture
def says(monkeypatch):
    """Have the processes of jobs say what is given, one list each, the last one again and again."""
    real = subprocess.Popen

    def replace(*runs: list[Any]) -> None:
        left = list(runs)

        def start(command: list[str], **how: Any) -> Any:
            said = left.pop(0) if len(left) > 1 else left[0]
            return real([sys.executable, "-c", SCRIPT, json.dumps(said)], **how)

        monkeypatch.setattr(jobs.subprocess, "Popen", start)

    return replace


@pytest.fixture
def gate():
    """The context in which no answer reads a store, which they do until its event `free` is set."""

    @contextmanager
    def released(name: str) -> Iterator[None]:
        released.events.append(f"asked for {name}")
        assert released.free.wait(60)
        yield
        released.events.append("let go")

    released.free, released.events = threading.Event(), []
    return released


DONE = {"result": {"n_tokens": 7}}
HALF = {"stage": "prefill", "done": 32, "total": 64}


def state(running: Jobs, job: Job) -> str:
    return running.job(job.id).state


def over(running: Jobs, *waited: Job, seconds: float = 60) -> list[Job]:
    until(lambda: all(running.job(job.id).over for job in waited), seconds)
    return [running.job(job.id) for job in waited]


def refused(error: type[Exception], match: str, call: Callable[..., object], *args: Any, **how: Any) -> None:
    """A call raises an error whose sentence is short."""
    with pytest.raises(error, match=match) as raised:
        call(*args, **how)
    assert len(str(raised.value)) < 600


def test_rope_is_scaled_as_asked_and_by_default_as_for_the_models_other_stores(
    running, catalog, shelf, tiny, says
):
    (made,) = over(
        running, running.prefill("long", tiny.name, [text("facts.txt")], index=False, rope="linear:2")
    )
    assert made.state == "done", made.error
    until(lambda: [path.name for path in running._files.of(made.id).iterdir()] == ["job.json"])
    catalog.refresh()
    assert KVStore.open(shelf / "long.kv").manifest.scaled == "linear:2"
    says([DONE])
    assert running.prefill("again", tiny.name, [text("facts.txt")]).work.rope == "linear:2"
    assert running.prefill("plain", tiny.name, [text("facts.txt")], rope="").work.rope == ""
    with pytest.raises(ConfigError, match="rope 'none' is none"):
        running.prefill("none", tiny.name, [text("facts.txt")], rope="none")


def test_a_process_of_its_own_says_why_it_failed(running, shelf):
    picture = Upload("a.gif", io.BytesIO(b"GIF89a\0\0"))
    (failed,) = over(running, running.prefill("book", None, [picture]))
    assert failed.error == "a.gif cannot be read, because it is an image: leave it out"
    assert [path.name for path in shelf.iterdir()] == [".jobs"]


def test_one_job_runs_at_a_time_in_the_order_in_which_they_came(running, says):
    says([HALF, WAIT, DONE])
    made = [running.prefill(name, None, [text("facts")]) for name in ("a", "b", "c")]
    assert [job.id for job in running.jobs()] == [job.id for job in made[::-1]]
    for first, *others in (made, made[1:], made[2:]):
        until(lambda first=first: running.progress(first.id) is not None)
        assert [state(running, job) for job in (first, *others)] == ["running"] + ["queued"] * len(others)
        assert running._process is not None
        assert running._process.stdin is not None
        running._process.stdin.write("go\n")
        running._process.stdin.flush()
        assert over(running, first)[0].result == DONE["result"]


def test_progress_tells_the_time_that_is_left(running, says):
    load, *told = (
        {"stage": stage, "done": done, "total": total}
        for stage, done, total in (("load", 0, 1), ("prefill", 100, 1100), ("prefill", 600, 1100))
    )
    says([load, WAIT, told[0], WAIT, told[1], WAIT])
    job = running.prefill("book", None, [text("facts")])
    until(lambda: running.progress(job.id) == JobProgress(**load))
    began = time.monotonic()
    for now in told:
        assert running.progress(job.id).seconds_left is None
        running._process.stdin.write("go\n")
        running._process.stdin.flush()
        until(lambda now=now: running.progress(job.id).done == now["done"])
    half = running.progress(job.id)
    assert half == JobProgress(**told[1], seconds_left=half.seconds_left)
    assert 0 < half.seconds_left < time.monotonic() - began


def test_a_failed_job_keeps_its_error_and_can_be_retried(running, says, catalog):
    says([HALF, {"error": "the disk is full."}], [DONE])
    (failed,) = over(running, running.prefill("book", None, [text("facts")]))
    assert (failed.state, failed.error) == ("failed", "the disk is full.")
    assert failed.ended is not None
    assert running.retry(failed.id).error is None
    (done,) = over(running, failed)
    assert (done.state, done.error) == ("done", None)
    refused(ConfigError, "only a job that failed", running.retry, done.id)


def test_a_process_that_is_killed_is_started_again(running, says):
    says([HALF, CUT, DIE], [HALF, DONE])
    assert over(running, running.prefill("book", None, [text("facts")]))[0].state == "done"
    says([DIE])
    (failed,) = over(running, running.prefill("other", None, [text("facts")]))
    assert failed.error == "its process was killed by signal 9, 3 times"


def test_a_full_disk_stops_no_later_job(running, says, monkeypatch):
    says([DONE])
    first = running.prefill("first", None, [text("a")])
    over(running, first)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(JobFiles, "save", full)
    later = [running.prefill(name, None, [text("a")]) for name in ("second", "third")]
    assert [job.state for job in over(running, *later)] == ["done", "done"]


def test_an_unexpected_error_of_a_job_does_not_stop_the_next(running, says):
    says([{"stage": "of another release"}], [DONE])
    both = [running.prefill(name, None, [text("a")]) for name in ("first", "second")]
    ended = over(running, *both)
    assert [(job.state, job.error) for job in ended] == [
        ("failed", "something went wrong; the server's log says what"),
        ("done", None),
    ]


def test_a_folder_that_cannot_be_written_to_is_named(started, shelf):
    (shelf / JOBS).write_text("no folder")
    why = r"no stores can be made in .*File exists"
    refused(StoreError, why, started().prefill, "book", None, [text("a")])


def test_a_job_that_is_cancelled_ends(running, says, shelf):
    says([HALF, WAIT])
    first, second = (running.prefill(name, None, [text("facts")]) for name in ("a", "b"))
    until(lambda: running.progress(first.id) is not None)
    for name in "ab":
        (shelf / f"{name}.kv.partial").mkdir()
        (shelf / f"{name}.kv.partial" / "lock").touch()
    assert running.cancel(second.id).state == "cancelled"
    assert running.cancel(first.id).state == "cancelled"
    until(lambda: [left.name for left in shelf.glob("*.partial")] == ["b.kv.partial"])  # not of the second
    assert running.cancel(first.id).state == "cancelled"
    assert running.progress(first.id) is None
    says([DONE])
    (third,) = over(running, running.prefill("a", None, [text("facts")]))
    assert running.cancel(third.id).state == "done"
    assert state(running, second) == "cancelled"


def test_what_a_failed_job_has_begun_stays_when_another_one_is_cancelled(running, says, shelf, book):
    """Whether that one waits, failed or runs: the failed job goes on where it stopped."""
    partial = shelf / "book.kv.partial"
    says([HALF, {"error": "the disk is full."}], [{"error": "begun with another text"}], [HALF, WAIT])
    failed, refused = (running.append("book", [text(name, MORE)]) for name in ("more", "others"))
    over(running, failed, refused)
    running_now, waiting = (running.renew("book", [text("facts")]) for _ in range(2))
    partial.mkdir()
    (partial / "lock").touch()
    until(lambda: running.progress(running_now.id) is not None)
    for other in (waiting, refused, running_now):
        assert running.cancel(other.id).state == "cancelled"
    until(lambda: running.progress(running_now.id) is None)
    assert partial.exists()
    running.cancel(failed.id)
    assert not partial.exists()


@pytest.mark.parametrize("change", ["append", "renew"])
def test_a_new_store_waits_for_answers_before_it_takes_its_place(started, says, gate, book, change):
    says([HALF, {"stage": "exchange", "done": 0, "total": 1}, WAIT, DONE])
    running = started(released=gate)
    job = getattr(running, change)("book", [text("more", MORE)])
    until(lambda: gate.events == ["asked for book"])
    assert state(running, job) == "running"
    gate.free.set()
    assert over(running, job)[0].state == "done"
    until(lambda: gate.events == ["asked for book", "let go"])


def test_an_append_that_waits_can_be_cancelled(started, says, gate, book):
    says([{"stage": "exchange", "done": 0, "total": 1}, WAIT, DONE])
    running = started(released=gate)
    job = running.append("book", [text("more", MORE)])
    until(lambda: running.progress(job.id) is not None)
    running.cancel(job.id)
    gate.free.set()
    says([DONE])
    assert over(running, running.append("book", [text("more", MORE)]))[0].state == "done"
    assert state(running, job) == "cancelled"


@pytest.mark.parametrize(
    "name", ["", "../x", "a/b", "/etc", ".hidden", "a\nb", "a\0b", "é", "x" * 101, "-x", "a b", "..", "."]
)
def test_hostile_names_are_refused(running, shelf, name):
    with pytest.raises(WrongField) as refused:
        running.prefill(name, None, [text("facts")])
    assert refused.value.param == "name"
    assert list(shelf.iterdir()) == []


def test_names_that_are_taken_are_refused(running, says, shelf, catalog, book):
    (shelf / "junk.kv").mkdir()
    catalog.refresh()
    says([HALF, WAIT])
    for name in ("book", "book.kv", "junk", "tiny"):
        refused(StoreExists, "exists already", running.prefill, name, "tiny", [text("facts")])
    job = running.prefill("new", "tiny", [text("facts")])
    refused(StoreExists, job.id, running.prefill, "new.kv", "tiny", [text("facts")])


def test_a_new_job_takes_the_place_of_one_that_failed(running, says):
    says([{"error": "it holds no text"}], [DONE])
    (failed,) = over(running, running.prefill("book", None, [text("facts")]))
    (done,) = over(running, running.prefill("book", None, [text("facts")]))
    assert done.state == "done"
    assert state(running, failed) == "cancelled"


def test_invalid_documents_models_and_options_are_refused_at_once(running, shelf, catalog):
    for names in ([], [""], ["a\nb"], ["x" * 501], ["a", "a"], map(str, range(10_001))):
        refused(WrongField, "document", running.prefill, "book", None, [*map(text, names)])
    for model in ("https://host/model", str(shelf)):
        refused(NoSuchName, "nothing here", running.prefill, "book", model, [text("a")])
    for how in ({"kv": "int3"}, {"dtype": "float8"}, {"weights": "int3"}, {"method": "guess"}):
        refused(ConfigError, ".", running.prefill, "book", None, [text("a")], **how)
    for options in ({"chunk": 0}, {"chnk": 64}, {"chunk": [1]}):
        refused(ConfigError, ".", running.prefill, "book", None, [text("a")], options=options)
    for name in ("book", "tiny"):
        refused(NoSuchName, name, running.append, name, [text("a")])
    refused(NoSuchName, "no store", running.delete, "tiny")
    refused(NoSuchName, "no job", running.job, "job-\ud800" + "x" * 1000)
    refused(NoSuchName, "no job", running.cancel, "../job")
    assert list(shelf.iterdir()) == []
    make_store(shelf / "other.kv")
    catalog.refresh()
    refused(WrongField, "name one of tiny, model", running.prefill, "book", None, [text("a")])


def test_jobs_do_not_pile_up(started, says, monkeypatch):
    monkeypatch.setattr(jobs, "MOST_WAITING", 2)
    monkeypatch.setattr(jobs, "MOST_KEPT", 1)
    says([DONE])
    running = started()
    for name in ("a", "b", "c"):
        over(running, running.prefill(name, None, [text("facts")]))
    assert [job.work.name for job in running.jobs()] == ["c", "b"]
    assert running._files is not None
    assert len(running._files.all()) == 2
    says([WAIT])
    for name in ("d", "e"):
        running.prefill(name, None, [text("facts")])
    refused(Busy, "2 jobs wait", running.prefill, "f", None, [text("facts")])


def test_a_server_without_a_folder_makes_no_stores(shelf):
    with closing(Catalog([make_store(shelf / "book.kv")])) as catalog, closing(Jobs(catalog)) as running:
        for change in ((running.prefill, "new", None), (running.append, "book")):
            refused(ConfigError, "no folder to put stores in", *change, [text("facts")])
        refused(ConfigError, "by itself", running.delete, "book")


def test_read_only_jobs_change_nothing(started, shelf, book):
    (shelf / ".jobs").mkdir()
    running = started(read_only=True)
    for change in ((running.prefill, "new", None), (running.append, "book")):
        refused(ReadOnly, "--read-only", *change, [text("facts")])
    refused(ReadOnly, "--read-only", running.delete, "book")
    assert running.jobs() == []
    assert list((shelf / ".jobs").iterdir()) == []


def test_two_servers_do_not_run_the_same_jobs(started, says, monkeypatch):
    monkeypatch.setattr("offload_decode.server.job._WAIT_S", 0.05)
    says([HALF, WAIT])
    first = started()
    first.prefill("book", None, [text("facts")])
    second = started()
    assert second.jobs() == []
    refused(StoreBusy, "another server", second.prefill, "other", None, [text("facts")])


def test_a_new_server_goes_on_with_what_was_left(started, says, shelf):
    says([HALF, WAIT])
    first = started()
    left = [first.prefill(name, None, [text("facts")]) for name in ("a", "b")]
    until(lambda: first.progress(left[0].id) is not None)
    first.close()
    (shelf / ".jobs" / "job-0.partial").mkdir()
    (shelf / ".jobs" / "job-1").mkdir()
    (shelf / ".jobs" / "job-1" / "job.json").write_text("{}")
    (shelf / ".deleted-1" / "x.kv").mkdir(parents=True)
    says([DONE])
    second = started()
    assert {job.id for job in second.jobs()} == {job.id for job in left}
    assert [job.state for job in over(second, *left)] == ["done", "done"]
    assert not (shelf / ".jobs" / "job-0.partial").exists()
    assert not (shelf / ".deleted-1").exists()


def test_a_store_is_deleted_when_no_answer_reads_it(started, shelf, catalog, gate, book):
    make_store(shelf / "other.kv", seed=1)
    build_indexes(shelf / "book.kv", "flat")
    catalog.refresh()
    running = started(released=gate)
    with ThreadPoolExecutor(4) as pool:
        deleting = [pool.submit(running.delete, "book") for _ in range(4)]
        until(lambda: "book" not in [entry.name for entry in catalog.entries()])
        assert (shelf / "book.kv").exists()
        until(lambda: sum(one.done() for one in deleting) == 3)
        gate.free.set()
    errors = [type(error) for one in deleting if (error := one.exception()) is not None]
    assert len(errors) == 3
    assert {*errors} <= {NoSuchName, StoreBusy}
    assert sorted(path.name for path in shelf.iterdir()) == ["other.kv"]
    make_store(shelf / "book.kv")
    catalog.refresh()
    assert catalog.entry("book").tokens == 40


def test_a_store_that_a_job_is_at_work_on_is_not_deleted(running, says, book):
    says([HALF, WAIT])
    running.append("book", [text("more")])
    refused(StoreBusy, "at work on 'book'", running.delete, "book")


SERVER = """
import sys, time
from pathlib import Path
from offload_decode.server.catalog import Catalog
from offload_decode.server.jobs import Jobs
running = Jobs(Catalog([Path(sys.argv[1])], sys.argv[2]), device="cpu")
print("up", flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_kills_of_processes_and_of_servers_leave_the_store_of_one_prefill(shelf, tiny, tmp_path):
    long = FACTS * 12
    plain = tmp_path / "plain.kv"
    loaded = load(str(tiny), "cpu")
    prefill_texts(loaded, [TextDocument("facts", long.strip("\n"))], plain, Settings(options={"chunk": 16}))
    with closing(Catalog([shelf], str(tiny))) as catalog:
        running = Jobs(catalog, device="cpu")
        job = running.prefill("book", None, [text("facts", long)], options={"chunk": 16}, index=False)

        def prefilling(more: int) -> Callable[[], bool]:
            def reached() -> bool:
                now = running.progress(job.id)
                return now is not None and now.stage == "prefill" and now.done >= more

            return reached

        until(prefilling(32), 600)
        assert running._process is not None
        os.kill(running._process.pid, signal.SIGKILL)
        until(lambda: running.progress(job.id) is None)
        until(prefilling(64), 600)
        running.close()
    progress = shelf / "book.kv.partial" / "progress.json"
    before = json.loads(progress.read_text())["tokens"]
    assert 64 <= before < 16 * 200
    command = [sys.executable, "-c", SERVER, str(shelf), str(tiny)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    assert server.stdout.readline() == "up\n"
    until(lambda: json.loads(progress.read_text())["tokens"] > before, 600)
    server.kill()
    server.wait()
    with closing(Catalog([shelf], str(tiny))) as catalog, closing(Jobs(catalog, device="cpu")) as running:
        (done,) = over(running, running.job(job.id), seconds=600)
    assert (done.state, done.error) == ("done", None)
    assert tree(shelf / "book.kv") == tree(plain)
