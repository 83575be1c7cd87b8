"""Compiled search of one head's cells: bounds, a scan of the cells that may hold one of the best, exact
scores.

A cell's keys have the mean m and, channel by channel, the variance v. Their inner products with a query q
have the mean q·m and a standard deviation near sqrt(q²·v), so that few of them exceed q·m + d · sqrt(q²·v)
for a d of 3 or more. A row scans its best cells by that bound for a floor, then every other cell whose bound
reaches the floor: a query that attends to few keys reads few cells, one that attends to many reads many.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import carray, njit, types  # type: ignore[attr-defined]
from numba.core import cgutils
from numba.extending import intrinsic

from indexes.cells import Cells
from indexes.dots import BLOCK, GROUP, QUERIES, WORD, pack_queries, scored
from indexes.keys import Float32
from indexes.rows.loops import dot_row
from indexes.rows.prefetch import prefetch_row
from indexes.rows.scan import SINGLE, candidate, ordered, score_and_row, score_rows

STEP = 32  # blocks scored together; their sums stay in the first-level cache
FIRST = 4  # times the keys wanted, in the cells that set the first floor; as many times more in the next
TURNS = 3
_DIGIT = 11  # bits of a score that are looked at together
_MASK = (1 << _DIGIT) - 1
_AHEAD = 8  # keys that are fetched before their turn
_REASSOCIATE = {"reassoc", "contract", "nsz"}
_BITS: Any = np.uint32  # of float32, as loops over rows take them


def candidates_for(k: int) -> int:
    """How many keys are scored exactly to find the k best: a 4-bit score misplaces few by more."""
    return k + k // 4 + 64


_candidates_for = njit(nogil=True, cache=True)(candidates_for)


def _pointer(_: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return builder.inttoptr(given[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


_at: Any = intrinsic(_pointer)


class Heads(NamedTuple):
    """The H heads of a layer, so that one function is compiled for any number of them.

    parts: int64 `[H, 8]`, the addresses of what `Cells` has and of the keys' bits. sizes: int64 `[H, 3]`, the
    numbers of cells, blocks and keys. deviations: float32 `[H]`. like: an array of the kind of the keys'
    bits; layout: that of the bits.
    """

    parts: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    deviations: Float32
    like: npt.NDArray[Any]
    layout: int


class Share(NamedTuple):
    """Every `step`-th task from `first`: what one thread does. A task is `rows` rows of one head."""

    rows: int
    first: int
    step: int


class Stored(NamedTuple):
    """The keys of one head: their `bits` in rows, and the `layout` of these."""

    bits: npt.NDArray[Any]
    layout: int


class Best(NamedTuple):
    """What was found for some rows: ids int64 `[..., R, k]` and scores float32 `[..., R, k]`."""

    ids: npt.NDArray[np.int64]
    scores: Float32


@njit(nogil=True, cache=True)
def search_layer(heads: Any, queries: Any, k: int, share: Any, best: Any) -> None:
    """A share of the tasks: the k best keys of every head for its `queries [H, R, D]`, to `best`."""
    rows, dim = queries.shape[1:]
    tasks = -(-rows // share.rows)
    for task in range(share.first, len(queries) * tasks, share.step):
        head, part = task // tasks, task % tasks
        own = slice(part * share.rows, min((part + 1) * share.rows, rows))
        address = heads.parts[head]
        count, blocks, keys = heads.sizes[head, 0], heads.sizes[head, 1], heads.sizes[head, 2]
        cells = Cells(
            carray(_at(address[0]), (count + 1,), np.int64),
            carray(_at(address[1]), (count,), np.int32),
            carray(_at(address[2]), (count, dim), _BITS),
            carray(_at(address[3]), (count, dim), _BITS),
            carray(_at(address[4]), (blocks * -(-dim // GROUP) * WORD,), np.uint8),
            carray(_at(address[5]), (blocks * BLOCK,), np.float32),
            carray(_at(address[6]), (blocks * BLOCK,), np.int32),
        )
        bits = carray(_at(address[7]), (keys, heads.like.shape[1]), heads.like.dtype)
        search_rows(
            cells,
            Stored(bits, heads.layout),
            queries[head, own],
            k,
            heads.deviations[head],
            Best(best.ids[head, own], best.scores[head, own]),
        )


@njit(nogil=True, cache=True)
def search_rows(cells: Any, keys: Any, queries: Any, k: int, deviations: float, found: Any) -> None:
    """The k best of the keys for each of `queries [R, D]`, by descending score. Moments in `cells` come as
    their bits.
    """
    rows, dim = queries.shape
    starts, counts = cells.starts, cells.counts
    count, groups = len(counts), -(-dim // GROUP)
    fours = -(-rows // QUERIES)
    padded = np.zeros((fours * QUERIES, dim), np.float32)
    for r in range(rows):  # of a size that can be squared; what is exact is scored with the query itself
        padded[r] = queries[r] / max(np.abs(queries[r]).max(), np.float32(1e-38))
    packed, unit, offset = _coded(padded, groups)
    near = np.empty((len(padded), count), np.float32)
    score_rows(cells.means, SINGLE, padded, near)
    upper = np.empty((len(padded), count), np.float32)
    score_rows(cells.variances, SINGLE, padded * padded, upper)
    _reach(near, upper, np.float32(deviations))

    wanted = _candidates_for(k)
    capacity = (FIRST + 1) * wanted + 2 * STEP * BLOCK
    best = np.empty((rows, capacity), np.float32)
    places = np.empty((rows, capacity), np.int32)
    fill = np.zeros(rows, np.int64)
    floor = np.full(rows, -np.inf, np.float32)
    asked = np.zeros((rows, count), np.bool_)
    scanned = np.zeros((rows, count), np.bool_)
    terms = np.zeros((4, QUERIES), np.float32)
    lines = np.empty((STEP, QUERIES, BLOCK), np.float32)
    masks = np.empty((STEP, QUERIES), np.uint16)
    for turn in range(TURNS):
        for r in range(rows):
            entry = floor[r]
            if turn < TURNS - 1:
                entry = max(entry, _bound_of_first(upper[r], counts, FIRST ** (turn + 1) * wanted))
            for c in range(count):
                asked[r, c] = not (upper[r, c] < entry or scanned[r, c])
                scanned[r, c] |= asked[r, c]
        for c in range(count):
            for four in range(fours):
                start = four * QUERIES
                end = min(start + QUERIES, rows)
                if not asked[start:end, c].any():
                    continue
                for r in range(start, end):
                    terms[0, r - start], terms[1, r - start], terms[2, r - start] = (
                        near[r, c],
                        unit[r],
                        offset[r],
                    )
                for block in range(starts[c], starts[c + 1], STEP):
                    size = min(STEP, starts[c + 1] - block)
                    for r in range(start, end):
                        if fill[r] + STEP * BLOCK > capacity:
                            fill[r], floor[r] = _shrink(best[r], places[r], fill[r], wanted)
                        terms[3, r - start] = floor[r] if asked[r, c] else np.inf
                    scored(cells.codes, cells.scales, block, size, groups, packed[four], terms, lines, masks)
                    for r in range(start, end):
                        ids = cells.ids[block * BLOCK :]
                        fill[r] = _keep(lines, masks, r - start, size, ids, best[r], places[r], fill[r])
        for r in range(rows):
            if fill[r] > wanted:
                fill[r], floor[r] = _shrink(best[r], places[r], fill[r], wanted)
    for r in range(rows):
        _exact(keys.bits, keys.layout, queries[r], places[r, : fill[r]], best[r])
        _sort(best[r, : fill[r]], places[r, : fill[r]], found.ids[r], found.scores[r])


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


@njit(nogil=True, cache=True)
def _keep(lines: Any, masks: Any, q: int, count: int, ids: Any, best: Any, places: Any, fill: int) -> int:
    """Appends the keys of `count` blocks that score above the floor; returns how many there are then."""
    for b in range(count):
        if masks[b, q]:
            for j in range(BLOCK):  # written first and counted then: a branch would be guessed wrong
                best[fill], places[fill] = lines[b, q, j], ids[b * BLOCK + j]
                fill += int((masks[b, q] >> j) & 1) & int(ids[b * BLOCK + j] >= 0)
    return fill


@njit(nogil=True, cache=True)
def _shrink(best: Any, places: Any, fill: int, wanted: int) -> Any:
    """Keeps the `wanted` largest of more: exactly so many, by the first 22 bits of their order. Returns how
    many, and the smallest score kept.
    """
    edge, room = np.uint32(0), wanted
    held = np.empty(1 << _DIGIT, np.int64)
    for turn in range(2):
        shift = 32 - (turn + 1) * _DIGIT
        held[:] = 0
        for i in range(fill):
            bits = ordered(best[i]) >> shift
            held[bits & _MASK] += bits >> _DIGIT == edge
        digit = _MASK
        while held[digit] < room:
            room -= held[digit]
            digit -= 1
        edge = np.uint32((edge << _DIGIT) | digit)
    kept, floor = 0, np.float32(np.inf)
    for i in range(fill):
        score = best[i]
        bits = ordered(score) >> shift
        room -= int(bits == edge)
        keep = int(bits > edge) | (int(bits == edge) & int(room >= 0))
        best[kept], places[kept] = score, places[i]
        floor = min(floor, score) if keep else floor
        kept += keep
    return kept, floor


@njit(nogil=True, cache=True, fastmath=_REASSOCIATE)
def _exact(keys: Any, layout: int, query: Any, places: Any, scores: Any) -> None:
    """Inner products with the stored keys themselves. In the order of memory they came no faster."""
    for i in range(len(places)):
        prefetch_row(keys, places[min(i + _AHEAD, len(places) - 1)])
        scores[i] = dot_row(query, keys, layout, places[i])


@njit(nogil=True, cache=True)
def _sort(best: Any, places: Any, found: Any, scores: Any) -> None:
    """The best of all candidates in order: of equal scores the lower id comes first. By the bytes of what is
    compared, from the last, because comparisons of scores would be guessed wrong.
    """
    count = len(best)
    turns = np.empty((2, count), np.uint64)
    for i in range(count):
        turns[0, i] = ~candidate(best[i], places[i])
    starts = np.empty(257, np.int64)
    for place in range(8):
        given, taken = turns[place % 2], turns[1 - place % 2]
        shift = np.uint64(8 * place)
        starts[:] = 0
        for i in range(count):
            starts[1 + ((given[i] >> shift) & np.uint64(255))] += 1
        for byte in range(256):
            starts[byte + 1] += starts[byte]
        for i in range(count):
            byte = (given[i] >> shift) & np.uint64(255)
            taken[starts[byte]] = given[i]
            starts[byte] += 1
    for j in range(min(len(found), count)):
        scores[j], found[j] = score_and_row(~turns[0, j])
