"""Stores are made, appended to, renewed and deleted while others are asked.

Each prefill, append and renewal is a job: a folder of its own on disk and, while it runs, a process of its
own (`server.job`). One runs at a time, in the order in which they came. A new server continues the jobs that
another one left.
"""

import json
import logging
import re
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from offload_decode.common.errors import (
    ConfigError,
    OffloadDecodeError,
    StoreBusy,
    StoreError,
    StoreExists,
)
from offload_decode.hf.compat import check_dtype
from offload_decode.models.quantization import check_weights
from offload_decode.prefill_jobs.job import Settings
from offload_decode.server.catalog import SUFFIX, Catalog, Entry, readable
from offload_decode.server.job import EXCHANGE, JOBS, Job, JobFiles, Kind, State, Upload, Work, reason_of
from offload_decode.server.kept_stores import TRASH, KeptStores, discard, folder_bytes, remove
from offload_decode.server.requests import Busy, NoSuchName, ReadOnly, TooLarge, WrongField

LOG = logging.getLogger("offload_decode.server")

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
MOST_WAITING, MOST_KEPT = 100, 200
EXPIRY_S, DISK_S = 60.0, 1.0
"""How often expired stores are looked for, and the disk is measured while a store is made."""
MOST_DOCUMENTS, MOST_LETTERS = 10_000, 500
_TRIES = 3

Released = Callable[[str], AbstractContextManager[object]]
"""While the context of a name is open, nothing uses or opens its store; entering it waits for the answers
that do.
"""


@dataclass(frozen=True)
class JobProgress:
    """`done` of `total` in a stage: tokens of `prefill`, heads of `index`; `seconds_left` of this stage, None
    where they are not known yet.
    """

    stage: str
    done: int
    total: int
    seconds_left: float | None = None


