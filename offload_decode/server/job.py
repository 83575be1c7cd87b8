"""One job: its record and texts on disk, which outlive the server, and the process that does it.

FOLDER/.jobs/lock           held by the server that runs the jobs, and by the process of one
FOLDER/.jobs/ID/job.json    the job
FOLDER/.jobs/ID/0, 1, …     its documents

`python -P -m offload_decode.server.job FOLDER DEVICE`, by `jobs`, is such a process: it yields to answers,
and ends with its server. On stdout: `{"stage", "done", "total"}`, then `{"result"}` or `{"error"}`. The last
stage of an append or a renewal is `exchange`, before which it waits for a line on stdin: only then does the
new store take the place of the one that is being asked.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, NamedTuple
from uuid import uuid4

from offload_decode.common import files
from offload_decode.common.errors import CorpusError, OffloadDecodeError, StoreBusy
from offload_decode.common.fast_import import skip_slow_imports
from offload_decode.common.files import NotPlain, lock, open_plain
from offload_decode.common.memory import OUT_OF_MEMORY, is_out_of_memory, own_memory
from offload_decode.kv.indexes import heads_of
from offload_decode.store.reader import KVStore

if TYPE_CHECKING:
    from offload_decode.prefill_jobs.corpus import Note, TextDocument
    from offload_decode.prefill_jobs.folders import Skipped
    from offload_decode.prefill_jobs.renew import RenewReport

LOG = logging.getLogger("offload_decode.server")

JOBS, LOCK, RECORD, STAGED = ".jobs", "lock", "job.json", ".partial"
EXCHANGE = "exchange"
NICE = 10
"""Answers go first: of a processor that both want, such a process gets one part in ten."""
UNKNOWN = "something went wrong; the server's log says what"
MOST_NOTES = 20
"""On documents, in the result of a job."""
_LARGEST_RECORD = 64 << 20
_WAIT_S = 5.0

Kind = Literal["prefill", "append", "renew"]
State = Literal["queued", "running", "done", "failed", "cancelled"]
Progress = Callable[[str, int, int], None]


class Upload(NamedTuple):
    """A document on its way in; `text`: its bytes are text already (UTF-8), not a file of some kind."""

    name: str
    data: BinaryIO
    text: bool = False


@dataclass(frozen=True)
class Work:
    """What a job does: `prefill` makes the store `name` at `path`, `append` adds to it, `renew` makes it that
    of the documents. The other fields are those of the commands of these names; `index` says whether clusters
    are built for a new store.
    """

    kind: Kind
    name: str
    path: str
    model: str
    dtype: str = "auto"
    weights: str = "auto"
    rope: str = ""
    adapter: str = ""
    kv: str = "auto"
    system: str | None = None
    method: str = "dense"
    options: dict[str, Any] = field(default_factory=dict)
    index: bool = True
    drop: bool = False


@dataclass(frozen=True)
class Job:
    """A job and how far it came; times in seconds since 1970.

    documents: their names, and whether they are text already (`Upload`); the bytes of each are in the file of
    its number. result: what was made, with notes on what was guessed or left out.
    error: why not.
    """

    id: str
    work: Work
    documents: tuple[tuple[str, bool], ...]
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
        """Let another server have them, once no process of a job is left."""
        os.close(self.lock)

    def create(self, work: Work, documents: Sequence[Upload]) -> Job:
        """Write a new job with its documents."""
        named = tuple((document.name, document.text) for document in documents)
        job = Job(f"job-{uuid4().hex[:16]}", work, named, time.time())
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

    def all(self) -> list[Job]:
        """Every job that is there and can be read."""
        found = []
        for folder in sorted(path for path in self.folder.iterdir() if path.is_dir()):
            try:
                found.append(read(folder))
            except (OSError, ValueError):
                LOG.warning("%s is left out: it holds no job that can be read", folder)
        return found


def read(folder: Path) -> Job:
    """The job that lies in a folder. Raises `OSError` and `ValueError`."""
    try:
        with os.fdopen(open_plain(folder / RECORD), "rb") as file:
            data = files.parse(file.read(_LARGEST_RECORD))
        work = Work(**data.pop("work"))
        documents = tuple((str(name), bool(text)) for name, text in data.pop("documents"))
        job = Job(**data, work=work, documents=documents)
    except (NotPlain, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / RECORD} is not the record of a job") from error
    if job.id != folder.name:
        raise ValueError(f"{folder} holds the record of another job")
    return job


def _write(folder: Path, job: Job) -> None:
    files.write(folder / RECORD, json.dumps(asdict(job)).encode())


def main() -> None:
    folder, device = Path(sys.argv[1]), sys.argv[2]
    os.nice(NICE)
    skip_slow_imports()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # lines that libraries print are no messages
    allowed = threading.Event()
    threading.Thread(target=_listen, args=(allowed,), daemon=True).start()
    warnings.simplefilter("ignore")

    def send(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=out, flush=True)

    def progress(stage: str, done: int, total: int) -> None:
        send({"stage": stage, "done": done, "total": total})
        if stage == EXCHANGE:
            allowed.wait()

    try:
        send({"result": run(folder, device, progress)})
    except OffloadDecodeError as error:
        send({"error": str(error)})
    except Exception as error:  # whatever a library raises: the log has all of it
        LOG.error("a job failed", exc_info=error)
        send({"error": OUT_OF_MEMORY if is_out_of_memory(error) else reason_of(error)})
    os._exit(0)


def _listen(allowed: threading.Event) -> None:
    while sys.stdin.readline():
        allowed.set()
    os._exit(1)  # the server is gone; the next one goes on from here


def reason_of(error: Exception) -> str:
    """Why a job failed, where the error has no sentence for its user."""
    reason = error.strerror if isinstance(error, OSError) else None
    return reason or UNKNOWN


def run(folder: Path, device: str, progress: Progress) -> dict[str, Any]:
    """Do the job in `folder`; its result. Raises what prefills, appends, renewals and indexes raise."""
    job = read(folder)
    work, store = job.work, Path(job.work.path)
    progress("read", 0, len(job.documents))
    texts, unread = _texts(folder, job)

    from offload_decode.models.loading import load
    from offload_decode.models.size_estimate import estimate_size
    from offload_decode.planning.caps import Caps, check_prefill
    from offload_decode.prefill_jobs.append import append_texts
    from offload_decode.prefill_jobs.continuing import method_of, opened
    from offload_decode.prefill_jobs.destinations import destination_of
    from offload_decode.prefill_jobs.indexing import build_indexes
    from offload_decode.prefill_jobs.job import Settings, make, prepare, settled
    from offload_decode.prefill_jobs.renew import plan_of_texts, renew_as

    plan = None
    if work.kind == "prefill":
        settings = Settings(work.method, work.options, kv=work.kv, rope=work.rope, system=work.system)
        chunk: int | None = settings.chunk
        how = work.dtype, work.weights, work.rope, work.adapter
    else:
        earlier = opened(store)
        manifest = earlier.manifest
        chunk = method_of(earlier).options.chunk
        how = manifest.dtype, manifest.weights, manifest.scaled, manifest.adapter
    if work.kind == "renew":
        progress("tokenize", 0, len(texts))
        plan = plan_of_texts(earlier, work.model, texts, tuple(unread), work.drop)
        if plan.start is None:  # nothing has changed: no model is loaded
            return _renewed(renew_as(plan, None, store))
    progress("load", 0, 1)
    check_prefill(estimate_size(work.model), chunk, how[0], device, Caps(), own_memory(), how[1])
    loaded = load(work.model, device, *how)
    if plan is not None:
        return _renewed(renew_as(plan, loaded, store, progress))
    progress("tokenize", 0, len(texts))
    if work.kind == "append":
        names = ["n_tokens", "added_tokens", "documents", "added", "known", "discarded", "bytes", "seconds"]
        return _result(append_texts(loaded, texts, store, progress=progress), names, unread)
    place = destination_of(store)
    prepared = prepare(loaded, texts, settings, place)
    made = settled(prepared, place) or make(loaded, prepared, place, progress)
    result = _result(made, ["n_tokens", "documents", "bytes", "seconds"], unread)
    if work.index and heads_of(KVStore.open(store)):
        return result | {"recall": build_indexes(store, "clusters", progress=progress).recall}
    return result | {"recall": None}


def _result(report: Any, names: Sequence[str], unread: Sequence[Skipped]) -> dict[str, Any]:
    """These fields of a report, all documents that are left out, and the first notes on the others."""
    told = {name: getattr(report, name) for name in names}
    return told | _left_out((*unread, *report.failed), report.notes)


def _renewed(report: RenewReport) -> dict[str, Any]:
    """The same of a renewal."""
    plan, told = report.plan, report.summary()
    told = {"bytes": sum(plan.earlier.cost().values()), "seconds": 0.0} | told
    names = ["n_tokens", "documents", "added", "changed", "gone", "kept_tokens", "run_tokens"]
    chosen = {name: told[name] for name in [*names, "discarded", "bytes", "seconds"]}
    return chosen | _left_out((*plan.skipped, *plan.failed), plan.notes)


def _left_out(failed: Sequence[Skipped], notes: Sequence[Note]) -> dict[str, Any]:
    from offload_decode.prefill_jobs.corpus import first_notes

    return {"failed": [one._asdict() for one in failed], "notes": first_notes(notes, MOST_NOTES)}


def _texts(folder: Path, job: Job) -> tuple[list[TextDocument], list[Skipped]]:
    """The documents, and those that cannot be read. Raises `CorpusError` where none can."""
    from offload_decode.prefill_jobs.corpus import TextDocument
    from offload_decode.prefill_jobs.documents.files import read_plain
    from offload_decode.prefill_jobs.documents.reading import read_document
    from offload_decode.prefill_jobs.folders import Skipped

    texts, unread = [], []
    for number, (name, is_text) in enumerate(job.documents):
        try:
            data = read_plain(str(folder / str(number)))
            texts.append(TextDocument(name, *read_document("" if is_text else name, data)))
        except CorpusError as error:
            unread.append(Skipped(name, f"it cannot be read, because {error}"))
    if not texts:
        name, reason = unread[0]
        raise CorpusError(f"{name} {reason.removeprefix('it ')}: leave it out")
    return texts, unread


if __name__ == "__main__":
    main()
