"""Compiled search of one head's cells: predict a score threshold, scan the cells that may exceed it, score
exactly.

A cell's keys have the mean m and, channel by channel, the variance v, so their inner products with a query q
have the mean q·m and a standard deviation near sqrt(q²·v). Taken as normal, these moments tell how many keys
of every cell score above a threshold, and so which threshold about as many keys exceed as are wanted, before
any key is read. One pass then scans the cells whose mean and so many standard deviations reach the threshold:
a query that attends to few keys reads few cells. If the predicted threshold finds too few keys, the share of
the predicted ones that it found corrects it; if that fails too, the best cells set one.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import carray, njit  # type: ignore[attr-defined]

from offload_decode.common.rows import threads
from offload_decode.common.rows.arrays import Float32
from offload_decode.common.rows.compiled import at, exponential
from offload_decode.common.rows.scan import FP32, score_rows
from offload_decode.common.rows.team import closure, fork
from offload_decode.common.rows.top_k import keep_largest, sort
from offload_decode.indexes.clusters.cells import Cells
from offload_decode.indexes.clusters.dot4 import BLOCK, GROUP, QUERIES, WORD
from offload_decode.indexes.clusters.scan import Candidates, coded, scan_asked

_REASSOCIATE = {"reassoc", "contract", "nsz"}
_FINITE = _REASSOCIATE | {"nnan", "ninf"}
# Dividing by zero is no error: to look for it would keep compilers from doing sixteen at a time.
_compiled = partial(njit, nogil=True, cache=True, error_model="numpy")
_SPREAD = np.float32(8)  # standard deviations that hold all keys
_HALVINGS = 18  # of the range of thresholds


@_compiled()
def moments(means: Any, variances: Any, queries: Any) -> Any:
    """Means of the inner products of `queries [R, D]` with every cell's keys, and the inverse of their
    standard deviations: float32 `[R, C]` both. R is a multiple of four.
    """
    near = np.empty((len(queries), len(means)), np.float32)
    inverse = np.empty((len(queries), len(means)), np.float32)
    score_rows(means, FP32, queries, near)
    score_rows(variances, FP32, queries * queries, inverse)
    for r in range(len(queries)):
        for c in range(len(means)):
            inverse[r, c] = np.float32(1) / np.sqrt(max(inverse[r, c], np.float32(1e-30)))
    return near, inverse


@_compiled()
def threshold_of(near: Any, inverse: Any, counts: Any, keys: float) -> Any:
    """The score above which about `keys` keys are, for one query."""
    low, high = np.float32(np.inf), np.float32(-np.inf)
    for c in range(len(near)):
        low, high = min(low, near[c]), max(high, near[c] + _SPREAD / inverse[c])
    for _ in range(_HALVINGS):
        middle = np.float32(0.5) * (low + high)
        if _above(near, inverse, counts, middle) >= keys:
            low = middle
        else:
            high = middle
    return low


@_compiled(fastmath=_REASSOCIATE)
def _above(near: Any, inverse: Any, counts: Any, threshold: Any) -> Any:
    total = np.float32(0)
    for c in range(len(near)):
        total += np.float32(counts[c]) * _share_beyond((threshold - near[c]) * inverse[c])
    return total


@_compiled(forceinline=True, fastmath=_FINITE)
def _share_beyond(z: Any) -> Any:
    """About the share of a normal distribution beyond z, by a logistic curve."""
    z = min(max(z, -_SPREAD), _SPREAD)
    power = exponential(-abs((np.float32(1.5976) + np.float32(0.07056) * z * z) * z))
    return (power if z > 0 else np.float32(1)) / (np.float32(1) + power)


# Times the keys wanted are predicted above the threshold: channels are correlated, some lie in skipped cells.
AIMED = 1.5
CORRECTED = 1.3  # times the keys wanted, where that found too few and what it found has corrected it
LEAST_FOUND = 0.1  # of the predicted keys: what is corrected by
FIRST = 4  # times the keys wanted: in the cells that set a threshold where the predicted one failed
_BYTES: Any = np.uint8  # of float32, as loops over rows take them


def candidates_for(k: int) -> int:
    """About how many keys are scored exactly to find the k best: a 4-bit score misplaces few by more."""
    return k + k // 4 + 64


_candidates_for = njit(nogil=True, cache=True)(candidates_for)


class Heads(NamedTuple):
    """The H heads of a layer, so that one function is compiled for any number of them.

    parts: int64 `[H, 14]`, the addresses of what `Cells` has, of the keys' bits, and of what `Summaries` has
    (0 where there are none). sizes: int64 `[H, 4]`, the numbers of cells, blocks, keys and groups.
    deviations: float32 `[H]`. row_bytes, layout: of the keys' bits.
    """

    parts: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    deviations: Float32
    row_bytes: int
    layout: int


def beside(layers: Sequence[Heads]) -> Heads:
    """The heads of several stores, whose keys lie in rows of one form, one store behind the other."""
    first = layers[0]
    parts, sizes, deviations = (np.concatenate(own) for own in list(zip(*layers, strict=True))[:3])
    return Heads(parts, sizes, deviations, first.row_bytes, first.layout)


class HeadKeys(NamedTuple):
    """The keys of one head: their `bits` in rows, and the `layout` of these."""

    bits: npt.NDArray[Any]
    layout: int


class Predicted(NamedTuple):
    """float32 `[H, R, C]` and thresholds `[H, R]`; of no heads where each task predicts its own."""

    near: Float32
    inverse: Float32
    thresholds: Float32


UNPREDICTED = Predicted(*(np.empty((0,) * axes, np.float32) for axes in (3, 3, 2)))


class Best(NamedTuple):
    """Ids int64 and scores float32 `[..., R, k]`, and how many were `seen` (scored exactly) `[..., R]`."""

    ids: npt.NDArray[np.int64]
    scores: Float32
    seen: npt.NDArray[np.int64]


@njit(nogil=True, cache=True)
def predict_moments(heads: Any, queries: Any, part: int, parts: int, predicted: Any) -> None:
    """Near and inverse of a part of each head's cells."""
    dim = queries.shape[2]
    for head in range(len(queries)):
        cells = cells_of(heads, head, dim)
        first, after = len(cells.counts) * part // parts, len(cells.counts) * (part + 1) // parts
        own = moments(cells.means[first:after], cells.variances[first:after], _scaled(queries[head])[0])
        predicted.near[head, :, first:after], predicted.inverse[head, :, first:after] = own


