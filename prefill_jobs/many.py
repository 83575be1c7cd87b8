"""Several corpora into several stores: the model is loaded once, and a corpus that fails stops no other."""

from __future__ import annotations

import hashlib
import json
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from urllib.parse import quote

from offload_decode.common.errors import (
    BucketError,
    ConfigError,
    CorpusError,
    DoesNotFit,
    OffloadDecodeError,
    OffloadDecodeWarning,
    StoreBusy,
    StoreError,
    StoreExists,
)
from offload_decode.models.loading import LoadedModel, load
from offload_decode.prefill_jobs.corpus import TextDocument, read_corpus
from offload_decode.prefill_jobs.destinations import Place, place_of
from offload_decode.prefill_jobs.folders import EVERYTHING, STDIN, Rules, Skipped
from offload_decode.prefill_jobs.indexing import build_indexes
from offload_decode.prefill_jobs.job import PrefillReport, Settings, Work, make, prepare, settled
from offload_decode.store.reader import KVStore

SUFFIX = ".kv"

Watch = Callable[[str, int, int, str], None]
"""Progress of a stage, with a word on where in the whole it is."""

OF_ONE = (CorpusError, StoreError, BucketError, DoesNotFit)
"""Errors of one corpus, which do not stop the others."""


@dataclass(frozen=True)
class Job:
    """A corpus, and the path or URL of its store."""

    corpus: str
    store: str


@dataclass(frozen=True)
class Texts:
    """A corpus that was read."""

    job: Job
    documents: list[TextDocument]
    skipped: tuple[Skipped, ...]

    @property
    def characters(self) -> int:
        """How long it is, before any model has read it."""
        return sum(len(document.text) for document in self.documents)


Result = PrefillReport | OffloadDecodeError
Results = dict[Job, Result]
"""What became of every job: its report, or one of `OF_ONE`."""


def is_folder(corpora: Sequence[str], out: str) -> bool:
    """Whether `out` is to hold a store for each corpus, and is not the one store itself."""
    return len(corpora) > 1 or out.endswith("/")


def jobs_of(corpora: Sequence[str], out: str) -> list[Job]:
    """A job for each corpus: its store lies in the folder (or at the URL) `out` and has the corpus' name.

    Raises `ConfigError` where two would have the same name.
    """
    is_url = "://" in out
    if is_url and "://" not in out.rstrip("/"):
        raise ConfigError(f"'{out}' is not the URL of a store: name a bucket or folder after the ://")
    if not is_url and Path(out).exists() and not Path(out).is_dir():
        raise ConfigError(
            f"{out} is a file: with several corpora --out is a folder, and each has a store in it"
        )
    named: dict[str, str] = {}
    for corpus in corpora:
        name = _name(corpus) + SUFFIX
        if name in named:
            raise ConfigError(
                f"{named[name]} and {corpus} would both become {name}: prefill them to different folders"
            )
        named[name] = corpus
    escaped = out.startswith("file:")
    return [
        Job(
            corpus,
            f"{out.rstrip('/')}/{quote(name) if escaped else name}" if is_url else str(Path(out, name)),
        )
        for name, corpus in named.items()
    ]


def prefill_many(
    jobs: Sequence[Job],
    *,
    model: str,
    settings: Settings,
    device: str = "auto",
    dtype: str = "auto",
    weights: str = "auto",
    staging: Path | None = None,
    rules: Rules = EVERYTHING,
    progress: Watch = lambda stage, done, total, about: None,
) -> Results:
    """Prefill every corpus to its store, with one model, one after another.

    A store that is there already, of the same tokens, model and settings, is kept, so that the same call
    resumes. Errors that are not of one corpus are raised at once: `ConfigError`, `ModelError`, `BucketError`
    before the work begins.
    """
    results, texts = read_all(jobs, staging, rules)
    if not texts:
        return results
    loaded = load(model, device, dtype, weights)
    todo: list[tuple[Job, Work, Place]] = []
    for number, own in enumerate(texts):
        progress("tokenize", number, len(texts), own.job.corpus)
        place = place_of(own.job.store, staging)
        try:
            work = prepare(loaded, own.documents, settings, own.skipped)
            if found := settled(work, place):
                results[own.job] = found
            else:
                todo.append((own.job, work, place))
        except OF_ONE as error:
            results[own.job] = error
    total, before = sum(len(work.tokens) for _, work, _ in todo), 0
    for number, (job, work, place) in enumerate(todo, start=1):
        about = f"{number} of {len(todo)}, {job.corpus}"

        def shown(stage: str, done: int, own: int, before: int = before, about: str = about) -> None:
            progress(stage, *((before + done, total) if stage == "prefill" else (done, own)), about)

        try:
            results[job] = make(loaded, work, place, shown)
        except OF_ONE as error:
            results[job] = error
        before += len(work.tokens)
    return {job: results[job] for job in jobs}


def read_all(jobs: Sequence[Job], staging: Path | None, rules: Rules) -> tuple[Results, list[Texts]]:
    """Read the corpora and see that their places can be used: what failed, and the texts of the rest."""
    failed: Results = {}
    texts = []
    for job in jobs:
        try:
            place_of(job.store, staging).admit()
            documents, skipped = read_corpus(job.corpus, rules)
            texts.append(Texts(job, documents, tuple(skipped)))
        except (CorpusError, StoreError) as error:
            failed[job] = error
    return failed, texts


def _name(corpus: str) -> str:
    if corpus == STDIN:
        return "stdin"
    path = Path(corpus)
    if path.name in ("", ".."):
        path = path.resolve()
    return (path.name if path.is_dir() else path.stem) or "root"


# Stores that are kept, and found again by whoever needs the same one: by what name, and each made once.

LOOK_S = 0.5  # how often it is looked whether another process is done,
TRY_S = 5.0  # and whether it was killed, which takes a text to be tokenized again
_TOLD: set[Path] = set()  # folders: waiting is said once, not for each of hundreds of stores


def kept_name(loaded: LoadedModel, settings: Settings, *of: object) -> str:
    """A file's name, by the model, how it is prefilled, and what it is `of` (a text or tokens, and whatever
    else shapes what is stored of them): plain JSON values.
    """
    model = [loaded.weights_hash, loaded.config_hash, loaded.tokenizer_hash, loaded.dtype, loaded.weights]
    said = json.dumps([*of, model, asdict(settings)], sort_keys=True, default=dict)
    return f"{hashlib.sha256(said.encode()).hexdigest()[:32]}.kv"


def kept(path: Path, make: Callable[[], object], kinds: Iterable[str] = ()) -> KVStore:
    """The store at `path`, which `make` makes where it is not there yet, with indexes of these kinds.

    What another process is making is waited for, with a warning that says so; where that process is killed,
    this one goes on with what it began.
    """

    def made() -> None:
        if not path.exists():
            try:
                make()
            except StoreExists:
                if not path.exists():  # it is not that another process was faster
                    raise

    _patiently(made, path, path.exists)
    for kind in kinds:
        _patiently(partial(build_indexes, path, kind), path, lambda: True)
    return KVStore.open(path)


def _patiently(work: Callable[[], object], path: Path, done: Callable[[], bool]) -> None:
    while True:
        try:
            work()
            return
        except StoreBusy:
            if path.parent not in _TOLD:
                _TOLD.add(path.parent)
                told = (
                    f"Another process makes stores in {path.parent}: this one waits for those that both need."
                )
                warnings.warn(OffloadDecodeWarning(told), stacklevel=3)
        until = time.monotonic() + TRY_S
        time.sleep(LOOK_S)
        while not done() and time.monotonic() < until:
            time.sleep(LOOK_S)
