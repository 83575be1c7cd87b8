"""Several corpora to several stores: the model is loaded once, and a corpus that fails stops no other.

Also stores that are kept for later runs, found again by their names, and made once where several processes
need them.
"""

import hashlib
import json
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
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
from offload_decode.prefill_jobs.buckets.transfer import Watch
from offload_decode.prefill_jobs.corpus import TextDocument, read_corpus
from offload_decode.prefill_jobs.destinations import Place, destination_of
from offload_decode.prefill_jobs.folders import EVERYTHING, STDIN, Rules, Skipped
from offload_decode.prefill_jobs.indexing import build_indexes
from offload_decode.prefill_jobs.job import (
    PrefillReport,
    Settings,
    Work,
    as_made,
    make,
    prepare,
    settled,
)
from offload_decode.store.reader import KVStore

SUFFIX = ".kv"

OF_ONE = (CorpusError, StoreError, BucketError, DoesNotFit)
"""Errors of one corpus, which stop no other."""


@dataclass(frozen=True)
class Job:
    """A corpus, and the path or URL of its store."""

    corpus: str
    store: str


@dataclass(frozen=True)
class Texts:
    job: Job
    documents: list[TextDocument]
    skipped: tuple[Skipped, ...]

    @property
    def store(self) -> str:
        return self.job.store


Result = PrefillReport | OffloadDecodeError
Results = dict[Job, Result]
"""The report of every job, or one of `OF_ONE`."""


def is_folder(corpora: Sequence[str], out: str) -> bool:
    """Whether `out` will hold a store for each corpus, and is not the store itself."""
    return len(corpora) > 1 or out.endswith("/")


def jobs_of(corpora: Sequence[str], out: str) -> list[Job]:
    """A job for each corpus; its store goes into the folder (or URL) `out` and has the corpus' name.

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
            both = f"{named[name]} and {corpus}"
            raise ConfigError(f"{both} would both become {name}: prefill them to different folders")
        named[name] = corpus
    if not is_url:
        return [Job(corpus, str(Path(out, name))) for name, corpus in named.items()]
    escape = quote if out.startswith("file:") else str
    return [Job(corpus, f"{out.rstrip('/')}/{escape(name)}") for name, corpus in named.items()]


def prefill_many(
    jobs: Sequence[Job],
    *,
    model: str,
    settings: Settings,
    device: str = "auto",
    dtype: str = "auto",
    weights: str = "auto",
    adapter: str = "",
    staging: Path | None = None,
    rules: Rules = EVERYTHING,
    progress: Watch = lambda stage, done, total, about: None,
) -> Results:
    """Prefill every corpus to its store, with one model, one after another.

    An existing store of the same tokens, model and settings is kept, so that the same call resumes. Errors
    that concern all corpora are raised at once: `ConfigError`, `ModelError`, `BucketError` before the work
    begins.
    """
    results, texts = read_all(jobs, staging, rules)
    if not texts:
        return results
    loaded = load(model, device, *as_made(settings, dtype, weights, adapter))
    todo: list[tuple[Job, Work, Place]] = []
    for number, read in enumerate(texts):
        progress("tokenize", number, len(texts), read.job.corpus)
        place = destination_of(read.job.store, staging)
        try:
            work = prepare(loaded, read.documents, settings, place, read.skipped)
            if found := settled(work, place):
                results[read.job] = found
            else:
                todo.append((read.job, work, place))
        except OF_ONE as error:
            results[read.job] = error
    total, before = sum(len(work.tokens) for _, work, _ in todo), 0
    for number, (job, work, place) in enumerate(todo, start=1):
        about = f"{number} of {len(todo)}, {job.corpus}"

        def shown(stage: str, done: int, whole: int, before: int = before, about: str = about) -> None:
            progress(stage, *((before + done, total) if stage == "prefill" else (done, whole)), about)

        try:
            results[job] = make(loaded, work, place, shown)
        except OF_ONE as error:
            results[job] = error
        before += len(work.tokens)
    return {job: results[job] for job in jobs}


def read_all(jobs: Sequence[Job], staging: Path | None, rules: Rules) -> tuple[Results, list[Texts]]:
    """Read the corpora and check that their stores can be written: what failed, and the texts of the rest."""
    failed: Results = {}
    texts = []
    for job in jobs:
        try:
            destination_of(job.store, staging).admit()
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


LOOK_S = 0.5  # how often to look whether another process is done,
TRY_S = 5.0  # and whether it was killed, for which the text is tokenized again
_WARNED: set[Path] = set()  # folders: one warning for hundreds of stores


def cached_store_name(loaded: LoadedModel, settings: Settings, *of: object) -> str:
    """The file name of a kept store: a digest of the model, the settings, and what it is `of` (plain JSON
    values: a text or tokens, and whatever else shapes what is stored of them).
    """
    model = [loaded.weights_hash, loaded.config_hash, loaded.tokenizer_hash, loaded.dtype, loaded.weights]
    identity = json.dumps([*of, model, asdict(settings)], sort_keys=True, default=dict)
    return f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}.kv"


def kept(path: Path, make: Callable[[], object], kinds: Iterable[str] = ()) -> KVStore:
    """The store at `path`, made by `make` where it does not exist, with indexes of these kinds.

    Waits, with a warning, for another process that is making it; where that is killed, this one continues its
    work.
    """
    while True:
        there = path.exists()
        try:
            if not there:
                make()
            for kind in kinds:
                build_indexes(path, kind)
            return KVStore.open(path)
        except StoreExists:
            if there or not path.exists():  # else another process was faster
                raise
        except StoreBusy:
            if path.parent not in _WARNED:
                _WARNED.add(path.parent)
                text = (
                    f"Another process makes stores in {path.parent}: this one waits for those that both need."
                )
                warnings.warn(OffloadDecodeWarning(text), stacklevel=2)
            until = time.monotonic() + TRY_S
            time.sleep(LOOK_S)
            while not there and not path.exists() and time.monotonic() < until:
                time.sleep(LOOK_S)
