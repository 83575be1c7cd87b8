"""Stores that are made, appended to and deleted while others are asked.

Each prefill and each append is a job: a folder of its own on disk (`job_files`) and, while it runs, a process
of its own (`job_process`). One runs at a time, in the order in which they came. A server that starts goes on
with what another one left.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from offload_decode.common.errors import ConfigError, StoreBusy, StoreError, StoreExists
from offload_decode.kv.indexes import indexes_folder
from offload_decode.server.catalog import SUFFIX, Catalog, Entry, readable
from offload_decode.server.job_checks import check
from offload_decode.server.job_files import JOBS, Job, JobFiles, State, Upload, Work
from offload_decode.server.job_process import EXCHANGE
from offload_decode.server.job_progress import Progress, Speed
from offload_decode.server.requests import Busy, Loading, NoSuchName, ReadOnly, WrongField
from offload_decode.store.staging import LOCK, REPLACED, locked, partial_path
from offload_decode.store.writer import clear, restore

# Stores that leave their folder: gone from their name at once, whatever happens on the way.

log = logging.getLogger("offload_decode.server")

_TRASH = ".deleted-"


def discard(path: Path) -> None:
    """Remove what a job staged for the store at `path`. The store itself, where there is one, stays."""
    partial = partial_path(path)
    if (partial / LOCK).exists():
        try:
            with locked(partial):
                restore(path, partial / REPLACED)
                clear(partial)
        except StoreBusy as error:
            log.warning("%s", error)


def remove(path: Path) -> None:
    """Remove a store with all that lies beside it; it is gone from its name at once."""
    discard(path)
    trash = path.with_name(f"{_TRASH}{uuid4().hex}")
    try:
        trash.mkdir()
        os.rename(path, trash / path.name)
        if indexes_folder(path).exists():
            os.rename(indexes_folder(path), trash / indexes_folder(path).name)
        shutil.rmtree(trash)
    except OSError as error:
        raise StoreError(f"the store could not be removed: {error.strerror}") from error


def empty_trash(folder: Path) -> None:
    """Remove what a server left of stores when it was killed while it deleted them."""
    for left in folder.glob(f"{_TRASH}*"):
        shutil.rmtree(left, ignore_errors=True)


NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
MOST_WAITING, MOST_KEPT = 100, 200
_TRIES = 3

Released = Callable[[str], AbstractContextManager[object]]
"""While the context of a name is open, nothing uses its store, and nothing opens it; entering it waits for
the answers that do.
"""


class Jobs:
    """The jobs of a server, in the first folder among its places; a thread runs them until `close`, which
    leaves them to be gone on with. `device` is where their models run. With `read_only` there are none, and
    what would change a store raises `ReadOnly`. Thread-safe.
    """

    def __init__(
        self,
        catalog: Catalog,
        released: Released = lambda name: nullcontext(),
        device: str = "auto",
        read_only: bool = False,
    ) -> None:
        self._catalog, self._released, self._device = catalog, released, device
        self._read_only = read_only
        self._changed = threading.Condition()
        self._jobs: dict[str, Job] = {}
        self._progress: dict[str, Progress] = {}
        self._deleting: set[str] = set()
        self._files: JobFiles | None = None
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[str] | None = None
        self._exchanging = self._closed = False
        if not read_only:
            for folder in catalog.folders:
                empty_trash(folder)
        if not read_only and catalog.folders and (catalog.folders[0] / JOBS).is_dir():
            try:
                self._begin()
            except StoreError as error:
                log.warning("%s", error)

    def jobs(self) -> list[Job]:
        """All that are known, the newest first."""
        return sorted(self._jobs.copy().values(), key=lambda job: job.created, reverse=True)

    def job(self, id: str) -> Job:
        """One of them. Raises `NoSuchName`."""
        found = self._jobs.get(id)
        if found is None:
            raise NoSuchName(f"there is no job '{readable(id)}'")
        return found

    def progress(self, id: str) -> Progress | None:
        """How far a job is, while it runs."""
        return self._progress.get(id)

    def prefill(self, name: str, model: str | None, documents: Sequence[Upload], **how: Any) -> Job:
        """Make the store `name` of documents; `how` are further fields of `Work`.

        `model` names an entry whose model is taken; None: the only one there is. Raises `ConfigError`,
        `WrongField`, `NoSuchName`, `StoreExists`, `StoreBusy` and `Busy`.
        """
        folder = self._folder()
        if not NAME.fullmatch(name):
            raise WrongField(
                "a store's name is of letters, digits, '.', '-' and '_', begins with a letter or a digit, "
                "and has at most 100 of them",
                "name",
            )
        of = self._model_of(model)
        how = {"dtype": of.dtype, "weights": of.weights} | how
        path = folder / (name.removesuffix(SUFFIX) + SUFFIX)
        work = Work("prefill", path.stem, str(path), of.model_id, **how)
        check(work, documents)
        return self._submit(work, documents)

    def append(self, name: str, documents: Sequence[Upload]) -> Job:
        """Add documents to a store. Raises as `prefill`."""
        self._folder()
        entry = self._store(name)
        work = Work("append", entry.name, str(entry.path), entry.model_id, entry.dtype, entry.weights)
        check(work, documents)
        return self._submit(work, documents)

    def cancel(self, id: str) -> Job:
        """Stop a job, and remove what it has written: a store that has its name already stays. One that is
        done, or about to put a longer store in its place, stays as it is. Raises `NoSuchName`.
        """
        with self._changed:
            job = self.job(id)
            running = job.state == "running"
            if job.state == "done" or (running and self._exchanging):
                return job
            job = self._note(job, "cancelled")
            if running and self._process is not None:
                self._process.kill()
            elif not running:
                discard(Path(job.work.path))
            return job

    def retry(self, id: str) -> Job:
        """Have a job that failed go on where it stopped. Raises `NoSuchName` and `ConfigError`."""
        with self._changed:
            job = self.job(id)
            if job.state != "failed":
                raise ConfigError(f"{id} is {job.state}, and only a job that failed can be tried again")
            return self._note(replace(job, error=None, ended=None), "queued")

    def delete(self, name: str) -> None:
        """Delete a store, its name at once and its files when no answer reads them; returns then.

        Raises `NoSuchName`, `ConfigError` for a store that is not in a folder of stores, and `StoreBusy`.
        """
        self._may_write()
        with self._changed:
            entry = self._store(name)
            path = entry.path
            assert path is not None
            if path.parent not in self._catalog.folders:
                raise ConfigError(f"'{name}' was given to the server by itself: only its owner deletes it")
            if name in self._deleting or any(job.work.path == str(path) for job in self._unfinished()):
                raise StoreBusy(f"a job is at work on '{name}': wait for it, or cancel it first")
            self._deleting.add(name)
        try:
            self._catalog.hide(path)
            with self._released(name):
                remove(path)
        finally:
            self._deleting.discard(name)
            self._catalog.hide(path, hidden=False)

    def close(self) -> None:
        """Stop; what runs is gone on with by the next server."""
        with self._changed:
            self._closed = True
            if self._process is not None:
                self._process.kill()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        with self._changed:
            files, self._files = self._files, None
        if files is not None:
            files.close()

    def _begin(self) -> JobFiles:
        """Take over the jobs that lie in the folder. Raises `StoreBusy` and `StoreError`."""
        if self._files is None:
            folder = self._folder()
            try:
                self._files = JobFiles(folder)
            except OSError as error:
                raise StoreError(f"no stores can be made in {folder}: {error.strerror}") from error
            for folder, job in self._files.all():
                if job is None:
                    log.warning("%s is left out: it holds no job that can be read", folder)
                else:
                    again = job if job.over else replace(job, state="queued")
                    self._jobs[job.id] = again
            self._thread = threading.Thread(target=self._run, name="jobs", daemon=True)
            self._thread.start()
        return self._files

    def _may_write(self) -> None:
        if self._read_only:
            raise ReadOnly("this server was started with --read-only: it makes no stores, and deletes none")

    def _folder(self) -> Path:
        self._may_write()
        if not self._catalog.folders:
            raise ConfigError(
                "this server has no folder to put stores in: start it with a folder among STORES"
            )
        return self._catalog.folders[0]

    def _model_of(self, model: str | None) -> Entry:
        if model is not None:
            return self._catalog.entry(model)
        bare = [entry for entry in self._catalog.entries() if entry.path is None]
        if len(bare) == 1:
            return bare[0]
        named = "name one of " + ", ".join(entry.name for entry in bare[:10])
        raise WrongField(named if bare else "this server knows no model: start it with --model", "model")

    def _store(self, name: str) -> Entry:
        entry = self._catalog.entry(name)
        if entry.path is None:
            raise NoSuchName(f"'{entry.name}' is a model without a corpus, and no store")
        return entry

    def _unfinished(self) -> list[Job]:
        return [job for job in self._jobs.values() if not job.over]

    def _submit(self, work: Work, documents: Sequence[Upload]) -> Job:
        with self._changed:
            files = self._begin()
            if len(self._unfinished()) >= MOST_WAITING:
                raise Busy(f"{MOST_WAITING} jobs wait already: try again later", 60)
            if work.kind == "prefill":
                self._check_free(work)
            elif work.name in self._deleting:
                raise StoreBusy(f"'{work.name}' is being deleted")
            try:
                job = files.create(work, documents)
            except OSError as error:
                raise StoreError(f"the documents cannot be kept: {error.strerror}") from error
            self._jobs[job.id] = job
            self._forget_old(files)
            self._changed.notify_all()
            return job

    def _check_free(self, work: Work) -> None:
        """StoreExists unless a store may have this name; a job for it that failed makes way."""
        for job in [job for job in self._jobs.values() if job.work.path == work.path]:
            if not job.over:
                raise StoreExists(f"'{work.name}' is being made already, by {job.id}")
            if job.state == "failed":
                self.cancel(job.id)
        taken = {entry.name for entry in self._catalog.entries()}
        if work.name in taken or Path(work.path).exists():
            raise StoreExists(
                f"'{work.name}' exists already: choose another name, append to it or delete it first"
            )

    def _forget_old(self, files: JobFiles) -> None:
        over = sorted((job for job in self._jobs.values() if job.over), key=lambda job: job.created)
        for job in over[: max(0, len(over) - MOST_KEPT)]:
            files.remove(self._jobs.pop(job.id))

    def _note(self, job: Job, state: State, **more: Any) -> Job:
        """Take down what became of a job."""
        ended = time.time() if state in ("done", "failed", "cancelled") else None
        job = replace(job, **{"state": state, "ended": ended, **more})
        self._jobs[job.id] = job
        if self._files is not None:
            try:
                self._files.save(job)
            except OSError as error:  # the disk is full, say: the next server finds it as it was before
                log.error("what became of %s cannot be written down: %s", job.id, error.strerror)
        self._changed.notify_all()
        return job

    def _run(self) -> None:
        while True:
            with self._changed:
                waiting: list[Job] = []
                while not self._closed and not waiting:
                    waiting = [job for job in self._jobs.values() if job.state == "queued"]
                    if not waiting:
                        self._changed.wait()
                if self._closed:
                    return
                first = min(waiting, key=lambda job: job.created)
                job = self._note(first, "running", started=time.time())
            try:
                self._work(job)
            except Exception as error:  # whatever it was, the next job runs
                log.error("%s failed", job.id, exc_info=error)
                reason = error.strerror if isinstance(error, OSError) else None
                with self._changed:
                    self._note(
                        job, "failed", error=reason or "something went wrong; the server's log says what"
                    )

    def _work(self, job: Job) -> None:
        """Run a job to its end, in a process that is started again where it is killed."""
        for last in (False,) * (_TRIES - 1) + (True,):
            message, code = self._attempt(job)
            self._progress.pop(job.id, None)
            self._catalog.refresh()
            with self._changed:
                self._exchanging = False
                if self._closed:
                    return
                if self._jobs[job.id].state == "cancelled":
                    discard(Path(job.work.path))
                    return
                if "result" in message:
                    self._note(job, "done", result=message["result"])
                    return
                if "error" in message or last:
                    how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
                    said = message.get("error") or f"its process {how}, {_TRIES} times"
                    log.warning("%s ('%s') failed: %s", job.id, job.work.name, said)
                    self._note(job, "failed", error=said)
                    return

    def _attempt(self, job: Job) -> tuple[dict[str, Any], int]:
        """One process of a job: the last thing that it said, and how it ended."""
        files = self._files
        assert files is not None
        with self._changed:
            if self._closed or self._jobs[job.id].state == "cancelled":
                return {}, 0
            # -P: modules of the folder that the server was started in are none of ours.
            command = [
                sys.executable,
                "-P",
                "-m",
                "offload_decode.server.job_process",
                str(files.of(job.id)),
                self._device,
            ]
            process = self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=[files.lock]
            )
        message: dict[str, Any] = {}
        with process, ExitStack() as held:
            assert process.stdout is not None
            follow = Speed()
            for line in process.stdout:
                if not line.endswith("\n"):  # it was killed in the middle of a word
                    break
                message = json.loads(line)
                if "stage" in message:
                    self._progress[job.id] = follow(**message)
                    if message["stage"] == EXCHANGE:
                        held.enter_context(self._released(job.work.name))
                        self._allow(job, process)
            process.wait()
            self._catalog.refresh()
        with self._changed:
            self._process = None
        return message, process.returncode

    def _allow(self, job: Job, process: subprocess.Popen[str]) -> None:
        """Let the longer store take its place, unless it is too late for that."""
        with self._changed:
            if self._closed or self._jobs[job.id].state == "cancelled":
                return
            self._exchanging = True
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.write("go\n")
            process.stdin.flush()


# Stores that are about to be replaced or removed: the answers that read them are waited for.

PATIENCE_S = 30.0
"""So long it waits for a moment in which nobody asks; then nobody may ask until it is done."""
_LOOK_S = 0.02


class Releases:
    """`busy` says whether a name is being answered from, and `close` closes what is open under it."""

    def __init__(self, busy: Callable[[str], bool], close: Callable[[str], None]) -> None:
        self._busy, self._close = busy, close
        self._lock = threading.Lock()
        self._beginning: Counter[str] = Counter()
        self._held: set[str] = set()

    @contextmanager
    def asking(self, name: str) -> Iterator[None]:
        """While a request for a name is begun. Raises `Loading` where its store is about to be another."""
        with self._lock:
            if name in self._held:
                raise Loading(f"'{name}' is being replaced: try again in a moment", 1)
            self._beginning[name] += 1
        try:
            yield
        finally:
            with self._lock:
                self._beginning[name] -= 1
                if not self._beginning[name]:
                    del self._beginning[name]  # names are what clients write

    @contextmanager
    def released(self, name: str) -> Iterator[None]:
        """A time in which nothing uses the store of a name; one at a time for each."""
        hold_from = time.monotonic() + PATIENCE_S
        while not self._take(name, time.monotonic() >= hold_from):
            time.sleep(_LOOK_S)
        try:
            while self._used(name):
                time.sleep(_LOOK_S)
            self._close(name)
            yield
        finally:
            with self._lock:
                self._held.discard(name)

    def _take(self, name: str, used_or_not: bool) -> bool:
        if not used_or_not and self._used(name):
            return False
        with self._lock:
            if name in self._held:
                return False
            self._held.add(name)
            return True

    def _used(self, name: str) -> bool:
        with self._lock:
            if self._beginning[name]:
                return True
        return self._busy(name)
