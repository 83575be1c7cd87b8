"""Compiled scan of cells: keys whose codes score above a query's threshold are scored exactly."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import njit, types

from offload_decode.common.rows.arrays import Float32
from offload_decode.common.rows.compiled import intrinsic
from offload_decode.common.rows.loops import dot_row, prefetch_row
from offload_decode.common.rows.top_k import keep_largest
from offload_decode.indexes.clusters.dot4 import BLOCK, GROUP, QUERIES, scored

STEP = 32  # blocks scored together; their sums stay in the first-level cache
STEP_BYTES = 24 * STEP * BLOCK * QUERIES  # of what a step finds


@intrinsic
def lowest(_: Any, word: Any) -> Any:
    """The place of the lowest bit of a word that has one: `lowest(word)`."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return builder.cttz(given[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), generate


class Candidates(NamedTuple):
    """What may be best: scores float32 and ids int32 `[R, room]`, `fill [R]` are there, `seen [R]` came."""

    scores: Float32
    ids: npt.NDArray[np.int32]
    fill: npt.NDArray[np.int64]
    seen: npt.NDArray[np.int64]


@njit(nogil=True, cache=True)
def scan_asked(
    cells: Any,
    keys: Any,
    queries: Any,
    coded: Any,
    near: Any,
    thresholds: Any,
    asked: Any,
    listed: Any,
    candidates: Any,
) -> None:
    """The keys of the cells `listed` that were `asked [R, C]` for and score above their row's threshold, to
    its candidates. What one step finds is fetched while the next one is scanned, and scored then.
    """
    rows, starts = len(queries), cells.starts
    words, unit, offset = coded
    packed, of = np.zeros((words.shape[1], QUERIES), np.int32), np.full(QUERIES, -1, np.int64)
    terms = np.zeros((4, QUERIES), np.float32)
    lines, masks = np.empty((STEP, QUERIES, BLOCK), np.float32), np.empty((STEP, QUERIES), np.uint16)
    waiting = np.empty((2, STEP * BLOCK * QUERIES, 2), np.int32)
    exact = np.empty(STEP * BLOCK * QUERIES, np.float32)
    count, side, asking = 0, 0, np.empty(rows, np.int64)
    for place in range(len(listed)):
        c, after = listed[place], starts[listed[min(place + 1, len(listed) - 1)]]
        asked_by = 0
        for r in range(rows):
            asking[asked_by] = r
            asked_by += int(asked[r, c])
        for first in range(0, asked_by, QUERIES):
            four = asking[first : min(first + QUERIES, asked_by)]
            terms[3] = np.inf  # missing queries find nothing
            for q in range(len(four)):
                r = four[q]
                terms[0, q], terms[1, q] = near[r, c], unit[r]
                terms[2, q], terms[3, q] = offset[r], thresholds[r]
                if of[q] != r:
                    packed[:, q] = words[r]
                    of[q] = r
            for block in range(starts[c], starts[c + 1], STEP):
                size = min(STEP, starts[c + 1] - block)
                ahead, groups = min(after, starts[-1] - size), words.shape[1] // 2
                scored(cells.codes, cells.scales, block, size, ahead, groups, packed, terms, lines, masks)
                more = _keep(masks, size, cells.ids[block * BLOCK :], four, keys.bits, waiting[side])
                side = 1 - side
                _score(keys, queries, waiting[side, :count], exact)
                _take(waiting[side, :count], exact, candidates)
                count = more
    _score(keys, queries, waiting[1 - side, :count], exact)
    _take(waiting[1 - side, :count], exact, candidates)


@njit(nogil=True, cache=True)
def _keep(masks: Any, count: int, ids: Any, rows: Any, keys: Any, waiting: Any) -> int:
    """Writes keys above their rows' thresholds as pairs of row and id, and fetches them; returns how many."""
    fill = 0
    together = masks.view(np.uint64)  # the bits of four queries
    for b in range(count):
        left = together[b, 0]
        while left:
            bit = lowest(left)
            left &= left - np.uint64(1)
            key = ids[b * BLOCK + bit % BLOCK]
            prefetch_row(keys, key)
            waiting[fill, 0], waiting[fill, 1] = rows[bit // BLOCK], key
            fill += int(key >= 0)
    return fill


@njit(nogil=True, cache=True)
def _score(keys: Any, queries: Any, waiting: Any, scores: Any) -> None:
    bits, layout = keys
    for i in range(len(waiting)):
        scores[i] = dot_row(queries[waiting[i, 0]], bits, layout, waiting[i, 1])


@njit(nogil=True, cache=True)
def _take(waiting: Any, exact: Any, candidates: Any) -> None:
    """Adds what was scored to the candidates; of a row without room the better half stays."""
    scores, ids, fill, seen = candidates
    room = scores.shape[1]
    for i in range(len(waiting)):
        row = waiting[i, 0]
        if fill[row] == room:
            fill[row] = keep_largest(scores[row], ids[row], room, room // 2)
        scores[row, fill[row]], ids[row, fill[row]] = exact[i], waiting[i, 1]
        fill[row] += 1
        seen[row] += 1


@njit(nogil=True, cache=True)
def coded(queries: Any, groups: int) -> Any:
    """Queries as 8-bit codes, int32 `[R, 2 · groups]`, their unit, and what codes of 8 (zero) add."""
    rows, dim = queries.shape
    codes = np.zeros((rows, groups * GROUP), np.int8)
    unit, offset = np.empty(rows, np.float32), np.empty(rows, np.float32)
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
    return codes.view(np.int32), unit, offset
