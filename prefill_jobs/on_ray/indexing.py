"""Stores to indexes, spread over the machines of a Ray cluster: each is indexed by a worker where it lies, as
one process would. One in place of a lost worker goes on after the last head.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from offload_decode.common.errors import OffloadDecodeError
from offload_decode.indexes import registry
from offload_decode.prefill_jobs.indexing import BuildReport, build_indexes
from offload_decode.prefill_jobs.on_ray.cluster import Cluster, connected, installed, shares
from offload_decode.prefill_jobs.on_ray.pool import Pool, Standing, after_the_lost
from offload_decode.prefill_jobs.on_ray.routing import AtStores, routed


@dataclass(frozen=True)
class How:
    """What all workers are told. `stores`: absolute paths of all that are to be indexed."""

    stores: tuple[str, ...]
    kind: str
    recall: float
    k: int


@dataclass(frozen=True)
class Whole:
    """A store, all of which is to be indexed."""

    store: str


class Indexer(AtStores):
    """In a process of its own, on any machine; see `pool.Worker`."""

    def __init__(self, how: How) -> None:
        super().__init__(how.stores)
        self.how = how

    def begin(self) -> None:
        """Raises what is wrong with the kind of index on this machine, such as a library that it lacks."""
        registry.get(self.how.kind)

    def done(self, task: Whole) -> BuildReport:
        """The indexes of a store."""
        self._standing = (0, 0)
        how = self.how
        return after_the_lost(
            lambda: build_indexes(Path(task.store), how.kind, recall=how.recall, k=how.k, progress=self._note)
        )

    def standing(self) -> tuple[int, int]:
        """In heads."""
        return self._standing

    def _note(self, stage: str, done: int, total: int) -> None:
        self._standing = (done, total)


Watch = Callable[[str, int, int, str], None]
Results = dict[Path, BuildReport | OffloadDecodeError]
"""What became of every store."""


def index_on_ray(
    stores: Sequence[Path],
    cluster: Cluster,
    kind: str,
    *,
    recall: float = 0.98,
    k: int = 100,
    progress: Watch = lambda stage, done, total, about: None,
) -> Results:
    """`build_indexes` of every store, on the workers of a cluster that have it at its path.

    Raises `ConfigError` where Ray is not installed, `OffloadDecodeError` where no cluster answers, and what
    is wrong with the kind of index.
    """
    ray = installed("--workers ray")
    tasks = [Whole(os.path.abspath(store)) for store in stores]
    how = How(tuple(task.store for task in tasks), kind, recall, k)
    with connected(ray, cluster.address):
        count, share = shares(ray, cluster.workers, "cpu", grows=True)
        built = indexed(Pool(ray, Indexer, how, min(count, len(tasks)), share), tasks, progress)
    return {store: built[number] for number, store in enumerate(stores)}


def indexed(
    pool: Pool, tasks: Sequence[Whole], progress: Watch
) -> dict[int, BuildReport | OffloadDecodeError]:
    """`index_on_ray` by the workers of a pool, by the number of each task."""
    results: dict[int, BuildReport | OffloadDecodeError] = {}

    def watch(standing: Standing) -> None:
        heads = [found.heads for found in results.values() if isinstance(found, BuildReport)]
        known = heads + [total for _, total in standing.values() if total]
        each = sum(known) / len(known) if known else 0  # of those that are not begun
        done = sum(heads) + sum(now for now, _ in standing.values())
        about = f"{len(results)} of {len(tasks)} done, {len(standing)} at work"
        progress("index" if known else "start workers", done, round(each * len(tasks)) or 1, about)

    results.update(routed(pool, tasks, watch, "indexed it"))
    return results
