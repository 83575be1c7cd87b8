"""Compiled search of one head's cells: floors that are foretold, a scan of the cells that come near them,
exact scores of what it finds.

A row's floor is the score that about as many keys reach as are wanted, which is foretold (`indexes.pruning`),
so that one pass is enough: over the cells whose mean q·m and so many standard deviations of their inner
products reach the floor. A query that attends to few keys reads few cells, one that attends to many reads
many. Where what was foretold is not there, the floor is looked for in the row's best cells.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import carray, njit, types  # type: ignore[attr-defined]
from numba.extending import intrinsic

from indexes.cells import Cells
from indexes.dots import BLOCK, GROUP, QUERIES, WORD, scored
from indexes.keys import Float32
from indexes.pruning import floor_of, moments
from indexes.rows.addresses import at
from indexes.rows.loops import dot_row
from indexes.rows.ordering import keep_largest, sort
from indexes.rows.prefetch import prefetch_row

STEP = 32  # blocks scored together; their sums stay in the first-level cache
STEP_BYTES = 24 * STEP * BLOCK * QUERIES  # of what a step finds
AIMED = 1.1  # times the keys wanted: as many are foretold above the floor, for some lie in cells left out
FIRST = 4  # times the keys wanted, in the cells that set a floor where none could be foretold
_BITS: Any = np.uint32  # of float32, as loops over rows take them


def candidates_for(k: int) -> int:
    """About how many keys are scored exactly to find the k best: a 4-bit score misplaces few by more."""
    return k + k // 4 + 64


_candidates_for = njit(nogil=True, cache=True)(candidates_for)


def _lowest(_: Any, word: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return builder.cttz(given[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), generate


lowest: Any = intrinsic(_lowest)  # `lowest(word)`: the place of the lowest bit of a word that has one


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


class HeadKeys(NamedTuple):
    """The keys of one head: their `bits` in rows, and the `layout` of these."""

    bits: npt.NDArray[Any]
    layout: int


class Candidates(NamedTuple):
    """What may be among the best: scores float32 and ids int32 `[R, room]`, of which `fill [R]` are there,
    and how many were `seen [R]`.
    """

    scores: Float32
    ids: npt.NDArray[np.int32]
    fill: npt.NDArray[np.int64]
    seen: npt.NDArray[np.int64]


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
            carray(at(address[0]), (count + 1,), np.int64),
            carray(at(address[1]), (count,), np.int32),
            carray(at(address[2]), (count, dim), _BITS),
            carray(at(address[3]), (count, dim), _BITS),
            carray(at(address[4]), (blocks * -(-dim // GROUP) * WORD,), np.uint8),
            carray(at(address[5]), (blocks * BLOCK,), np.float32),
            carray(at(address[6]), (blocks * BLOCK,), np.int32),
        )
        bits = carray(at(address[7]), (keys, heads.like.shape[1]), heads.like.dtype)
        search_rows(
            cells,
            HeadKeys(bits, heads.layout),
            queries[head, own],
            k,
            heads.deviations[head],
            Best(best.ids[head, own], best.scores[head, own]),
        )


@njit(nogil=True, cache=True, error_model="numpy")
def search_rows(cells: Any, keys: Any, queries: Any, k: int, deviations: float, found: Any) -> None:
    """The k best of the keys for each of `queries [R, D]`, by descending score. Moments in `cells` come as
    their bits.
    """
    rows, dim = queries.shape
    counts = cells.counts
    padded, size = np.zeros((-(-rows // QUERIES) * QUERIES, dim), np.float32), np.empty(rows, np.float32)
    for r in range(rows):  # of a size that can be squared; what is exact is scored with the query itself
        size[r] = max(np.abs(queries[r]).max(), np.float32(1e-38))
        padded[r] = queries[r] / size[r]
    near, inverse = moments(cells.means, cells.variances, padded)
    coded = _coded(padded, -(-dim // GROUP))
    wanted = _candidates_for(k)
    candidates = Candidates(
        np.empty((rows, 2 * wanted), np.float32),
        np.empty((rows, 2 * wanted), np.int32),
        np.zeros(rows, np.int64),
        np.zeros(rows, np.int64),
    )
    floors, asked = np.empty(rows, np.float32), np.empty((rows, len(counts)), np.bool_)
    upper = inverse  # in its place: it is read once more
    for r in range(rows):
        floors[r] = floor_of(near[r], inverse[r], counts, AIMED * wanted)
        for c in range(len(counts)):
            upper[r, c] = near[r, c] + deviations / inverse[r, c]
            asked[r, c] = not upper[r, c] < floors[r]
    _scan(cells, keys, queries, coded, near, floors, asked, candidates)

    again = candidates.seen < wanted
    if again.any():  # what was foretold is not there: for these rows a floor is found among their best cells
        for r in range(rows):
            asked[r] = False
            if again[r]:
                floors[r], candidates.fill[r] = -np.inf, 0
                least = _bound_of_first(upper[r], counts, FIRST * wanted)
                asked[r] = upper[r] >= least
        _scan(cells, keys, queries, coded, near, floors, asked, candidates)
        for r in range(rows):
            if again[r]:
                own, ids, fill = candidates.scores[r], candidates.ids[r], candidates.fill[r]
                candidates.fill[r] = keep_largest(own, ids, fill, min(fill, wanted))
                if fill:
                    floors[r] = own[: candidates.fill[r]].min() / size[r]
                for c in range(len(counts)):
                    asked[r, c] = not (asked[r, c] or upper[r, c] < floors[r])
        _scan(cells, keys, queries, coded, near, floors, asked, candidates)
    for r in range(rows):
        fill = candidates.fill[r]
        sort(candidates.scores[r, :fill], candidates.ids[r, :fill], found.ids[r], found.scores[r])


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
def _scan(
    cells: Any, keys: Any, queries: Any, coded: Any, near: Any, floors: Any, asked: Any, candidates: Any
) -> None:
    """The keys of the cells that were `asked [R, C]` for and score above their row's floor, to its
    candidates. What one step finds is fetched while the next one is scanned, and scored then.
    """
    rows, starts = len(queries), cells.starts
    words, unit, offset = coded
    packed, of = np.zeros((words.shape[1], QUERIES), np.int32), np.full(QUERIES, -1, np.int64)
    terms = np.zeros((4, QUERIES), np.float32)
    lines, masks = np.empty((STEP, QUERIES, BLOCK), np.float32), np.empty((STEP, QUERIES), np.uint16)
    waiting = np.empty((2, STEP * BLOCK * QUERIES, 2), np.int32)
    exact = np.empty(STEP * BLOCK * QUERIES, np.float32)
    count, side, asking = 0, 0, np.empty(rows, np.int64)
    listed = np.flatnonzero(asked.sum(axis=0))
    for place in range(len(listed)):
        c, after = listed[place], starts[listed[min(place + 1, len(listed) - 1)]]
        asked_by = 0
        for r in range(rows):
            asking[asked_by] = r
            asked_by += int(asked[r, c])
        for first in range(0, asked_by, QUERIES):
            four = asking[first : min(first + QUERIES, asked_by)]
            terms[3] = np.inf  # nothing is found for those that there are not
            for q in range(len(four)):
                r = four[q]
                terms[0, q], terms[1, q] = near[r, c], unit[r]
                terms[2, q], terms[3, q] = offset[r], floors[r]
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
    """Writes the keys of `count` blocks that score above the floors of their rows, as pairs of row and id,
    and fetches them; returns how many there are.
    """
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
    """Inner products with the stored keys themselves."""
    bits, layout = keys
    for i in range(len(waiting)):
        scores[i] = dot_row(queries[waiting[i, 0]], bits, layout, waiting[i, 1])


@njit(nogil=True, cache=True)
def _take(waiting: Any, exact: Any, candidates: Any) -> None:
    """Adds what was scored to the rows' candidates; of a row that has no room, the better half stays."""
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
def _coded(queries: Any, groups: int) -> Any:
    """Queries as 8-bit codes, four a word: int32 `[R, 2 · groups]`, with the unit and, in units, what codes
    of 8 (zero) add.
    """
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
