"""How long something takes: after a warm-up, from cold caches, the median of many."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

FLUSH_BYTES = 128 << 20  # a layer's keys are not in the caches when its turn comes again: 31 others were read


@dataclass(frozen=True)
class Timing:
    """Seconds: the median, the extremes, and how many there were."""

    median: float
    lowest: float
    highest: float
    repetitions: int


def timed(
    work: Callable[[int], object],
    *,
    repetitions: int = 15,
    seconds: float = 2.0,
    warm_up: int = 2,
    cold: bool = True,
) -> Timing:
    """`work(turn)` for turns 0, 1, … after `warm_up` of them: at least 3 times, at most `repetitions`, and no
    new one after `seconds`. With `cold`, other memory is read before every turn, outside the time.
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
    return Timing(statistics.median(taken), min(taken), max(taken), len(taken))


def flush() -> None:
    """Reads memory of no one else's interest, so that nothing that was read before is still in a cache."""
    _elsewhere().sum()


@cache
def _elsewhere() -> npt.NDArray[Any]:
    return np.ones(FLUSH_BYTES // 8, np.uint64)
