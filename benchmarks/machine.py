"""What this machine's memory moves, measured in a second or two by loops that do nothing else.

These are the bounds that any code meets: reading in order, reading rows of 256 bytes (a key of 128 halves)
from random places, and copying.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from offload_decode.common.memory import total_memory
from offload_decode.common.rows.loops import prefetch_row
from offload_decode.models.made_with import cpu_name

BYTES = 512 << 20  # far beyond the caches
ROW = 256
AHEAD = 16  # rows that are asked for before their turn
_SECONDS = 0.4  # a measurement is repeated for so long, and the best counts
_PACKAGES = ("numpy", "torch", "numba", "faiss-cpu", "faiss-gpu", "hnswlib", "transformers", "zarr")

Words = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Machine:
    """Bytes a second. `read_one`, `read`: in order, by one thread and by all (or by one, where that is more:
    others may be using the machine). `gather_one`, `gather`: rows of 256 bytes from random places. `copy`:
    read and written together, by all threads.
    """

    cpu: str
    cores: int
    memory: int
    read_one: float
    read: float
    gather_one: float
    gather: float
    copy: float

    def lines(self) -> str:
        """For people, in GB/s."""
        gather = f"rows of {ROW} bytes from random places"
        return (
            f"{self.cpu}, {self.cores} cores, {self.memory / 2**30:.0f} GiB. GB/s with one and all threads: "
            f"in order {self.read_one / 1e9:.1f}, {self.read / 1e9:.1f}; {gather} "
            f"{self.gather_one / 1e9:.1f}, {self.gather / 1e9:.1f}; copied (read and written) "
            f"{self.copy / 1e9:.1f}."
        )


def measure(size: int = BYTES) -> Machine:
    """This machine, measured over `size` bytes."""
    cores = os.cpu_count() or 1
    words: Words = np.ones(size // 8, np.uint64)
    parts = np.array_split(words, cores)
    rows = words[: len(words) // (ROW // 8) * (ROW // 8)].reshape(-1, ROW // 8)
    places = np.random.default_rng(0).permutation(len(rows))
    shares = np.array_split(places, cores)
    half = len(words) // 2
    sources, targets = np.array_split(words[:half], cores), np.array_split(words[half : 2 * half], cores)
    with ThreadPoolExecutor(cores) as pool:

        def spread(work: Callable[..., object], *arguments: list[Any]) -> Callable[[], object]:
            return lambda: list(pool.map(work, *arguments))

        read_one = _rate(parts[0].nbytes, lambda: _sum(parts[0]))
        gather_one = _rate(len(shares[0]) * ROW, lambda: _gather(rows, shares[0]))
        return Machine(
            cpu=cpu_name(),
            cores=cores,
            memory=total_memory(),
            read_one=read_one,
            read=max(read_one, _rate(words.nbytes, spread(_sum, parts))),
            gather_one=gather_one,
            gather=max(gather_one, _rate(rows.nbytes, spread(lambda own: _gather(rows, own), shares))),
            copy=_rate(16 * half, spread(np.copyto, targets, sources)),
        )


def made_with(machine: Machine) -> dict[str, Any]:
    """What a benchmark ran on: the machine, its measured bandwidths, and the versions that matter."""
    return {"machine": asdict(machine), "versions": versions()}


def versions() -> dict[str, str]:
    """Of Python and of the packages that are installed."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _rate(size: int, move: Callable[[], object]) -> float:
    move()  # compiles, and touches every page
    best, until = float("inf"), time.perf_counter() + _SECONDS
    while best == float("inf") or time.perf_counter() < until:
        began = time.perf_counter()
        move()
        best = min(best, time.perf_counter() - began)
    return size / best


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
