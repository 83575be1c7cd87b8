"""Compiled search of one head's cells: bounds, a scan of the cells that may hold one of the best, exact
scores.

A cell's keys have the mean m and, channel by channel, the variance v. Their inner products with a query q
have the mean q·m and a standard deviation near sqrt(q²·v), so that few of them exceed q·m + d · sqrt(q²·v)
for a d of 3 or more. A row scans its best cells by that bound for a floor, then every other cell whose bound
reaches the floor: a query that attends to few keys reads few cells, one that attends to many reads many.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from indexes.dots import BLOCK, GROUP, QUERIES, dots, pack_queries
from indexes.prefetch import prefetch_row
from indexes.row_loops import dot_row
from indexes.scan import SINGLE, candidate, score_rows

STEP = 32  # blocks scored together; their sums stay in the first-level cache
FIRST = 4  # times the keys wanted, in the cells that set the first floor; as many times more in the next
TURNS = 3
_BUCKETS = 1024
_AHEAD = 8
_REASSOCIATE = {"reassoc", "contract", "nsz"}


@njit(nogil=True, cache=True)
def candidates_for(k: int) -> int:
    """How many keys are scored exactly to find the k best: a 4-bit score misplaces few by more."""
    return k + k // 4 + 64


@njit(nogil=True, cache=True)
def search_layer(
    starts: Any,
    counts: Any,
    means: Any,
    variances: Any,
    codes: Any,
    scales: Any,
    ids: Any,
    keys: Any,
    layout: int,
    queries: Any,
    k: int,
    deviations: Any,
    per_task: int,
    first: int,
    step: int,
    found: Any,
    scores: Any,
) -> None:
    """Every `step`-th of the tasks from `first`, a task being `per_task` rows of a head. Parts of the index
    and `keys` are tuples with an array for each head; queries `[H, R, D]`, found and scores `[H, R, k]`.
    """
    rows = queries.shape[1]
    parts = -(-rows // per_task)
    for task in range(first, len(queries) * parts, step):
        head, part = task // parts, task % parts
        own = slice(part * per_task, min((part + 1) * per_task, rows))
        search_rows(
            starts[head],
            counts[head],
            means[head],
            variances[head],
            codes[head],
            scales[head],
            ids[head],
            keys[head],
            layout,
            queries[head, own],
            k,
            deviations[head],
            found[head, own],
            scores[head, own],
        )


@njit(nogil=True, cache=True)
def search_rows(
    starts: Any,
    counts: Any,
    means: Any,
    variances: Any,
    codes: Any,
    scales: Any,
    ids: Any,
    keys: Any,
    layout: int,
    queries: Any,
    k: int,
    deviations: float,
    found: Any,
    scores: Any,
) -> None:
    """The k best of the keys for each of `queries [R, D]`, by descending score."""
    rows, dim = queries.shape
    cells, groups = len(counts), -(-dim // GROUP)
    fours = -(-rows // QUERIES)
    padded = np.zeros((fours * QUERIES, dim), np.float32)
    padded[:rows] = queries
    packed, unit, offset = _coded(padded, groups)
    near = np.empty((len(padded), cells), np.float32)
    score_rows(means, SINGLE, padded, near)
    upper = np.empty((len(padded), cells), np.float32)
    score_rows(variances, SINGLE, padded * padded, upper)
    _reach(near, upper, np.float32(deviations))

    wanted = candidates_for(k)
    capacity = (FIRST + 1) * wanted + 2 * STEP * BLOCK
    best = np.empty((rows, capacity), np.float32)
    places = np.empty((rows, capacity), np.int32)
    fill = np.zeros(rows, np.int64)
    floor = np.full(rows, -np.inf, np.float32)
    asked = np.zeros((rows, cells), np.bool_)
    scanned = np.zeros((rows, cells), np.bool_)
    sums = np.empty((STEP, QUERIES, BLOCK), np.int32)
    line = np.empty(BLOCK, np.float32)
    for turn in range(TURNS):
        for r in range(rows):
            entry = floor[r]
            if turn < TURNS - 1:
                entry = max(entry, _bound_of_first(upper[r], counts, FIRST ** (turn + 1) * wanted))
            for c in range(cells):
                asked[r, c] = upper[r, c] >= entry and not scanned[r, c]
                scanned[r, c] |= asked[r, c]
        for c in range(cells):
            for four in range(fours):
                start = four * QUERIES
                end = min(start + QUERIES, rows)
                if not asked[start:end, c].any():
                    continue
                for block in range(starts[c], starts[c + 1], STEP):
                    count = min(STEP, starts[c + 1] - block)
                    dots(codes, block, count, groups, packed[four], sums)
                    own = slice(block * BLOCK, (block + count) * BLOCK)
                    for r in range(start, end):
                        if not asked[r, c]:
                            continue
                        if fill[r] + STEP * BLOCK > capacity:
                            fill[r], floor[r] = _shrink(best[r], places[r], fill[r], wanted)
                        fill[r] = _keep(
                            sums,
                            r - start,
                            count,
                            scales[own],
                            ids[own],
                            near[r, c],
                            unit[r],
                            offset[r],
                            floor[r],
                            line,
                            best[r],
                            places[r],
                            fill[r],
                        )
        for r in range(rows):
            if fill[r] > wanted:
                fill[r], floor[r] = _shrink(best[r], places[r], fill[r], wanted)
    for r in range(rows):
        _exact(keys, layout, queries[r], places[r, : fill[r]], best[r])
        _sort(best[r, : fill[r]], places[r, : fill[r]], found[r], scores[r])


@njit(nogil=True, cache=True)
def _coded(queries: Any, groups: int) -> Any:
    """Queries as 8-bit codes, packed by fours, with the unit and, in units, what codes of 8 (zero) add."""
    rows, dim = queries.shape
    packed = np.zeros((rows // QUERIES, groups, 2, QUERIES, 4), np.int8)
    unit, offset = np.empty(rows, np.float32), np.empty(rows, np.float32)
    codes = np.empty(queries.shape, np.int8)
    for r in range(rows):
        largest = np.float32(0)
        for d in range(dim):
            largest = max(largest, abs(queries[r, d]))
        unit[r] = largest / np.float32(127)
        total = np.int32(0)
        for d in range(dim):
            code = np.int8(np.rint(queries[r, d] / unit[r])) if unit[r] > 0 else np.int8(0)
            codes[r, d] = code
            total += np.int32(code)
        offset[r] = 8 * total
    for four in range(len(packed)):
        pack_queries(codes[four * QUERIES : (four + 1) * QUERIES], packed[four])
    return packed, unit, offset


@njit(nogil=True, cache=True, fastmath=_REASSOCIATE)
def _reach(near: Any, upper: Any, deviations: Any) -> None:
    """Turns variances of inner products into upper bounds."""
    for r in range(len(near)):
        for c in range(near.shape[1]):
            upper[r, c] = near[r, c] + deviations * np.sqrt(max(upper[r, c], np.float32(0)))


@njit(nogil=True, cache=True)
def _bound_of_first(upper: Any, counts: Any, keys: int) -> Any:
    """About the largest bound that cells with `keys` keys reach."""
    low, high = upper.min(), upper.max()
    for _ in range(16):
        middle = np.float32(0.5) * (low + high)
        held = 0
        for c in range(len(upper)):
            held += counts[c] if upper[c] >= middle else 0
        if held >= keys:
            low = middle
        else:
            high = middle
    return low


@njit(nogil=True, cache=True, fastmath={*_REASSOCIATE, "nnan"})
def _keep(
    sums: Any,
    q: int,
    count: int,
    scales: Any,
    ids: Any,
    near: Any,
    unit: Any,
    offset: Any,
    floor: Any,
    line: Any,
    best: Any,
    places: Any,
    fill: int,
) -> int:
    """Appends the keys of `count` blocks that score above the floor; returns how many there are then."""
    for b in range(count):
        start, highest = b * BLOCK, floor
        for j in range(BLOCK):
            line[j] = near + (np.float32(sums[b, q, j]) - offset) * (scales[start + j] * unit)
            highest = max(highest, line[j])
        if highest > floor:
            for j in range(BLOCK):  # written first and counted then: a branch would be guessed wrong
                best[fill], places[fill] = line[j], ids[start + j]
                fill += int(line[j] > floor) & int(ids[start + j] >= 0)
    return fill


@njit(nogil=True, cache=True)
def _shrink(best: Any, places: Any, fill: int, wanted: int) -> Any:
    """Keeps the `wanted` largest of more: exactly so many, the last of them to 1/1024 of the range. Returns
    how many, and the smallest score kept.
    """
    low, high = best[0], best[0]
    for i in range(fill):
        low, high = min(low, best[i]), max(high, best[i])
    width = np.float32(_BUCKETS) / (high - low) if high > low else np.float32(0)
    held = np.zeros(_BUCKETS, np.int64)
    for i in range(fill):
        held[min(int((best[i] - low) * width), _BUCKETS - 1)] += 1
    last, room = _BUCKETS - 1, wanted
    while held[last] < room:
        room -= held[last]
        last -= 1
    kept, floor = 0, high
    for i in range(fill):
        score = best[i]
        bucket = min(int((score - low) * width), _BUCKETS - 1)
        room -= int(bucket == last)
        keep = int(bucket > last) | (int(bucket == last) & int(room >= 0))
        best[kept], places[kept] = score, places[i]
        floor = min(floor, score) if keep else floor
        kept += keep
    return kept, floor


@njit(nogil=True, cache=True, fastmath=_REASSOCIATE)
def _exact(keys: Any, layout: int, query: Any, places: Any, scores: Any) -> None:
    """Inner products with the stored keys themselves."""
    for i in range(len(places)):
        prefetch_row(keys, places[min(i + _AHEAD, len(places) - 1)])
        scores[i] = dot_row(query, keys, layout, places[i])


@njit(nogil=True, cache=True)
def _sort(best: Any, places: Any, found: Any, scores: Any) -> None:
    """The best of all candidates in order: of equal scores the lower id comes first."""
    candidates = np.empty(len(best), np.uint64)
    order = np.empty(len(best), np.int64)
    for i in range(len(best)):
        candidates[i] = candidate(best[i], places[i])
    order = np.argsort(candidates)
    for j in range(len(found)):
        i = order[len(order) - 1 - j]
        scores[j] = best[i]
        found[j] = places[i]
