"""What jobs have on disk, so that they outlive the server: each job's record and texts, and the stores at
work.

FOLDER/.jobs/lock           held by the server that runs the jobs, and by the process of one
FOLDER/.jobs/ID/job.json    the job FOLDER/.jobs/ID/0, 1, …     its documents
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple
from uuid import uuid4

from offload_decode.common import files
from offload_decode.common.errors import StoreBusy, StoreError
from offload_decode.common.files import NotPlain, lock, open_plain
from offload_decode.kv.indexes import indexes_folder
from offload_decode.store.staging import LOCK as STORE_LOCK
from offload_decode.store.staging import REPLACED, locked, partial_path
from offload_decode.store.writer import clear, restore

LOG = logging.getLogger("offload_decode.server")

JOBS, LOCK, RECORD, STAGED = ".jobs", "lock", "job.json", ".partial"
_LARGEST_RECORD = 64 << 20
_WAIT_S = 5.0
_TRASH = ".deleted-"

State = Literal["queued", "running", "done", "failed", "cancelled"]


class Upload(NamedTuple):
    """A document on its way in: its name, its bytes, and whether they are text already (UTF-8) or a file of
    some kind.
    """

    name: str
    data: BinaryIO
    text: bool = False


class Stated(NamedTuple):
    """A document of a job; its bytes are in the file of its number."""

    name: str
    text: bool


@dataclass(frozen=True)
class Work:
    """What a job does: `prefill` makes the store `name` at `path`, `append` adds to it. The other fields are
    those of the commands of these names; `index` says whether clusters are built for a new store.
    """

    kind: Literal["prefill", "append"]
    name: str
    path: str
    model: str
    dtype: str = "auto"
    weights: str = "auto"
    kv: str = "auto"
    method: str = "dense"
    options: dict[str, Any] = field(default_factory=dict)
    index: bool = True


@dataclass(frozen=True)
class Job:
    """A job and how far it came; times in seconds since 1970. `result`: what was made. `error`: why not."""

    id: str
    work: Work
    documents: tuple[Stated, ...]
    created: float
    state: State = "queued"
    started: float | None = None
    ended: float | None = None
    error: str | None = None
    result: dict[str, Any] | None = None

    @property
    def over(self) -> bool:
        """Nothing more comes of it, unless it is tried again."""
        return self.state in ("done", "failed", "cancelled")


class JobFiles:
    """The jobs of a folder. Raises `StoreBusy` where another server has them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / JOBS
        self.folder.mkdir(exist_ok=True)
        self.lock = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + _WAIT_S
        while not lock(self.lock):  # the process of a job that lost its server ends within a moment
            if time.monotonic() > deadline:
                os.close(self.lock)
                raise StoreBusy(f"another server makes stores in {folder}: ask that one, or stop it first")
            time.sleep(0.05)
        for left in self.folder.glob(f"*{STAGED}"):
            shutil.rmtree(left)

    def close(self) -> None:
        """Let another server have them, as soon as no process of a job is left."""
        os.close(self.lock)

    def create(self, work: Work, documents: Sequence[Upload]) -> Job:
        """Write a new job with its documents."""
        stated = tuple(Stated(document.name, document.text) for document in documents)
        job = Job(f"job-{uuid4().hex[:16]}", work, stated, time.time())
        staged = self.of(job.id).with_name(job.id + STAGED)
        staged.mkdir()
        try:
            for number, document in enumerate(documents):
                with open(staged / str(number), "wb") as file:
                    shutil.copyfileobj(document.data, file)
            _write(staged, job)
            files.sync_tree(staged)
            files.rename(staged, self.of(job.id))
        except BaseException:
            shutil.rmtree(staged, ignore_errors=True)
            raise
        return job

    def of(self, id: str) -> Path:
        """Where a job lies."""
        return self.folder / id

    def save(self, job: Job) -> None:
        """Write how far a job came; its documents go when they are no longer needed."""
        _write(self.of(job.id), job)
        if job.state in ("done", "cancelled"):
            for number in range(len(job.documents)):
                (self.of(job.id) / str(number)).unlink(missing_ok=True)

    def remove(self, job: Job) -> None:
        """Forget a job."""
        shutil.rmtree(self.of(job.id), ignore_errors=True)

    def all(self) -> Iterator[tuple[Path, Job | None]]:
        """Every folder that is there, with its job; None where that cannot be read."""
        for folder in sorted(path for path in self.folder.iterdir() if path.is_dir()):
            try:
                yield folder, read(folder)
            except (OSError, ValueError):
                yield folder, None


def read(folder: Path) -> Job:
    """The job that lies in a folder. Raises `OSError` and `ValueError`."""
    try:
        with os.fdopen(open_plain(folder / RECORD), "rb") as file:
            data = files.parse(file.read(_LARGEST_RECORD))
        work = Work(**data.pop("work"))
        documents = tuple(Stated(str(name), bool(text)) for name, text in data.pop("documents"))
        job = Job(**data, work=work, documents=documents)
    except (NotPlain, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / RECORD} is not the record of a job") from error
    if job.id != folder.name:
        raise ValueError(f"{folder} holds the record of another job")
    return job


def _write(folder: Path, job: Job) -> None:
    files.write(folder / RECORD, json.dumps(asdict(job)).encode())


def discard(path: Path) -> None:
    """Remove what a job staged for the store at `path`. The store itself, where there is one, stays."""
    partial = partial_path(path)
    if (partial / STORE_LOCK).exists():
        try:
            with locked(partial):
                restore(path, partial / REPLACED)
                clear(partial)
        except StoreBusy as error:
            LOG.warning("%s", error)


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
