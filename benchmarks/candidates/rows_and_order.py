"""Leads that the search does not follow: `python -m benchmarks.candidates.rows_and_order`.

Rows of a head's keys and values, in 16 bits, fetched a few rows ahead: all keys that a step scores exactly,
then the values of those that it attends to, from two arrays or from one in which they stand beside each
other, each in plain pages and in huge ones. And a row's candidates in order, or the best of them without. One
thread, the smallest of several turns; what the caches hold when a turn begins was read a whole turn before.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from benchmarks.machine import AHEAD
from benchmarks.tables import table
from indexes.pruned_scan import candidates_for
from indexes.rows.ordering import keep_largest, sort
from indexes.rows.prefetch import prefetch_row

TOKENS, WIDTH = 1 << 20, 32  # words of 64 bits a row: 128 halves
ROUNDS, TURNS = 64, 7

Words = npt.NDArray[np.uint64]


def pages(rows: int, words: int, huge: bool) -> Words:
    """Written memory, in pages of 2 MiB where the system gives them."""
    memory = mmap.mmap(-1, rows * words * 8 + (2 << 20))
    memory.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    start = -np.frombuffer(memory, np.uint8).ctypes.data % (2 << 20)
    found = np.frombuffer(memory, np.uint64, rows * words, start).reshape(rows, words)
    found[:] = 1
    return found


@njit(nogil=True)
def read(rows: Any, places: Any, first: int, last: int) -> Any:
    """The sum of the words `first` to `last` of rows, fetched some rows ahead."""
    total = np.uint64(0)
    for i in range(len(places)):
        prefetch_row(rows[:, first:last], places[min(i + AHEAD, len(places) - 1)])
        for word in range(first, last):
            total += rows[places[i], word]
    return total


@njit(nogil=True)
def ordered(scores: Any, ids: Any, found: Any, best: Any) -> None:
    for _ in range(ROUNDS):
        sort(scores, ids, found, best)


@njit(nogil=True)
def unordered(scores: Any, ids: Any, k: int, room: Any, places: Any) -> None:
    for _ in range(ROUNDS):
        room[:], places[:] = scores, ids
        keep_largest(room, places, len(room), k)


def microseconds(work: Callable[[int], object]) -> float:
    """Processor time of a call, the smallest of some turns: each is given its number."""
    work(0)
    times = []
    for turn in range(TURNS):
        began = time.thread_time()
        work(turn)
        times.append(time.thread_time() - began)
    return 1e6 * min(times)


def fetched(k: int, huge: bool, beside: bool) -> float:
    """Nanoseconds a token attended to, its share of the keys that were scored for it included."""
    rng, wanted = np.random.default_rng(0), candidates_for(k)
    keys = pages(TOKENS, 2 * WIDTH if beside else WIDTH, huge)
    values = keys if beside else pages(TOKENS, WIDTH, huge)
    drawn = rng.integers(0, TOKENS, (TURNS, ROUNDS, wanted))
    kept = drawn[:, :, rng.permutation(wanted)[:k]]

    def turn(number: int) -> None:
        for scored, chosen in zip(drawn[number], kept[number], strict=True):
            read(keys, scored, 0, WIDTH)
            read(values, chosen, values.shape[1] - WIDTH, values.shape[1])

    return 1e3 * microseconds(turn) / ROUNDS / k


def main() -> None:
    lines = []
    for k in (64, 1024, 2621):
        rng, wanted = np.random.default_rng(0), candidates_for(k)
        scores, ids = (
            6 + rng.standard_normal(wanted, np.float32),
            rng.permutation(TOKENS)[:wanted].astype("i4"),
        )
        found, best, room, places = np.empty(k, np.int64), np.empty(k, np.float32), scores.copy(), ids.copy()
        rows = [f"{fetched(k, huge, beside):.0f}" for huge in (False, True) for beside in (False, True)]
        in_order = microseconds(lambda _: ordered(scores, ids, found, best)) / ROUNDS  # noqa: B023
        without = microseconds(lambda _: unordered(scores, ids, k, room, places)) / ROUNDS  # noqa: B023
        lines.append([f"{k:,}", *rows, f"{in_order:.1f}", f"{without:.1f}"])
    heads = ["k", "two arrays, ns a token", "beside each other", "two, huge pages", "beside, huge pages"]
    print(table([*heads, "in order, µs a row", "without"], lines))


if __name__ == "__main__":
    main()
