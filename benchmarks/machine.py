"""What this machine's memory moves, measured in a second or two by loops that do nothing else, and how long
something takes: after a warm-up, from cold caches, the median of many.

The rates are the bounds that any code meets: reading in order, and reading rows of 256 bytes (a key of 128
halves) from random places.
"""

import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from offload_decode.common.memory import total_memory
from offload_decode.common.rows.loops import prefetch_row
from offload_decode.models.made_with import cpu_name

BYTES = 512 << 20  # far beyond the caches
ROW = 256
AHEAD = 16  # rows that are fetched before their turn
FLUSH_BYTES = 128 << 20  # a layer's keys are not in the caches when its turn comes again: 31 others were read
_SECONDS = 0.4  # a measurement is repeated for so long, and the best counts

Words = npt.NDArray[np.uint64]


def timed(
    work: Callable[[int], object],
    *,
    repetitions: int = 15,
    seconds: float = 2.0,
    warm_up: int = 2,
    cold: bool = True,
) -> list[float]:
    """Seconds of `work(turn)` for turns 0, 1, … after `warm_up` of them: at least 3 times, at most
    `repetitions`, and no new one after `seconds`. With `cold`, other memory is read before every turn,
    outside the time.
    """
    for turn in range(warm_up):
        work(turn)
    taken: list[float] = []
    until = time.perf_counter() + seconds
    while len(taken) < 3 or (len(taken) < repetitions and time.perf_counter() < until):
        if cold:
            flush()
        began = time.perf_counter()
        work(warm_up + len(taken))
        taken.append(time.perf_counter() - began)
    return taken


def flush() -> None:
    """Reads memory of no one else's interest, so that nothing that was read before is still in a cache."""
    _elsewhere().sum()


@cache
def _elsewhere() -> Words:
    return np.ones(FLUSH_BYTES // 8, np.uint64)


@dataclass(frozen=True)
class Machine:
    """Bytes a second, by all threads. `read`: in order; `gather`: rows of 256 bytes from random places."""

    cpu: str
    cores: int
    memory: int
    read: float
    gather: float

    def lines(self) -> str:
        """For people, in GB/s."""
        return (
            f"{self.cpu}, {self.cores} cores, {self.memory / 2**30:.0f} GiB. GB/s: in order "
            f"{self.read / 1e9:.1f}; rows of {ROW} bytes from random places {self.gather / 1e9:.1f}."
        )


def measure(quick: bool = False) -> Machine:
    """This machine; with `quick` from its caches, to see that everything runs."""
    cores = os.cpu_count() or 1
    words: Words = np.ones((1 << 22 if quick else BYTES) // 8, np.uint64)
    parts = np.array_split(words, cores)
    rows = words.reshape(-1, ROW // 8)
    shares = np.array_split(np.random.default_rng(0).permutation(len(rows)), cores)
    with ThreadPoolExecutor(cores) as pool:
        read = _rate(words.nbytes, lambda: list(pool.map(_sum, parts)))
        gather = _rate(rows.nbytes, lambda: list(pool.map(lambda share: _gather(rows, share), shares)))
    return Machine(cpu_name(), cores, total_memory(), read, gather)


def _rate(size: int, move: Callable[[], object]) -> float:
    """Bytes a second, at best. The first move compiles, and touches every page."""
    return size / min(
        timed(lambda _: move(), repetitions=sys.maxsize, seconds=_SECONDS, warm_up=1, cold=False)
    )


@njit(nogil=True, cache=True)
def _sum(words: Any) -> Any:
    total = np.uint64(0)
    for place in range(len(words)):
        total += words[place]
    return total


@njit(nogil=True, cache=True)
def _gather(rows: Any, places: Any) -> Any:
    total = np.uint64(0)
    for turn in range(len(places)):
        prefetch_row(rows, places[min(turn + AHEAD, len(places) - 1)])
        for word in range(rows.shape[1]):
            total += rows[places[turn], word]
    return total
