"""Bounds over pages in a tree, pruned exactly: Quest's page bounds (arXiv 2406.10774, §3.2) over 16 keys,
over 16 pages, and so on; a best-first branch and bound returns the exact top-k.

A node's bound is sum_d max(q_d·low_d, q_d·high_d), no smaller than any score below it. Best-first visits a
node only if its bound reaches the k-th best score: no exact search over these bounds can visit fewer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from benchmarks.candidates.heaps import push, replace

Float32 = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

FAN = 16  # keys in a page, and nodes below a node


@dataclass(frozen=True, eq=False)
class Visited:
    """Mean counts a query: keys that were scored, and nodes whose bounds were computed."""

    keys: float
    nodes: float


class PageTree:
    """Over `keys [N, D]` in the order given, or in that of `order [N]` (a permutation of their ids)."""

    def __init__(self, keys: Float32, order: Ids | None = None) -> None:
        self.order = np.arange(len(keys)) if order is None else order
        self.keys = keys if order is None else keys[order]
        low, high = self.keys, self.keys
        lows: list[Float32] = []
        highs: list[Float32] = []
        starts = [0]
        while len(low) > FAN or not lows:
            firsts = np.arange(0, len(low), FAN)
            low, high = np.minimum.reduceat(low, firsts, axis=0), np.maximum.reduceat(high, firsts, axis=0)
            lows.append(low)
            highs.append(high)
            starts.append(starts[-1] + len(low))
        self._low, self._high = np.concatenate(lows), np.concatenate(highs)
        self._starts = np.array(starts)

    @property
    def nodes(self) -> int:
        return len(self._low)

    def search(self, queries: Float32, k: int) -> tuple[Ids, Visited]:
        """The exact top-k `[G, k]` for each query, best first; 1 <= k <= N."""
        ids = np.empty((len(queries), k), np.int64)
        counts = np.zeros(2, np.int64)
        for query, row in zip(queries, ids, strict=True):
            _search(self.keys, self._low, self._high, self._starts, query, row, counts)
        return self.order[ids], Visited(*(counts / len(queries)))


def compact_order(keys: Float32) -> Ids:
    """An order in which pages are small boxes: halved again and again across the channel that spreads most
    (a k-d tree), in multiples of a page."""
    order = np.arange(len(keys))
    parts = [(0, len(keys))]
    while parts:
        first, last = parts.pop()
        if last - first <= FAN:
            continue
        half = first + max(FAN, (last - first) // 2 // FAN * FAN)
        own = keys[order[first:last]]
        channel = own[:, own.var(axis=0).argmax()]
        order[first:last] = order[first:last][np.argpartition(channel, half - first)]
        parts += [(first, half), (half, last)]
    return order


@njit(nogil=True, cache=True, fastmath={"reassoc", "contract", "nsz"})
def _bound(query: Any, low: Any, high: Any) -> Any:
    """The bound, raised by more than rounding can take off it or add to a score."""
    total, size = np.float32(0), np.float32(0)
    for d in range(len(query)):
        a, b = query[d] * low[d], query[d] * high[d]
        total += max(a, b)
        size += max(abs(a), abs(b))
    return total + size * np.float32(len(query) * 2.0**-22)


@njit(nogil=True, cache=True, fastmath={"reassoc", "contract", "nsz"})
def _dot(a: Any, b: Any) -> Any:
    total = np.float32(0)
    for d in range(len(a)):
        total += a[d] * b[d]
    return total


@njit(nogil=True, cache=True)
def _search(keys: Any, low: Any, high: Any, starts: Any, query: Any, best: Any, counts: Any) -> None:
    """Node j of level l is row `starts[l] + j`; the nodes (level 0: keys) 16 j to 16 j + 15 lie below it."""
    k, levels, length = len(best), len(starts) - 1, len(keys)
    scores, kept = np.full(k, -np.inf, np.float32), 0
    waiting, nodes = (
        np.empty(len(low), np.float32),
        np.empty(len(low), np.int64),
    )  # bounds negated: largest first
    count = 0
    for node in range(starts[levels - 1], starts[levels]):
        push(waiting, nodes, count, -_bound(query, low[node], high[node]), node)
        count += 1
    counts[1] += count
    while count:
        if kept == k and -waiting[0] < scores[0]:
            break
        node = nodes[0]
        count -= 1
        replace(waiting, nodes, count, waiting[count], nodes[count])
        level = 0
        while node >= starts[level + 1]:
            level += 1
        first = 16 * (node - starts[level])
        if level == 0:
            for key in range(first, min(first + 16, length)):
                score = _dot(query, keys[key])
                counts[0] += 1
                if kept < k:
                    push(scores, best, kept, score, key)
                    kept += 1
                elif score > scores[0]:
                    replace(scores, best, k, score, key)
        else:
            below = starts[level - 1]
            for child in range(below + first, min(below + first + 16, starts[level])):
                bound = _bound(query, low[child], high[child])
                counts[1] += 1
                if kept < k or bound >= scores[0]:
                    push(waiting, nodes, count, -bound, child)
                    count += 1
    best[:] = best[np.argsort(-scores)]
