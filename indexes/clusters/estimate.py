"""Compiled estimate of the attention to the keys that a selection leaves out, from a head's summaries.

A cell stands at its mean unless it is heavy or holds a selected key; such a cell is refined: its summaries
stand in its place, each less the selected keys, which are taken out of its size and of the sum of its keys
(docs/methods.md §2).
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import carray, njit  # type: ignore[attr-defined]

from offload_decode.common.rows.arrays import Float32
from offload_decode.common.rows.compiled import at, exponential
from offload_decode.common.rows.encodings import SCALE_BYTES
from offload_decode.common.rows.loops import dot_row
from offload_decode.common.rows.scan import FP32, INT8, QUERIES, score_rows, widen_row
from offload_decode.common.rows.team import closure, fork
from offload_decode.indexes.clusters.search import cells_of, keys_of
from offload_decode.indexes.clusters.summaries import Summaries

_HELD = 1 << 24  # numbers that a task holds, one for each of its rows and groups
_REFINED = np.float32(0.25)  # of an equal share of the estimate: heavier cells are refined


def rows_of_a_task(groups: int) -> int:
    """Rows of one head that are estimated together: they share what they read."""
    return max(8, min(32, _HELD // max(1, groups)))


class Given(NamedTuple):
    """What R rows of H heads selected: `queries [H, R, D]`, ids int64 `[H, R, k]`, -1 where there is none,
    and their inner products `[H, R, k]`, -inf there, or `[H, R, 0]`. scaling, softcap: make logits of these;
    a softcap of 0 is none.
    """

    queries: Float32
    ids: npt.NDArray[np.int64]
    scores: Float32
    scaling: np.float32
    softcap: np.float32


@njit(nogil=True, cache=True)
def estimate_layer(team: Any, heads: Any, given: Any, per_task: int, out: Any, lse: Any, wrong: Any) -> None:
    """The state of all keys that are not selected: to `out [H, R, Dv]` float32 of zeros, and `lse [H, R]`,
    -inf where nothing is left. `wrong[0]` becomes 1 for an id that is out of range. team: `team.cells()`.
    """
    heads_of, rows = given.queries.shape[:2]
    body, data = closure(estimate_task, (heads, given, per_task, out, lse, wrong))
    fork(team, body, data, heads_of * -(-rows // per_task))


@njit(nogil=True, cache=True)
def estimate_task(task: int, heads: Any, given: Any, per_task: int, out: Any, lse: Any, wrong: Any) -> None:
    """A task of `estimate_layer`: some rows of a head."""
    rows, dim = given.queries.shape[1:]
    tasks = -(-rows // per_task)
    head, group = task // tasks, task % tasks
    own = slice(group * per_task, min((group + 1) * per_task, rows))
    selected = Given(
        given.queries[head, own],
        given.ids[head, own],
        given.scores[head, own],
        given.scaling,
        given.softcap,
    )
    cells, summaries = cells_of(heads, head, dim), _summaries(heads, head, dim, out.shape[2])
    if _estimate(cells, summaries, keys_of(heads, head), selected, out[head, own], lse[head, own]) < 0:
        wrong[0] = 1


@njit(nogil=True, cache=True)
def _summaries(heads: Any, head: int, dim: int, value_dim: int) -> Any:
    address, count, groups = heads.parts[head], heads.sizes[head, 0], heads.sizes[head, 3]
    return Summaries(
        carray(at(address[8]), (groups, SCALE_BYTES + dim), np.uint8),
        carray(at(address[9]), (groups, SCALE_BYTES + value_dim), np.uint8),
        carray(at(address[10]), (count, SCALE_BYTES + value_dim), np.uint8),
        carray(at(address[11]), (count + 1,), np.int32),
        carray(at(address[12]), (groups,), np.int32),
        carray(at(address[13]), (heads.sizes[head, 2],), np.int32),
    )


@njit(nogil=True, cache=True)
def _estimate(cells: Any, summaries: Any, keys: Any, given: Any, out: Any, lse: Any) -> int:
    """Of one head: `queries [R, D]`, the others alike."""
    queries, ids, scores, scaling, softcap = given
    first, sizes, rows, count = summaries.first, summaries.sizes, len(queries), len(cells.counts)
    wide = np.zeros((rows + -rows % QUERIES, queries.shape[1]), np.float32)  # as many as are scored at once
    wide[:rows] = queries
    near = np.empty((len(wide), count), np.float32)
    score_rows(cells.means, FP32, wide, near)
    refined = _refined(cells, summaries, near, given)
    if len(refined) == 0:
        return -1
    # The queries of a head refine much the same cells: their groups are scored, and read, together.
    inner = np.empty((len(wide), len(sizes)), np.float32)
    for c in range(count):
        if refined[:, c].any():
            groups = slice(first[c], first[c + 1])
            score_rows(summaries.keys[groups], INT8, wide, inner[:, groups])
    taken, sums = np.zeros(len(sizes), np.int32), np.zeros(len(sizes), np.float32)
    logs = np.log(np.arange(max(cells.counts.max(), 1) + 1).astype(np.float32))
    for r in range(rows):
        for j in range(ids.shape[1]):
            if _there(given, r, j):
                g = summaries.labels[ids[r, j]]
                taken[g] += 1
                known = scores.shape[1] > 0
                sums[g] += scores[r, j] if known else dot_row(queries[r], keys.bits, keys.layout, ids[r, j])
        highest = np.float32(-np.inf)
        for c in range(count):
            if not refined[r, c]:
                near[r, c] = _logit(near[r, c], scaling, softcap) + logs[cells.counts[c]]
                highest = max(highest, near[r, c])
                continue
            for g in range(first[c], first[c + 1]):
                score, left = near[r, c] + inner[r, g], max(sizes[g] - taken[g], 0)  # ids may repeat
                if taken[g] and left:
                    score = (np.float32(sizes[g]) * score - sums[g]) / np.float32(left)
                inner[r, g] = _logit(score, scaling, softcap) + logs[left]  # minus infinity of none
                highest = max(highest, inner[r, g])
                taken[g], sums[g] = 0, 0
        if highest == -np.inf:  # all is selected
            inner[r], near[r] = 0, 0
        else:
            total = np.float32(0)
            for c in range(count):
                if refined[r, c]:
                    total += _exponentials(inner[r, first[c] : first[c + 1]], highest)
                else:
                    near[r, c] = exponential(near[r, c] - highest)
                    total += near[r, c]
            lse[r] = highest + np.log(total)
    _add(near, inner, refined, summaries, out)
    return 0


@njit(nogil=True, cache=True, forceinline=True)
def _there(given: Any, r: int, j: int) -> bool:
    return given.ids[r, j] >= 0 and not (given.scores.shape[1] > 0 and given.scores[r, j] == -np.inf)


@njit(nogil=True, cache=True)
def _refined(cells: Any, summaries: Any, near: Any, given: Any) -> Any:
    """The cells that each row refines, `[R, C]`; `[0, C]` for an id that is out of range."""
    rows, count = len(given.queries), near.shape[1]
    refined, owner = np.empty((rows, count), np.bool_), np.empty(len(summaries.sizes), np.int32)
    for c in range(count):
        owner[summaries.first[c] : summaries.first[c + 1]] = c
    sizes, whole = np.log(cells.counts.astype(np.float32)), np.empty(count, np.float32)
    for r in range(rows):
        for c in range(count):
            whole[c] = _logit(near[r, c], given.scaling, given.softcap) + sizes[c]
        total = _exponentials(whole, whole.max())
        for c in range(count):
            refined[r, c] = whole[c] > _REFINED * total / np.float32(count)
        for j in range(given.ids.shape[1]):
            if given.ids[r, j] >= len(summaries.labels):
                return refined[:0]
            if _there(given, r, j):
                refined[r, owner[summaries.labels[given.ids[r, j]]]] = True
    return refined


@njit(nogil=True, cache=True, forceinline=True)
def _logit(score: Any, scaling: Any, softcap: Any) -> Any:
    if softcap:
        return np.float32(softcap * np.tanh(score * scaling / softcap))
    return score * scaling


@njit(nogil=True, cache=True, fastmath={"reassoc", "contract"})
def _exponentials(logits: Any, highest: Any) -> Any:
    """Turns logits into exponentials of what they are above the highest of all; returns their sum."""
    total = np.float32(0)
    for i in range(len(logits)):
        logits[i] = exponential(logits[i] - highest)
        total += logits[i]
    return total


@njit(nogil=True, cache=True)
def _add(near: Any, inner: Any, refined: Any, summaries: Any, out: Any) -> None:
    """Adds up the mean values, with weights of groups where a cell is refined, else of the cell."""
    rows, first = len(refined), summaries.first
    totals, wide = np.zeros(rows, np.float32), np.empty((_most(first), out.shape[1]), np.float32)
    for c in range(refined.shape[1]):
        start, after, few = first[c], first[c + 1], 0
        for r in range(rows):
            few += refined[r, c]
        if few < rows:
            widen_row(summaries.cells[c], INT8, wide[0])
            for r in range(rows):
                if not refined[r, c]:
                    totals[r] += _add_weighed(near[r, c : c + 1], wide, out[r])
        if few:
            for g in range(start, after):
                widen_row(summaries.values[g], INT8, wide[g - start])
            for r in range(rows):
                if refined[r, c]:
                    totals[r] += _add_weighed(inner[r, start:after], wide, out[r])
    for r in range(rows):
        if totals[r] > 0:
            out[r] /= totals[r]


@njit(nogil=True, cache=True)
def _most(first: Any) -> int:
    """Groups of the cell that has most, or 1."""
    most = 1
    for c in range(len(first) - 1):
        most = max(most, first[c + 1] - first[c])
    return most


@njit(nogil=True, cache=True, fastmath={"contract"})
def _add_weighed(weights: Any, values: Any, out: Any) -> Any:
    """Adds `values [n, D]` with their weights, four at a time: `out` is read and written less often; returns
    the sum of the weights.
    """
    count, total = len(weights), np.float32(0)
    for i in range(count):
        total += weights[i]
    whole = count - count % 4
    for i in range(0, whole, 4):
        a, b, c, d = weights[i], weights[i + 1], weights[i + 2], weights[i + 3]
        for n in range(len(out)):
            out[n] += a * values[i, n] + b * values[i + 1, n] + c * values[i + 2, n] + d * values[i + 3, n]
    for i in range(whole, count):
        for n in range(len(out)):
            out[n] += weights[i] * values[i, n]
    return total