@njit(nogil=True, cache=True)
def predict_thresholds(heads: Any, queries: Any, k: int, part: int, parts: int, predicted: Any) -> None:
    """The thresholds of a part of all rows."""
    rows, dim = queries.shape[1:]
    for task in range(part, len(queries) * rows, parts):
        head, r = task // rows, task % rows
        counts = cells_of(heads, head, dim).counts
        near, inverse = predicted.near[head, r, : len(counts)], predicted.inverse[head, r, : len(counts)]
        predicted.thresholds[head, r] = threshold_of(near, inverse, counts, AIMED * _candidates_for(k))


@njit(nogil=True, cache=True)
def search_layer(
    team: Any, heads: Any, queries: Any, k: int, per_task: int, predicted: Any, best: Any
) -> None:
    """The k best keys of every head for its `queries [H, R, D]`, to `best`, whose first dimension is the
    parts of a head's cells. Of several parts the thresholds are `predicted` for all. team: `team.cells()`.
    """
    body, data = closure(search_task, (heads, queries, k, per_task, predicted, best))
    fork(team, body, data, len(best.ids) * len(queries) * -(-queries.shape[1] // per_task))


@njit(nogil=True, cache=True)
def search_task(
    task: int, heads: Any, queries: Any, k: int, per_task: int, predicted: Any, best: Any
) -> None:
    """A task of `search_layer`: some rows of a head, or of a part of its cells."""
    rows, dim = queries.shape[1:]
    parts, tasks = len(best.ids), -(-rows // per_task)
    part, head, group = task % parts, task // parts // tasks, task // parts % tasks
    own = slice(group * per_task, min((group + 1) * per_task, rows))
    cells = cells_of(heads, head, dim)
    scaled, size = _scaled(queries[head, own])
    if len(predicted.thresholds):
        count = len(cells.counts)
        near = predicted.near[head, own, :count].copy()
        inverse = predicted.inverse[head, own, :count].copy()
        thresholds = predicted.thresholds[head, own]
    else:
        near, inverse = moments(cells.means, cells.variances, scaled)
        thresholds = np.empty(len(size), np.float32)
        for r in range(len(size)):
            thresholds[r] = threshold_of(near[r], inverse[r], cells.counts, AIMED * _candidates_for(k))
    keys, ready = keys_of(heads, head), (near, inverse, thresholds)
    found = Best(best.ids[part, head, own], best.scores[part, head, own], best.seen[part, head, own])
    deviations = heads.deviations[head]
    search_rows(cells, keys, queries[head, own], (scaled, size), ready, k, deviations, part, parts, found)


@njit(nogil=True, cache=True)
def keys_of(heads: Any, head: int) -> Any:
    """The keys of a head."""
    bits = carray(at(heads.parts[head, 7]), (heads.sizes[head, 2], heads.row_bytes), np.uint8)
    return HeadKeys(bits, heads.layout)


@njit(nogil=True, cache=True)
def cells_of(heads: Any, head: int, dim: int) -> Any:
    """The cells of a head. Their moments come as their bits."""
    address, count, blocks = heads.parts[head], heads.sizes[head, 0], heads.sizes[head, 1]
    return Cells(
        carray(at(address[0]), (count + 1,), np.int64),
        carray(at(address[1]), (count,), np.int32),
        carray(at(address[2]), (count, 4 * dim), _BYTES),
        carray(at(address[3]), (count, 4 * dim), _BYTES),
        carray(at(address[4]), (blocks * -(-dim // GROUP) * WORD,), np.uint8),
        carray(at(address[5]), (blocks * BLOCK,), np.float32),
        carray(at(address[6]), (blocks * BLOCK,), np.int32),
    )


@njit(nogil=True, cache=True)
def _scaled(queries: Any) -> Any:
    """Queries scaled to be squared, padded to fours, and their divisors; exact scores use them as given."""
    rows, dim = queries.shape
    scaled, size = np.zeros((-(-rows // QUERIES) * QUERIES, dim), np.float32), np.empty(rows, np.float32)
    for r in range(rows):
        size[r] = max(np.abs(queries[r]).max(), np.float32(1e-38))
        scaled[r] = queries[r] / size[r]
    return scaled, size


@njit(nogil=True, cache=True, error_model="numpy")
def search_rows(
    cells: Any,
    keys: Any,
    queries: Any,
    scaled: Any,
    predicted: Any,
    k: int,
    deviations: float,
    part: int,
    parts: int,
    found: Any,
) -> None:
    """The k best of the keys for each of `queries [R, D]`, by descending score. Of several parts, those in
    this part's cells that exceed the common threshold.
    """
    rows, dim = queries.shape
    counts = cells.counts
    padded, size = scaled
    near, inverse, thresholds = predicted
    words = coded(padded, -(-dim // GROUP))
    wanted = _candidates_for(k)
    candidates = Candidates(
        np.empty((rows, 2 * wanted), np.float32),
        np.empty((rows, 2 * wanted), np.int32),
        np.zeros(rows, np.int64),
        np.zeros(rows, np.int64),
    )
    asked, upper = np.empty((rows, len(counts)), np.bool_), np.empty((rows, len(counts)), np.float32)
    for r in range(rows):
        for c in range(len(counts)):
            upper[r, c] = near[r, c] + deviations / inverse[r, c]
            asked[r, c] = not upper[r, c] < thresholds[r]
    listed = _own_part(np.flatnonzero(asked.sum(axis=0)), cells.starts, part, parts)
    scan_asked(cells, keys, queries, words, near, thresholds, asked, listed, candidates)

    again = candidates.seen < wanted
    if parts == 1 and again.any():  # too few keys found: what was found corrects the prediction
        for r in range(rows):
            asked[r] = False
            if again[r]:
                short = max(np.float64(candidates.seen[r]) / (AIMED * wanted), LEAST_FOUND)
                thresholds[r] = threshold_of(near[r], inverse[r], counts, CORRECTED * wanted / short)
                candidates.fill[r], candidates.seen[r] = 0, 0
                for c in range(len(counts)):
                    asked[r, c] = not upper[r, c] < thresholds[r]
        listed = np.flatnonzero(asked.sum(axis=0))
        scan_asked(cells, keys, queries, words, near, thresholds, asked, listed, candidates)
        again &= candidates.seen < wanted
    if parts == 1 and again.any():  # still too few: the best cells set a threshold
        for r in range(rows):
            asked[r] = False
            if again[r]:
                thresholds[r], candidates.fill[r] = -np.inf, 0
                least = _bound_of_first(upper[r], counts, FIRST * wanted)
                asked[r] = upper[r] >= least
        listed = np.flatnonzero(asked.sum(axis=0))
        scan_asked(cells, keys, queries, words, near, thresholds, asked, listed, candidates)
        for r in range(rows):
            if again[r]:
                own, ids, fill = candidates.scores[r], candidates.ids[r], candidates.fill[r]
                candidates.fill[r] = keep_largest(own, ids, fill, min(fill, wanted))
                if fill:
                    thresholds[r] = own[: candidates.fill[r]].min() / size[r]
                for c in range(len(counts)):
                    asked[r, c] = not (asked[r, c] or upper[r, c] < thresholds[r])
        listed = np.flatnonzero(asked.sum(axis=0))
        scan_asked(cells, keys, queries, words, near, thresholds, asked, listed, candidates)
    for r in range(rows):
        fill = candidates.fill[r]
        found.seen[r] = candidates.seen[r]
        sort(candidates.scores[r, :fill], candidates.ids[r, :fill], found.ids[r], found.scores[r])


@njit(nogil=True, cache=True)
def _own_part(listed: Any, starts: Any, part: int, parts: int) -> Any:
    """Of the listed cells a part's: neighbours with about as many blocks as any other part's."""
    sizes = starts[listed + 1] - starts[listed]
    middles = (2 * np.cumsum(sizes) - sizes) * parts
    total = 2 * sizes.sum()
    first, after = np.searchsorted(middles, np.array([part * total, (part + 1) * total]))
    return listed[first:after]


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


def predict(heads: Heads, queries: Float32, k: int, workers: int) -> Predicted:
    """Moments and thresholds of the heads for `queries [H, R, D]`, computed once by `workers` threads."""
    rows = queries.shape[1]
    shape = (len(heads.sizes), rows + -rows % QUERIES, int(heads.sizes[:, 0].max()))
    predicted = Predicted(*(np.empty(some, np.float32) for some in (shape, shape, shape[:2])))
    threads.run(lambda part: predict_moments(heads, queries, part, workers, predicted), range(workers))
    threads.run(lambda part: predict_thresholds(heads, queries, k, part, workers, predicted), range(workers))
    return predicted
