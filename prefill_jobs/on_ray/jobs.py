"""Corpora to stores, and stores to indexes, spread over the machines of a Ray cluster.

The driver reads the corpora and hands out their texts; each worker loads the model once and prefills one
corpus after another. A store is indexed by a worker on its machine. A worker in place of a lost one continues
after the last chunk, or the last head.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from offload_decode.common.errors import OffloadDecodeError
from offload_decode.common.memory import own_memory
from offload_decode.indexes import registry
from offload_decode.models.size_estimate import estimate_size
from offload_decode.planning.caps import Caps, apply_caps, check_prefill
from offload_decode.prefill_jobs.buckets.transfer import Watch
from offload_decode.prefill_jobs.destinations import destination_of
from offload_decode.prefill_jobs.folders import EVERYTHING, Rules
from offload_decode.prefill_jobs.indexing import BuildReport, build_indexes
from offload_decode.prefill_jobs.job import Maker, PrefillReport, make, prepare, settled
from offload_decode.prefill_jobs.many import OF_ONE, Job, Results, Texts, read_all
from offload_decode.prefill_jobs.on_ray.pool import Pool, Task, TaskProgress, pool_of
from offload_decode.prefill_jobs.on_ray.workers import Cluster, Lost, Worker, installed


class Prefiller(Worker):
    """Prefills one corpus after another with one model. Its progress is in tokens."""

    def __init__(self, maker: Maker, staging: Path | None, caps: Caps) -> None:
        super().__init__()
        self.maker, self.staging, self.caps = maker, staging, caps

    def begin(self) -> None:
        maker, device, caps = self.maker, self.maker.device, self.caps
        chunk, dtype, weights = maker.settings.chunk, maker.dtype, maker.weights
        check_prefill(estimate_size(maker.model), chunk, dtype, device, caps, own_memory(), weights)
        apply_caps(caps, device)
        _ = maker.loaded

    def run(self, task: Texts) -> PrefillReport:
        loaded, place = self.maker.loaded, destination_of(task.store, self.staging)
        work = prepare(loaded, task.documents, self.maker.settings, place, task.skipped)
        return settled(work, place) or make(loaded, work, place, self._note)

    def _note(self, stage: str, done: int, total: int) -> None:
        if stage == "prefill":
            super()._note(stage, done, total)


def prefill_on_ray(
    jobs: Sequence[Job],
    cluster: Cluster,
    maker: Maker,
    *,
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
        setup = maker, staging and staging.absolute(), cluster.caps
        with pool_of(cluster, maker.device, Prefiller, setup, len(texts), anywhere=True) as pool:
            results |= prefilled(pool, texts, progress)
    return {job: results[own] for job, own in zip(jobs, here, strict=True)}


def prefilled(pool: Pool, texts: Sequence[Texts], progress: Watch) -> Results:
    """The result of every corpus. Raises errors that concern all of them."""
    results: Results = {}
    lengths = [sum(len(document.text) for document in own.documents) for own in texts]
    for number, result in _run(pool, texts, lengths, "prefill", "n_tokens", progress):
        if not isinstance(result, (PrefillReport, Lost, *OF_ONE)):
            raise result
        results[texts[number].job] = result
    return results


def _run(
    pool: Pool, tasks: Sequence[Task], lengths: Sequence[int], stage: str, size: str, progress: Watch
) -> Iterator[tuple[int, Any]]:
    """`Pool.run`, whose progress is in the `size` of reports; that of tasks that are not begun is estimated
    from their `lengths`.
    """
    results: dict[int, Any] = {}

    def watch(running: TaskProgress) -> None:
        made: dict[int, int] = {number: getattr(result, size, 0) for number, result in results.items()}
        known = made | {number: total for number, (_, total) in running.items()}
        known = {number: total for number, total in known.items() if total}
        each = sum(known.values()) / sum(lengths[number] for number in known) if known else 0
        done = sum(lengths[number] for number in results) * each + sum(now for now, _ in running.values())
        about = f"{len(results)} of {len(tasks)} done, {len(running)} at work"
        total = round(sum(lengths) * each) or 1
        progress(stage if known else "start workers", round(done), total, about)

    for number, result in pool.run(tasks, f"{stage}ed it", watch):
        results[number] = result
        yield number, result


class Indexer(Worker):
    """Indexes one store after another. Its progress is in heads."""

    def __init__(self, stores: Sequence[str], kind: str, recall: float, k: int) -> None:
        super().__init__(stores)
        self.kind, self.recall, self.k = kind, recall, k

    def begin(self) -> None:
        """Raises where this kind of index cannot be built on this machine, as where a library is missing."""
        registry.get(self.kind)

    def run(self, task: Job) -> BuildReport:
        path = Path(task.store)
        return build_indexes(path, self.kind, recall=self.recall, k=self.k, progress=self._note)


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
    tasks = [Job("", os.path.abspath(store)) for store in stores]
    setup = [task.store for task in tasks], kind, recall, k
    with pool_of(cluster, "cpu", Indexer, setup, len(tasks)) as pool:
        built = indexed(pool, tasks, progress)
    return {store: built[number] for number, store in enumerate(stores)}


def indexed(pool: Pool, tasks: Sequence[Job], progress: Watch) -> dict[int, Any]:
    """`index_on_ray` by the workers of a pool: the result of every store, by its number."""
    return dict(_run(pool, tasks, [1] * len(tasks), "index", "heads", progress))
