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
from offload_decode.prefill_jobs.many import OF_ONE, Job, Results, Texts, Watch, read_all
from offload_decode.prefill_jobs.on_ray.pool import Lost, Pool, TaskProgress, pool_of
from offload_decode.prefill_jobs.on_ray.workers import Cluster, Worker, installed


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
    """Prefills one corpus after another with one model. Its progress is in tokens."""

    loaded: LoadedModel

    def __init__(self, setup: PrefillSetup) -> None:
        super().__init__()
        self.setup = setup

    def begin(self) -> None:
        """Load the model, under the caps."""
        own = self.setup
        given = own.settings.chunk, own.dtype, own.device, own.caps, own_memory(), own.weights
        check_prefill(outline(own.model), *given)
        apply_caps(own.caps, own.device)
        self.loaded = load(own.model, own.device, own.dtype, own.weights)

    def run(self, task: Texts) -> PrefillReport:
        """One corpus to its store."""
        work = prepare(self.loaded, task.documents, self.setup.settings, task.skipped)
        place = destination_of(task.store, self.setup.staging)
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
    buckets of the stores, but neither the corpora nor any file of this process. Raises as `pool_of`.
    """
    installed("--workers ray")  # or else stop before the corpora are read
    here = [job if "://" in job.store else replace(job, store=os.path.abspath(job.store)) for job in jobs]
    results, texts = read_all(here, staging, rules)
    if texts:
        staged = staging and staging.absolute()
        setup = PrefillSetup(model, device, dtype, weights, settings, staged, cluster.caps)
        with pool_of(cluster, device, Prefiller, setup, len(texts), anywhere=True) as pool:
            results |= prefilled(pool, texts, progress)
    return {job: results[own] for job, own in zip(jobs, here, strict=True)}


def prefilled(pool: Pool, texts: Sequence[Texts], progress: Watch) -> Results:
    """The result of every corpus. Raises errors that concern all of them."""
    results: Results = {}

    def watch(running: TaskProgress) -> None:
        progress(*_progress(texts, results, running))

    for number, result in pool.run(texts, "prefilled it", watch):
        if not isinstance(result, (PrefillReport, Lost, *OF_ONE)):
            raise result
        results[texts[number].job] = result
    return results


def _progress(texts: Sequence[Texts], results: Results, running: TaskProgress) -> tuple[str, int, int, str]:
    """Tokens done, and of how many; those of corpora that are not begun are estimated by length."""
    length = {own.job: own.characters for own in texts}
    made = {job: found.n_tokens for job, found in results.items() if isinstance(found, PrefillReport)}
    known = made | {texts[number].job: total for number, (_, total) in running.items() if total}
    about = f"{len(results)} of {len(texts)} done, {len(running)} at work"
    if not known:
        return "start workers", 0, 1, about
    each = sum(known.values()) / sum(length[job] for job in known)
    done = sum(length[job] for job in results) * each + sum(now for now, _ in running.values())
    return "prefill", round(done), round(sum(length.values()) * each), about


@dataclass(frozen=True)
class IndexSetup:
    """What all workers get. `stores`: the absolute paths of all stores to index."""

    stores: tuple[str, ...]
    kind: str
    recall: float
    k: int


@dataclass(frozen=True)
class StoreToIndex:
    """A store at an absolute path."""

    store: str


class Indexer(Worker):
    """Indexes one store after another. Its progress is in heads."""

    def __init__(self, setup: IndexSetup) -> None:
        super().__init__(setup.stores)
        self.setup = setup

    def begin(self) -> None:
        """Raises where this kind of index cannot be built on this machine, as where a library is missing."""
        registry.get(self.setup.kind)

    def run(self, task: StoreToIndex) -> BuildReport:
        """The indexes of a store."""
        path, own = Path(task.store), self.setup
        return build_indexes(path, own.kind, recall=own.recall, k=own.k, progress=self._note)


Indexed = dict[int, BuildReport | OffloadDecodeError]
"""The result of every store, by its number."""


def index_on_ray(
    stores: Sequence[Path],
    cluster: Cluster,
    kind: str,
    *,
    recall: float = 0.98,
    k: int = 100,
    progress: Watch = lambda stage, done, total, about: None,
) -> dict[Path, BuildReport | OffloadDecodeError]:
    """`build_indexes` of every store, on workers that have it at its path. Raises as `pool_of`, and for a
    kind of index that cannot be built.
    """
    tasks = [StoreToIndex(os.path.abspath(store)) for store in stores]
    setup = IndexSetup(tuple(task.store for task in tasks), kind, recall, k)
    with pool_of(cluster, "cpu", Indexer, setup, len(tasks)) as pool:
        built = indexed(pool, tasks, progress)
    return {store: built[number] for number, store in enumerate(stores)}


def indexed(pool: Pool, tasks: Sequence[StoreToIndex], progress: Watch) -> Indexed:
    """`index_on_ray` by the workers of a pool."""
    results: Indexed = {}

    def watch(running: TaskProgress) -> None:
        heads = [found.heads for found in results.values() if isinstance(found, BuildReport)]
        known = heads + [total for _, total in running.values() if total]
        each = sum(known) / len(known) if known else 0  # estimates those that are not begun
        done = sum(heads) + sum(now for now, _ in running.values())
        about = f"{len(results)} of {len(tasks)} done, {len(running)} at work"
        progress("index" if known else "start workers", done, round(each * len(tasks)) or 1, about)

    results.update(pool.run(tasks, "indexed it", watch))
    return results
