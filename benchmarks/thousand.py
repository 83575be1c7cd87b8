"""What a thousand machines and a hundred million documents would meet first: costs that are measured here,
and what they come to there.

    python -m benchmarks.thousand [--ray]

A batch is handed out by one process: `handed_out` simulates it with the costs that were measured.
"""

from __future__ import annotations

import argparse
import heapq
import os
import pickle
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from offload_decode.collections.words import WORDS, Words, ranked
from prefill_jobs.on_ray.asking import Part
from prefill_jobs.on_ray.cluster import connected, installed
from prefill_jobs.on_ray.pool import Pool
from prefill_jobs.on_ray.waiting import Nearest

DOCUMENTS, MACHINES = 10**8, 10**3
ANSWER_S = 1.0  # of a part on one machine
NAME = "/data/papers.collection/stores/ab/{:032x}.kv"


def seconds(work: Callable[[], Any], times: int = 5) -> float:
    """The median of several runs."""
    found = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return float(np.median(found))


def words(folder: Path, documents: int) -> tuple[float, float]:
    """Bytes of the index of words a document, and seconds a question: 200 words each, drawn by Zipf's law."""
    rng, path = np.random.default_rng(0), folder / f"{documents}-{WORDS}"
    with Words(path) as index:
        for number in range(documents):
            drawn = rng.zipf(1.2, 200) % 100_000
            index.put(f"{number:015x}.kv", " ".join(f"w{word}" for word in drawn))
    return path.stat().st_size / documents, seconds(lambda: ranked(path, "w3 w17 w202 w4045"))


def looked_at(folder: Path, files: int = 10_000) -> float:
    """Seconds until a worker knows of one store whether it is there, of files that the system remembers."""
    names = [str(folder / f"{number}.kv") for number in range(files)]
    for name in names:
        Path(name).touch()
    return seconds(lambda: list(map(os.path.exists, names))) / files


def chosen(parts: int) -> tuple[float, float]:
    """Seconds to choose one of so many parts for a worker, of four questions' parts a store, until none is
    left, and bytes that a worker is told of a store.
    """
    tasks = [Part(NAME.format(number // 4), ("?",)) for number in range(parts)]
    here = frozenset(task.store for task in tasks)

    def choose_all() -> None:
        waiting = Nearest(tasks)
        worker = waiting.known(here)
        while waiting.take(worker, None) is not None:
            pass

    return seconds(choose_all) / parts, len(pickle.dumps(tuple(here))) / len(here)


class Nothing:
    """A worker that does nothing: what is left is what a task costs the process that hands it out."""

    def __init__(self, how: object) -> None:
        """Nothing is told."""

    def load(self) -> None:
        """Nothing is loaded."""

    def do(self, task: object) -> bool:
        """Done."""
        return True

    def standing(self) -> tuple[int, int]:
        """As `pool.Worker`."""
        return 0, 0


def handed_over(tasks: int = 500) -> float:
    """Seconds that a task costs through Ray, on a cluster of this machine with two workers."""
    ray = installed("--ray")
    with connected(ray, "ray"):
        pool = Pool(ray, Nothing, None, 2, {"num_cpus": 1})
        results = pool.run([*range(tasks + 50)], lambda standing: None)
        for _ in range(50):  # until both have started
            next(results)
        began = time.perf_counter()
        return sum(1 for _ in results) and (time.perf_counter() - began) / tasks


def handed_out(machines: int, each: float, parts: int = 20_000) -> float:
    """Share of their time that so many machines answer, where one process needs `each` seconds to hand a part
    out and takes `ANSWER_S` (lognormal) to be answered.
    """
    rng = np.random.default_rng(0)
    times = ANSWER_S * rng.lognormal(0, 0.3, parts)
    free = [0.0] * machines
    clock = 0.0
    for took in times:
        clock = max(clock, heapq.heappop(free)) + each
        heapq.heappush(free, clock + took)
    return float(times.sum() / (machines * max(free)))


def lines(with_ray: bool, folder: Path) -> Iterator[str]:
    """What was measured, and what it comes to."""
    shard = DOCUMENTS // MACHINES
    for documents in (1_000, 10_000):
        size, ask = words(folder, documents)
        yield f"words of {documents:,} documents: {size:,.0f} bytes each, a question in {1000 * ask:.1f} ms"
    yield (
        f"  {shard:,} on a machine: {size * shard / 1e9:.2f} GB, {ask * shard / documents:.2f} s; "
        f"all in one index: {size * DOCUMENTS / 1e9:,.0f} GB, {ask * DOCUMENTS / documents:,.0f} s"
    )
    look = looked_at(folder)
    yield (
        f"looking whether a store is there: {1e6 * look:.1f} µs; {shard:,} in {look * shard:.1f} s, "
        f"all in {look * DOCUMENTS:,.0f} s"
    )
    costs = {}
    for parts in (300, 3_000, 30_000):
        costs[parts], told = chosen(parts)
        yield f"choosing one of {parts:,} parts: {1000 * costs[parts]:.4f} ms; {told:.0f} bytes a name"
    yield f"  names of all stores, told to each worker: {told * DOCUMENTS / 1e9:.1f} GB"
    over = handed_over() if with_ray else 0.001
    yield f"a task through Ray: {1000 * over:.2f} ms{'' if with_ray else ' (assumed)'}"
    for machines in (10, 100, 1_000):
        shares = ", ".join(f"{handed_out(machines, over + cost):.0%} with {n:,}" for n, cost in costs.items())
        yield f"  {machines:,} machines answer, of their time, with parts that wait: {shares}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ray", action="store_true", help="measure a task through Ray; else it is 1 ms")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for line in lines(given.ray, Path(folder)):
            print(line, flush=True)


if __name__ == "__main__":
    main()
