"""A graph of keys for queries that are not distributed as the keys are.

After RetrievalAttention (arXiv 2409.10516) and RoarGraph (arXiv 2408.08933): the exact neighbours of stored
queries are found; keys that share a query's list are linked (the bipartite graph of queries and keys,
projected to the keys); all other keys are inserted one by one, as into a navigable graph, so that (nearly)
every key can be reached. A search is best-first by inner product from the keys that stand in most lists.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from benchmarks.candidates.heaps import push, replace

Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]

ENTRIES = 32
_QUERIES = 64  # queries whose scores with all keys are in memory at once


class QueryGraph:
    """`degree` links a key at most; `neighbours` keys in each training query's list; `beam` of insertions.

    links: int32 `[N, degree]`, -1 where there are fewer. covered: keys that stand in a list.
    """

    def __init__(
        self, keys: Float32, queries: Float32, degree: int = 32, neighbours: int = 100, beam: int = 64
    ) -> None:
        self.keys = keys
        lists = nearest(keys, queries, neighbours)
        self.links, appearances = project(keys, lists, degree)
        self.covered = int((appearances > 0).sum())
        self.entries = np.argsort(-appearances, kind="stable")[:ENTRIES].astype(np.int32)
        _insert(keys, _half_norms(keys), self.links, np.flatnonzero(appearances == 0), self.entries, beam)

    def search(self, queries: Float32, k: int, beam: int) -> tuple[npt.NDArray[np.int64], float]:
        """Ids `[G, k]`, -1 where a walk found fewer, and the mean number of keys that a query met."""
        ids = np.empty((len(queries), k), np.int64)
        met = _search(self.keys, self.links, queries, self.entries, max(k, beam), ids)
        return ids, met / len(queries)

    @property
    def nbytes(self) -> int:
        """Bytes of memory held beyond the keys."""
        return self.links.nbytes + self.entries.nbytes


def nearest(keys: Float32, queries: Float32, count: int) -> Int32:
    """The `count` keys of the largest inner products with each of `queries [M, D]`, best first."""
    count = min(count, len(keys))
    lists = np.empty((len(queries), count), np.int32)
    for first in range(0, len(queries), _QUERIES):
        scores = queries[first : first + _QUERIES] @ keys.T
        best = np.argpartition(scores, -count, axis=1)[:, -count:]
        order = np.argsort(-np.take_along_axis(scores, best, 1), axis=1, kind="stable")
        lists[first : first + _QUERIES] = np.take_along_axis(best, order, 1)
    return lists


def project(keys: Float32, lists: Int32, degree: int) -> tuple[Int32, npt.NDArray[np.int64]]:
    """Links `[N, degree]` of the keys in `lists [M, L]`, and in how many lists each key stands.

    A key's candidates are all that share a list with it, the nearest (Euclidean) first. One is passed over
    while it is nearer to a key already linked than to the key itself; those that were passed over fill what
    is left of the degree.
    """
    appearances = np.bincount(lists.ravel(), minlength=len(keys))
    starts = np.concatenate([[0], np.cumsum(appearances)])
    holders = np.argsort(lists.ravel(), kind="stable") // lists.shape[1]
    links = np.full((len(keys), degree), -1, np.int32)
    _project(keys, _half_norms(keys), lists, starts, holders, links)
    return links, appearances


def _half_norms(keys: Float32) -> Float32:
    halves: Float32 = 0.5 * np.einsum("nd,nd->n", keys, keys)
    return halves


@njit(nogil=True, cache=True, fastmath={"reassoc", "contract", "nsz"})
def _dot(a: Any, b: Any) -> Any:
    total = np.float32(0)
    for d in range(len(a)):
        total += a[d] * b[d]
    return total


@njit(nogil=True, cache=True)
def _choose(keys: Any, halves: Any, key: int, candidates: Any, closeness: Any, links: Any) -> None:
    """The candidates of a key to its `links [degree]`. closeness: a·b − |b|²/2, larger for the nearer."""
    order = np.argsort(-closeness)
    passed = np.empty(len(candidates), np.int32)
    count = others = 0
    for place in order:
        if count == len(links):
            break
        candidate = candidates[place]
        nearest = True
        for chosen in range(count):
            other = links[chosen]
            # |candidate - other| < |candidate - key|, with |candidate|² taken off both sides
            if (
                _dot(keys[candidate], keys[other]) - halves[other]
                > closeness[place] + halves[candidate] - halves[key]
            ):
                nearest = False
                break
        if nearest:
            links[count] = candidate
            count += 1
        else:
            passed[others] = candidate
            others += 1
    fill = min(others, len(links) - count)
    links[count : count + fill] = passed[:fill]
    links[count + fill :] = -1


@njit(nogil=True, cache=True)
def _project(keys: Any, halves: Any, lists: Any, starts: Any, holders: Any, links: Any) -> None:
    seen = np.full(len(keys), -1, np.int32)
    for key in range(len(keys)):
        own = holders[starts[key] : starts[key + 1]]
        if len(own) == 0:
            continue
        candidates = np.empty(len(own) * lists.shape[1], np.int32)
        closeness = np.empty(len(candidates), np.float32)
        seen[key], count = key, 0
        for holder in own:
            for other in lists[holder]:
                if seen[other] != key:
                    seen[other] = key
                    candidates[count] = other
                    closeness[count] = _dot(keys[key], keys[other]) - halves[other]
                    count += 1
        _choose(keys, halves, key, candidates[:count], closeness[:count], links[key])


@njit(nogil=True, cache=True)
def _walk(
    keys: Any,
    halves: Any,
    links: Any,
    query: Any,
    entries: Any,
    seen: Any,
    stamp: int,
    waiting: Any,
    found: Any,
) -> Any:
    """Best-first search by q·k − halves[k]; with no `halves`, by q·k. How many were found, and keys met.

    waiting: scores, negated, and ids of keys whose links are still to be followed. found: the best so far, as
    many as the beam is wide, the worst at the root.
    """
    ahead = kept = met = 0
    beam = len(found[0])
    shifted = len(halves) > 0
    for entry in entries:
        seen[entry] = stamp
        met += 1
        score = _dot(query, keys[entry]) - (halves[entry] if shifted else np.float32(0))
        push(waiting[0], waiting[1], ahead, -score, entry)
        ahead += 1
        if kept < beam:
            push(found[0], found[1], kept, score, entry)
            kept += 1
        elif score > found[0][0]:
            replace(found[0], found[1], beam, score, entry)
    while ahead:
        if kept == beam and -waiting[0][0] < found[0][0]:
            break
        key = waiting[1][0]
        ahead -= 1
        replace(waiting[0], waiting[1], ahead, waiting[0][ahead], waiting[1][ahead])
        for other in links[key]:
            if other < 0:
                break
            if seen[other] == stamp:
                continue
            seen[other] = stamp
            met += 1
            score = _dot(query, keys[other]) - (halves[other] if shifted else np.float32(0))
            if kept < beam:
                push(found[0], found[1], kept, score, other)
                kept += 1
            elif score > found[0][0]:
                replace(found[0], found[1], beam, score, other)
            else:
                continue
            push(waiting[0], waiting[1], ahead, -score, other)
            ahead += 1
    return kept, met


@njit(nogil=True, cache=True)
def _insert(keys: Any, halves: Any, links: Any, rest: Any, entries: Any, beam: int) -> None:
    """Each key of `rest` is linked to what a walk finds near it, and these back to it."""
    degree = links.shape[1]
    seen = np.full(len(keys), -1, np.int32)
    waiting = (np.empty(len(keys), np.float32), np.empty(len(keys), np.int32))
    found = (np.empty(beam, np.float32), np.empty(beam, np.int32))
    candidates, closeness = np.empty(degree + 1, np.int32), np.empty(degree + 1, np.float32)
    for stamp in range(len(rest)):
        key = rest[stamp]
        kept, _ = _walk(keys, halves, links, keys[key], entries, seen, stamp, waiting, found)
        _choose(keys, halves, key, found[1][:kept], found[0][:kept], links[key, : degree // 2])
        for other in links[key, : degree // 2]:
            if other < 0:
                break
            count = 0
            while count < degree and links[other, count] >= 0:
                candidates[count] = links[other, count]
                count += 1
            candidates[count] = key
            if count < degree:
                links[other, count] = key
                continue
            for place in range(degree + 1):
                one = candidates[place]
                closeness[place] = _dot(keys[other], keys[one]) - halves[one]
            _choose(keys, halves, other, candidates, closeness, links[other])


@njit(nogil=True, cache=True)
def _search(keys: Any, links: Any, queries: Any, entries: Any, beam: int, best: Any) -> int:
    seen = np.full(len(keys), -1, np.int32)
    waiting = (np.empty(len(keys), np.float32), np.empty(len(keys), np.int32))
    found = (np.empty(beam, np.float32), np.empty(beam, np.int32))
    no_halves = np.empty(0, np.float32)
    total = 0
    for g in range(len(queries)):
        kept, met = _walk(keys, no_halves, links, queries[g], entries, seen, g, waiting, found)
        total += met
        order = np.argsort(-found[0][:kept])
        for place in range(best.shape[1]):
            best[g, place] = found[1][order[place]] if place < kept else -1
    return total
