"""Corpora to stores, and stores to indexes, spread over the machines of a Ray cluster.

The driver reads the corpora and hands out their texts; each worker loads the model once and prefills one
corpus after another. A store is indexed by a worker on its machine. A worker in place of a lost one continues
after the last chunk, or the last head.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from offload_decode.common.errors import OffloadDecodeError
from offload_decode.common.memory import own_memory
from offload_decode.indexes import registry
from offload_decode.models.loading import LoadedModel, load
from offload_decode.models.size_estimate import outline
from offload_decode.planning.caps import Caps, apply_caps, check_prefill
from offload_decode.prefill_jobs.destinations import destination_of
from offload_decode.prefill_jobs.folders import EVERYTHING, Rules
from offload_decode.prefill_jobs.indexing import BuildReport, build_indexes
from offload_decode.prefill_jobs.job import PrefillReport, Settings, make, prepare, settled
from offload_decode.prefill_jobs.many import OF_ONE, Job, Result, Results, Texts, Watch, read_all
from offload_decode.prefill_jobs.on_ray.store_workers import StoreWorker, routed
from offload_decode.prefill_jobs.on_ray.workers import (
    Cluster,
    Lost,
    Pool,
    TaskProgress,
    Waiting,
    Worker,
    after_the_lost,
    all_lost,
    connected,
    installed,
    shares,
)


@dataclass(frozen=True)
class PrefillSetup:
    """What all workers get."""

    model: str
    device: str
    dtype: str
    weights: str
    settings: Settings
    staging: Path | None
    caps: Caps


class Prefiller(Worker):
    """Prefills one corpus after another with one model; it stands at so many tokens."""

    def __init__(self, how: PrefillSetup) -> None:
        super().__init__()
        self.how = how
        self.loaded: LoadedModel | None = None

    def load(self) -> OffloadDecodeError | None:
        """Load the model, under the caps."""
        how = self.how
        try:
            chunk = how.settings.chunk
            check_prefill(
                outline(how.model), chunk, how.dtype, how.device, how.caps, own_memory(), how.weights
            )
            apply_caps(how.caps, how.device)
            self.loaded = load(how.model, how.device, how.dtype, how.weights)
        except OffloadDecodeError as error:
            return error
        return None

    def do(self, texts: Texts) -> Result:
        """One corpus to its store."""
        self._standing = (0, 0)
        if self.loaded is None and (error := self.load()):
            return error
        try:
            return after_the_lost(lambda: self._prefill(texts))
        except OffloadDecodeError as error:
            return error

    def _prefill(self, texts: Texts) -> PrefillReport:
        assert self.loaded is not None
        work = prepare(self.loaded, texts.documents, self.how.settings, texts.skipped)
        place = destination_of(texts.job.store, self.how.staging)
        return settled(work, place) or make(self.loaded, work, place, self._note)

    def _note(self, stage: str, done: int, total: int) -> None:
        if stage == "prefill":
            super()._note(stage, done, total)


def prefill_on_ray(
    jobs: Sequence[Job],
    cluster: Cluster,
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
    """`many.prefill_many` on the workers of a cluster, whose machines need the model and the folders or
    buckets of the stores, but neither the corpora nor any file of this process.

    Raises `ConfigError` where Ray is not installed, `OffloadDecodeError` where no cluster answers.
    """
    ray = installed("--workers ray")
    here = [job if "://" in job.store else replace(job, store=os.path.abspath(job.store)) for job in jobs]
    results, texts = read_all(here, staging, rules)
    if texts:
        how = PrefillSetup(
            model, device, dtype, weights, settings, staging and staging.absolute(), cluster.caps
        )
        with connected(ray, cluster.address):
            count, share = shares(ray, cluster.workers, device, grows=True)
            pool = Pool(ray, Prefiller, how, min(count, len(texts)), share)
            results |= prefilled(pool, texts, progress)
    return {job: results[own] for job, own in zip(jobs, here, strict=True)}


def prefilled(pool: Pool, texts: Sequence[Texts], progress: Watch) -> Results:
    """The result of every corpus. Raises errors that concern all of them."""
    results: Results = {}

    def watch(standing: TaskProgress) -> None:
        progress(*_progress(texts, results, standing))

    for number, result in pool.run(texts, watch, Waiting(range(len(texts)), anywhere=True)):
        if isinstance(result, Lost):
            result = all_lost("prefilled it", result)
        elif not isinstance(result, (PrefillReport, *OF_ONE)):
            raise result
        results[texts[number].job] = result
    return results


def _progress(texts: Sequence[Texts], results: Results, standing: TaskProgress) -> tuple[str, int, int, str]:
    """Tokens done, and of how many; those of corpora that are not begun are estimated by length."""
    length = {own.job: own.characters for own in texts}
    made = {job: found.n_tokens for job, found in results.items() if isinstance(found, PrefillReport)}
    known = made | {texts[number].job: total for number, (_, total) in standing.items() if total}
    about = f"{len(results)} of {len(texts)} done, {len(standing)} at work"
    if not known:
        return "start workers", 0, 1, about
    each = sum(known.values()) / sum(length[job] for job in known)
    done = sum(length[job] for job in results) * each + sum(now for now, _ in standing.values())
    return "prefill", round(done), round(sum(length.values()) * each), about


@dataclass(frozen=True)
class IndexSetup:
    """What all workers get. `stores`: the absolute paths of all stores to index."""

    stores: tuple[str, ...]
    kind: str
    recall: float
    k: int


@dataclass(frozen=True)
class Whole:
    """A store to index."""

    store: str


class Indexer(StoreWorker):
    """Indexes one store after another; it stands at so many heads."""

    def __init__(self, how: IndexSetup) -> None:
        super().__init__(how.stores)
        self.how = how

    def begin(self) -> None:
        """Raises where this kind of index cannot be built on this machine, as where a library is missing."""
        registry.get(self.how.kind)

    def done(self, task: Whole) -> BuildReport:
        """The indexes of a store."""
        self._standing = (0, 0)
        how = self.how
        return after_the_lost(
            lambda: build_indexes(Path(task.store), how.kind, recall=how.recall, k=how.k, progress=self._note)
        )


Indexed = dict[Path, BuildReport | OffloadDecodeError]
"""The result of every store."""


def index_on_ray(
    stores: Sequence[Path],
    cluster: Cluster,
    kind: str,
    *,
    recall: float = 0.98,
    k: int = 100,
    progress: Watch = lambda stage, done, total, about: None,
) -> Indexed:
    """`build_indexes` of every store, on workers that have it at its path.

    Raises `ConfigError` where Ray is not installed, `OffloadDecodeError` where no cluster answers, and for a
    kind of index that cannot be built.
    """
    ray = installed("--workers ray")
    tasks = [Whole(os.path.abspath(store)) for store in stores]
    how = IndexSetup(tuple(task.store for task in tasks), kind, recall, k)
    with connected(ray, cluster.address):
        count, share = shares(ray, cluster.workers, "cpu", grows=True)
        built = indexed(Pool(ray, Indexer, how, min(count, len(tasks)), share), tasks, progress)
    return {store: built[number] for number, store in enumerate(stores)}


def indexed(
    pool: Pool, tasks: Sequence[Whole], progress: Watch
) -> dict[int, BuildReport | OffloadDecodeError]:
    """`index_on_ray` by the workers of a pool; results by number."""
    results: dict[int, BuildReport | OffloadDecodeError] = {}

    def watch(standing: TaskProgress) -> None:
        heads = [found.heads for found in results.values() if isinstance(found, BuildReport)]
        known = heads + [total for _, total in standing.values() if total]
        each = sum(known) / len(known) if known else 0  # estimates those that are not begun
        done = sum(heads) + sum(now for now, _ in standing.values())
        about = f"{len(results)} of {len(tasks)} done, {len(standing)} at work"
        progress("index" if known else "start workers", done, round(each * len(tasks)) or 1, about)

    results.update(routed(pool, tasks, watch, "indexed it"))
    return results