class Jobs:
    """The jobs of a server, in the first folder among its places; a thread runs them until `close`, and the
    next server continues them. `device` is where their models run, `disk` the bytes that the folder may have
    (None: any number). With `read_only` there are none, and changes of a store raise `ReadOnly`. `answering`
    says whether a name is being answered from: then it does not expire. Thread-safe.
    """

    def __init__(
        self,
        catalog: Catalog,
        released: Released = lambda name: nullcontext(),
        device: str = "auto",
        read_only: bool = False,
        disk: int | None = None,
        answering: Callable[[str], bool] = lambda name: False,
    ) -> None:
        self._catalog, self._released, self._device = catalog, released, device
        self._answering = answering
        self._read_only, self._disk = read_only, disk
        self.kept = KeptStores(catalog, read_only)
        self._changed = threading.Condition()
        self._jobs: dict[str, Job] = {}
        self._progress: dict[str, JobProgress] = {}
        self._deleting: set[str] = set()
        self._files: JobFiles | None = None
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[str] | None = None
        self._exchanging = self._closed = False
        if read_only:
            return
        for left in [path for folder in catalog.folders for path in folder.glob(f"{TRASH}*")]:
            shutil.rmtree(left, ignore_errors=True)  # of stores that a killed server was deleting
        if catalog.folders and (catalog.folders[0] / JOBS).is_dir():
            try:
                self._begin()
            except StoreError as error:
                LOG.warning("%s", error)

    def store(self, name: str) -> tuple[Entry, Path]:
        """A store, and where it lies. Raises `NoSuchName`."""
        entry = self._catalog.entry(name)
        if entry.path is None or entry.collection:
            what = "a collection" if entry.collection else "a model without a corpus"
            raise NoSuchName(f"'{entry.name}' is {what}, and no store")
        return entry, entry.path

    def keep(self, name: str, **said: Any) -> None:
        """Set `pinned` or `expires_after` of a store (`Keeping`), and count its time from now on.

        Raises `NoSuchName`, `StoreError`, `StoreBusy`, and `ConfigError` for a store that lies elsewhere than
        where stores are made.
        """
        self._may_write()
        with self._changed:
            entry, _ = self.store(name)
            self._check_stays(name)
            try:
                self._begin()
                now = self.kept.of(entry)
                self.kept.set(entry, **{"pinned": now.pinned, "expires_after": now.expires_after, **said})
            except OSError as error:
                raise StoreError(f"how long a store is kept cannot be written: {error.strerror}") from error

    def jobs(self) -> list[Job]:
        """All that are known, the newest first."""
        return sorted(self._jobs.copy().values(), key=lambda job: job.created, reverse=True)

    def job(self, id: str) -> Job:
        """One of them. Raises `NoSuchName`."""
        if found := self._jobs.get(id):
            return found
        raise NoSuchName(f"there is no job '{readable(id)}'")

    def progress(self, id: str) -> JobProgress | None:
        """How far a running job is."""
        return self._progress.get(id)

    def prefill(self, name: str, model: str | None, documents: Sequence[Upload], **how: Any) -> Job:
        """Make the store `name` of documents; `how` are further fields of `Work`.

        `model` names an entry whose model is taken; None: the only one there is. Raises `ConfigError`,
        `WrongField`, `NoSuchName`, `StoreExists`, `StoreBusy` and `Busy`.
        """
        folder = self._folder()
        if not NAME.fullmatch(name):
            rule = "1 to 100 letters, digits, '.', '-' and '_', the first a letter or a digit"
            raise WrongField(f"a store's name has {rule}", "name")
        of = self._model_of(model)
        how = {"dtype": of.dtype, "weights": of.weights, "rope": of.scaled, "adapter": of.adapter} | how
        path = folder / (name.removesuffix(SUFFIX) + SUFFIX)
        work = Work("prefill", path.stem, str(path), of.model_id, **how)
        return self._submit(work, documents)

    def append(self, name: str, documents: Sequence[Upload]) -> Job:
        """Add documents to a store. Raises as `prefill`."""
        return self._submit(self._on(name, "append"), documents)

    def renew(self, name: str, documents: Sequence[Upload], drop: bool = False) -> Job:
        """Make a store that of documents, which are the corpus as it is now; most of those that it has are
        dropped only with `drop`. Raises as `prefill`.
        """
        return self._submit(replace(self._on(name, "renew"), drop=drop), documents)

    def cancel(self, id: str) -> Job:
        """Stop a job, and remove what it has written: a store that has its name already stays, and what
        another job may go on with. One that is done, or about to put a new store in its place, stays as it
        is. Raises `NoSuchName`.
        """
        with self._changed:
            job = self.job(id)
            running = job.state == "running"
            if job.state in ("done", "cancelled") or (running and self._exchanging):
                return job
            job = self._save(job, "cancelled")
            if running and self._process is not None:
                self._process.kill()
            elif not running:
                self._discard(job)
            return job

    def retry(self, id: str) -> Job:
        """Have a job that failed go on where it stopped. Raises `NoSuchName` and `ConfigError`."""
        with self._changed:
            job = self.job(id)
            if job.state != "failed":
                raise ConfigError(f"{id} is {job.state}, and only a job that failed can be tried again")
            return self._save(replace(job, error=None, ended=None), "queued")

    def delete(self, name: str, expired: bool = False) -> None:
        """Delete a store, its name at once and its files when no answer reads them; returns then. With
        `expired` it stays where its time is not over any more.

        Raises `NoSuchName`, `ConfigError` for a store that is not in a folder of stores, and `StoreBusy`.
        """
        self._may_write()
        with self._changed:
            entry, path = self.store(name)
            if expired and not self.kept.of(entry).expired:
                return
            if path.parent not in self._catalog.folders:
                raise ConfigError(f"'{name}' was given to the server by itself: only its owner deletes it")
            if name in self._deleting or any(job.work.path == str(path) for job in self._unfinished()):
                raise StoreBusy(f"a job is at work on '{name}': wait for it, or cancel it first")
            self._deleting.add(name)
        try:
            self._catalog.hide(path)
            with self._released(name):
                remove(path)
            self.kept.forget(path)
            if expired:
                LOG.info("'%s' was deleted: it was not used for as long as it was to be kept", name)
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
            if self._files is not None:
                self._files.close()
            self._files = None

    def _begin(self) -> JobFiles:
        """Take over the jobs that lie in the folder. Raises `StoreBusy` and `StoreError`."""
        if self._files is None:
            folder = self._folder()
            try:
                self._files = JobFiles(folder)
            except OSError as error:
                raise StoreError(f"no stores can be made in {folder}: {error.strerror}") from error
            for job in self._files.all():
                self._jobs[job.id] = job if job.over else replace(job, state="queued")
            self._thread = threading.Thread(target=self._run, name="jobs", daemon=True)
            self._thread.start()
        return self._files

    def _may_write(self) -> None:
        if self._read_only:
            raise ReadOnly("this server was started with --read-only: it makes no stores, and deletes none")

    def _folder(self) -> Path:
        self._may_write()
        if not self._catalog.folders:
            raise ConfigError("there is no folder to put stores in: start the server with one among STORES")
        return self._catalog.folders[0]

    def _on(self, name: str, kind: Kind) -> Work:
        self._folder()
        entry, path = self.store(name)
        return Work(kind, entry.name, str(path), entry.model_id, entry.dtype, entry.weights)

    def _model_of(self, model: str | None) -> Entry:
        if model is not None:
            return self._catalog.entry(model)
        bare = [entry for entry in self._catalog.entries() if entry.path is None]
        if len(bare) == 1:
            return bare[0]
        named = "name one of " + ", ".join(entry.name for entry in bare[:10])
        raise WrongField(named if bare else "this server knows no model: start it with --model", "model")

    def _unfinished(self) -> list[Job]:
        return [job for job in self._jobs.values() if not job.over]

    def _submit(self, work: Work, documents: Sequence[Upload]) -> Job:
        _check(work, documents)
        with self._changed:
            files = self._begin()
            if len(self._unfinished()) >= MOST_WAITING:
                raise Busy(f"{MOST_WAITING} jobs wait already: try again later", 60)
            if full := self._full():
                raise TooLarge(full)
            if work.kind == "prefill":
                self._check_free(work)
                self.kept.forget(Path(work.path))
            else:
                self._check_stays(work.name)
            try:
                job = files.create(work, documents)
            except OSError as error:
                raise StoreError(f"the documents cannot be kept: {error.strerror}") from error
            self._jobs[job.id] = job
            for old in [job for job in self.jobs() if job.over][MOST_KEPT:]:
                del self._jobs[old.id]
                shutil.rmtree(files.of(old.id), ignore_errors=True)
            self._changed.notify_all()
            return job

    def _discard(self, cancelled: Job) -> None:
        """Remove what a job has written, unless it is what another one on that store stopped at."""
        path = cancelled.work.path
        begun = [job for job in self._jobs.values() if job.work.path == path and job.started is not None]
        if cancelled.started is not None and all(job.state in ("done", "cancelled") for job in begun):
            discard(Path(path))

    def _check_stays(self, name: str) -> None:
        if name in self._deleting:
            raise StoreBusy(f"'{name}' is being deleted")

    def _check_free(self, work: Work) -> None:
        """Raise StoreExists unless a store may have this name; a job for it that failed makes way."""
        for job in [job for job in self._jobs.values() if job.work.path == work.path]:
            if not job.over:
                raise StoreExists(f"'{work.name}' is being made already, by {job.id}")
            if job.state == "failed":
                self.cancel(job.id)
        taken = {entry.name for entry in self._catalog.entries()}
        if work.name in taken or Path(work.path).exists():
            raise StoreExists(f"'{work.name}' exists already: choose another name, append or delete it first")

    def _save(self, job: Job, state: State, **more: Any) -> Job:
        ended = time.time() if state in ("done", "failed", "cancelled") else None
        job = replace(job, **{"state": state, "ended": ended, **more})
        self._jobs[job.id] = job
        if self._files is not None:
            try:
                self._files.save(job)
            except OSError as error:  # the disk is full, say: the next server finds its earlier state
                LOG.error("the state of %s cannot be written: %s", job.id, error.strerror)
        self._changed.notify_all()
        return job

    def _full(self) -> str:
        """A sentence where the folder has as many bytes as it may, or more."""
        if self._disk is None or (used := folder_bytes(self._folder())) < self._disk:
            return ""
        return f"the stores here have {used:,} bytes, of {self._disk:,} that the server allows: delete one"

    def _expire(self) -> None:
        """Delete the stores whose time is over."""
        with self._changed:  # no file of theirs is being written
            self.kept.forget_gone()
        for name in self.kept.expired():
            try:
                if self._answering(name):
                    self.kept.use(self.store(name)[0])
                self.delete(name, expired=True)
            except (OffloadDecodeError, OSError) as error:
                LOG.warning("'%s' has expired, and is still there: %s", name, error)

    def _run(self) -> None:
        while True:
            self._expire()
            with self._changed:
                if not self._changed.wait_for(lambda: self._closed or self._unfinished(), EXPIRY_S):
                    continue
                if self._closed:
                    return
                first = min(self._unfinished(), key=lambda job: job.created)
                job = self._save(first, "running", started=time.time())
            try:
                self._work(job)
            except Exception as error:  # whatever it was, the next job runs
                LOG.error("%s failed", job.id, exc_info=error)
                with self._changed:
                    self._save(job, "failed", error=reason_of(error))

    def _work(self, job: Job) -> None:
        """Run a job to its end, in a process that is started again where it is killed."""
        for attempt in range(_TRIES):
            message, code = self._attempt(job)
            self._progress.pop(job.id, None)
            self._catalog.refresh()
            with self._changed:
                self._exchanging = False
                if self._closed:
                    return
                if self._jobs[job.id].state == "cancelled":
                    self._discard(job)
                    return
                if "result" in message:
                    self._save(job, "done", result=message["result"])
                    return
                if "error" in message or attempt == _TRIES - 1:
                    end = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
                    error = message.get("error") or f"its process {end}, {_TRIES} times"
                    LOG.warning("%s ('%s') failed: %s", job.id, job.work.name, error)
                    self._save(job, "failed", error=error)
                    return

    def _attempt(self, job: Job) -> tuple[dict[str, Any], int]:
        """One process of a job: its last message, and its exit code."""
        files = self._files
        assert files is not None
        with self._changed:
            if self._closed or self._jobs[job.id].state == "cancelled":
                return {}, 0
            # -P: no modules of the folder that the server was started in.
            command = [sys.executable, "-P", "-m", "offload_decode.server.job"]
            process = self._process = subprocess.Popen(
                [*command, str(files.of(job.id)), self._device],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                pass_fds=[files.lock],
            )
        message: dict[str, Any] = {}
        first, began = JobProgress("", 0, 0), 0.0  # of the stage, and when
        measured, full = 0.0, ""
        with process, ExitStack() as exchanging:
            assert process.stdout is not None
            for line in process.stdout:
                if not line.endswith("\n"):  # it was killed in the middle of a word
                    break
                message = json.loads(line)
                if "stage" not in message:
                    continue
                now, so_far = time.monotonic(), JobProgress(**message)
                if now - measured > DISK_S and so_far.stage != EXCHANGE:
                    measured = now
                    if full := self._full():
                        process.kill()
                        message = {"error": full}
                        break
                if so_far.stage != first.stage:
                    first, began = so_far, now
                if (ran := so_far.done - first.done) > 0:
                    left = (now - began) * (so_far.total - so_far.done) / ran
                    so_far = replace(so_far, seconds_left=left)
                self._progress[job.id] = so_far
                if so_far.stage == EXCHANGE:
                    exchanging.enter_context(self._released(job.work.name))
                    with self._changed:  # the new store takes its place, unless it is too late
                        self._exchanging = not self._closed and self._jobs[job.id].state != "cancelled"
                    if self._exchanging:
                        with suppress(BrokenPipeError):
                            print("go", file=process.stdin, flush=True)
            process.wait()
            if full:
                discard(Path(job.work.path))
            self._catalog.refresh()
        with self._changed:
            self._process = None
        return message, process.returncode


def _check(work: Work, documents: Sequence[Upload]) -> None:
    Settings(work.method, work.options, kv=work.kv, rope=work.rope)
    check_dtype(work.dtype)
    check_weights(work.weights)
    if not 0 < len(documents) <= MOST_DOCUMENTS:
        raise WrongField(f"give 1 to {MOST_DOCUMENTS:,} documents, not {len(documents):,}", "documents")
    for name, times in Counter(document.name for document in documents).items():
        if not name.strip() or len(name) > MOST_LETTERS or not name.isprintable():
            raise WrongField(f"a document's name has 1 to {MOST_LETTERS} printable letters", "documents")
        if times > 1:
            raise WrongField(f"two documents are called '{name}': give each a name of its own", "documents")
