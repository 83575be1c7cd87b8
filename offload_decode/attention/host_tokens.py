"""Attention of queries to chosen tokens on hosts, over stored rows where they lie in memory.

Nothing is copied, and only what is multiplied is widened. Rows are prefetched. Where the queries of a KV head
name many tokens, neighbouring tokens are visited together, so that what the queries share comes from the
cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from numba import njit
from torch import Tensor

from offload_decode.attention.queries import Queries
from offload_decode.attention.rows import HeadRows, Rows, head_bits
from offload_decode.common.rows import threads
from offload_decode.common.rows.compiled import exponential
from offload_decode.common.rows.loops import add_row, dot_row, prefetch_row
from offload_decode.common.rows.team import cells, closure, fork
from offload_decode.types import AttentionState


class Logits(NamedTuple):
    """What makes logits of scores; a softcap of 0 is none."""

    scaling: np.float32
    softcap: np.float32

    @classmethod
    def of(cls, scaling: float, softcap: float | None) -> Logits:
        """As callers have them."""
        return cls(np.float32(scaling), np.float32(softcap or 0))


@njit(nogil=True, cache=True, error_model="numpy")
def weigh(scores: Any, logits: Any) -> Any:
    """Turns the scores `[n]` float32 of one row into weights, where -inf has none; returns their log-sum-exp,
    and the sum that they are to be divided by: -inf and 0 where there is nothing.
    """
    scaling, softcap = logits
    if softcap:
        for j in range(len(scores)):
            if scores[j] != -np.inf:
                scores[j] = softcap * np.tanh(scores[j] * scaling / softcap)
    else:
        for j in range(len(scores)):
            if scores[j] != -np.inf:
                scores[j] *= scaling
    highest, nothing = np.float32(-np.inf), True
    for j in range(len(scores)):
        highest = max(highest, scores[j])
        nothing &= scores[j] == -np.inf
    if nothing:
        scores[:] = 0
        return np.float32(-np.inf), np.float64(0)
    total = _exponentials(scores, highest)
    return np.float32(highest + np.log(total)), total


@njit(nogil=True, cache=True, error_model="numpy")
def divide(out: Any, total: Any) -> None:
    """Divides what was added with the weights, `out [Dv]` float32, by their sum, unless there was nothing."""
    if total != 0:  # NaN as well
        for d in range(len(out)):
            out[d] = np.float32(out[d] / total)


@njit(nogil=True, cache=True, fastmath={"reassoc", "contract"})
def _exponentials(scores: Any, highest: Any) -> Any:
    total = np.float64(0)
    for j in range(len(scores)):
        scores[j] = exponential(scores[j] - highest)
        total += np.float64(scores[j])
    return total


AHEAD = 12  # rows that are fetched before their turn: enough to hide memory, few enough to stay in cache
ENTRIES = 1 << 18  # pairs of a query and a token that a thread holds at once: 20 bytes each
NEIGHBOURS = 10  # bits of a token's number within its neighbourhood, which stays in a core's cache
SPARSE = 32  # tokens for each pair: where they are more, queries share too little to be put in order


class Named(NamedTuple):
    """Tokens of rows: ids int64 `[..., R, k]`, and scores float32 alike where known, else `[..., R, 0]`."""

    ids: npt.NDArray[np.int64]
    scores: npt.NDArray[np.float32]


class State(NamedTuple):
    """Where a state goes: out float32 `[..., R, Dv]`, of zeros, and lse float32 `[..., R]`, of -inf."""

    out: npt.NDArray[np.float32]
    lse: npt.NDArray[np.float32]

    @classmethod
    def empty(cls, *shape: int) -> State:
        """Of `out` in this shape."""
        return cls(np.zeros(shape, np.float32), np.full(shape[:-1], -np.inf, np.float32))


class Pairs(NamedTuple):
    """Pairs `[n]`: int32 query `row`, int64 `token`, int32 `place` among all that the rows name."""

    row: npt.NDArray[np.int32]
    token: npt.NDArray[np.int64]
    place: npt.NDArray[np.int32]


def attend_tokens(
    queries: Queries, keys: HeadRows, values: HeadRows, ids: Tensor, scores: Tensor | None
) -> tuple[AttentionState, int]:
    """Attend from R queries to k tokens each: `out [Hkv, R, Dv]`, `lse [Hkv, R]`, and the bytes of the rows
    read: once what queries of one thread share, and what is key and value in one.

    `keys` and `values` are the stored rows of each KV head, `ids [Hkv, R, k]` int64, unique for a query and
    -1 where there is none. `scores [Hkv, R, k]` float32 are the inner products q·k where they
    are known, with -inf for no token: then keys are not read. All on a CPU.
    """
    heads, rows, k = ids.shape
    vectors, named = queries.vectors.float().contiguous().numpy(), ids.contiguous().numpy()
    known = np.empty((heads, rows, 0), np.float32) if scores is None else scores.contiguous().numpy()
    state = State.empty(heads, rows, values[0].dim)
    read = np.zeros((heads, rows), np.int64)  # at the first row of a task
    if k and rows:
        # The rows of a head share what they read, unless threads would be without work.
        own = rows if heads >= threads.THREADS else max(1, rows * heads // (2 * threads.THREADS))
        stored = keys.compiled, values.compiled
        logits, limits = Logits.of(queries.scaling, queries.softcap), (ENTRIES, SPARSE)
        given = (vectors, *stored, Named(named, known), logits, limits, own, state, read)
        _attend_layer(cells(), heads * -(-rows // own), given)
    if (read < 0).any():
        raise IndexError(f"an id is not of the {len(keys[0]):,} rows that there are")
    both = scores is None and keys[0] is not values[0]
    width = values[0].row_bytes + (keys[0].row_bytes if both else 0)
    return AttentionState(*map(torch.from_numpy, state)), int(read.sum()) * width


def score_tokens(query: Tensor, keys: Sequence[Rows], ids: Tensor) -> Tensor:
    """Inner products q·k float32 `[Hkv, R, k]` of R rows with k tokens each, -inf where there is no token.

    `query [Hkv, R, D]`, `keys` the stored rows of each KV head, `ids [Hkv, R, k]` int64, -1 for none. All on
    a CPU.
    """
    heads, rows, k = ids.shape
    queries, named = query.float().contiguous().numpy(), ids.contiguous().numpy()
    scores = np.full((heads, rows, k), -np.inf, np.float32)
    if named.size and named.max() >= len(keys[0]):
        raise IndexError(f"an id is not of the {len(keys[0]):,} rows that there are")
    row = np.arange(rows, dtype=np.int32).repeat(k)
    place = np.arange(rows * k, dtype=np.int32)

    def score(head: int) -> None:
        there = (token := named[head].ravel()) >= 0
        pairs = Pairs(row[there], token[there], place[there])
        _score(queries[head], keys[head].bits, keys[head].layout, pairs, scores[head].reshape(-1))

    threads.run(score, range(heads))
    return torch.from_numpy(scores)


@njit(nogil=True, cache=True)
def _attend_layer(team: Any, tasks: int, given: Any) -> None:
    """All tasks; `given` is what `attend_task` takes beside the number of its own."""
    body, data = closure(attend_task, given)
    fork(team, body, data, tasks)


@njit(nogil=True, cache=True)
def attend_task(
    task: int,
    query: Any,
    keys: Any,
    values: Any,
    named: Any,
    logits: Any,
    limits: Any,
    per_task: int,
    state: Any,
    read: Any,
) -> None:
    """A task of `attend_tokens`: some rows of a head. `read` gets how many different tokens they read, -1 for
    an id out of range.
    """
    rows = query.shape[1]
    tasks = -(-rows // per_task)
    head, part = task // tasks, task % tasks
    own = slice(part * per_task, min((part + 1) * per_task, rows))
    read[head, own.start] = _attend(
        query[head, own],
        head_bits(keys, head),
        keys.layout,
        head_bits(values, head),
        values.layout,
        Named(named.ids[head, own], named.scores[head, own]),
        logits,
        limits,
        State(state.out[head, own], state.lse[head, own]),
    )


@njit(nogil=True, cache=True)
def _attend(
    query: Any,
    keys: Any,
    key_layout: int,
    values: Any,
    value_layout: int,
    named: Any,
    logits: Any,
    limits: Any,
    state: Any,
) -> Any:
    """Some rows of one KV head; how many different tokens were read, or -1 for an id that is out of range."""
    rows, k = named.ids.shape
    tokens = len(values)
    most, sparse = limits
    step = min(rows, max(1, most // k))
    pairs = Pairs(np.empty(step * k, np.int32), np.empty(step * k, np.int64), np.empty(step * k, np.int32))
    weights, total = np.empty((step, k), np.float32), np.empty(step, np.float64)
    seen, different = np.zeros(tokens // 64 + 1, np.uint64), np.int64(0)
    for start in range(0, rows, step):
        part = slice(start, min(start + step, rows))
        count = _order(Named(named.ids[part], named.scores[part]), tokens, sparse, pairs)
        if count < 0:
            return -1
        own = Pairs(pairs.row[:count], pairs.token[:count], pairs.place[:count])
        if named.scores.shape[1]:
            for r in range(part.stop - start):
                for j in range(k):
                    there = named.ids[start + r, j] >= 0
                    weights[r, j] = named.scores[start + r, j] if there else np.float32(-np.inf)
        else:
            weights[:] = -np.inf
            _score(query[part], keys, key_layout, own, weights.reshape(-1))
        for r in range(part.stop - start):
            state.lse[start + r], total[r] = weigh(weights[r], logits)
        _add_values(weights.reshape(-1), values, value_layout, own, state.out[part])
        for r in range(part.stop - start):
            divide(state.out[start + r], total[r])
        for j in range(count):
            word, bit = own.token[j] >> 6, np.uint64(1) << np.uint64(own.token[j] & 63)
            different += np.int64(seen[word] & bit == 0)
            seen[word] |= bit
    return different


@njit(nogil=True, cache=True)
def _order(named: Any, tokens: int, sparse: int, pairs: Any) -> int:
    """The pairs of a query and a token to `pairs`: as they come where they are few, else by neighbourhoods.
    Returns their number, or -1 for an id that is out of range.
    """
    ids, scores = named
    row, token, place = pairs
    rows, k = ids.shape
    known = scores.shape[1] > 0
    shift = NEIGHBOURS if rows * k * sparse > tokens else 62
    first = np.zeros((tokens >> shift) + 2, np.int64)
    count = 0
    for r in range(rows):
        for j in range(k):
            if ids[r, j] >= tokens:
                return -1
            there = ids[r, j] >= 0 and not (known and scores[r, j] == -np.inf)
            count += int(there)
            if shift == NEIGHBOURS and there:
                first[(ids[r, j] >> shift) + 1] += 1
    for part in range(1, len(first)):
        first[part] += first[part - 1]
    filled = 0
    for r in range(rows):
        for j in range(k):
            if ids[r, j] >= 0 and not (known and scores[r, j] == -np.inf):
                if shift == NEIGHBOURS:
                    filled = first[ids[r, j] >> shift]
                    first[ids[r, j] >> shift] += 1
                row[filled], token[filled], place[filled] = r, ids[r, j], r * k + j
                filled += 1
    return count


@njit(nogil=True, cache=True)
def _score(query: Any, bits: Any, layout: int, pairs: Any, scores: Any) -> None:
    row, token, place = pairs
    for j in range(len(token)):
        prefetch_row(bits, token[min(j + AHEAD, len(token) - 1)])
        scores[place[j]] = dot_row(query[row[j]], bits, layout, token[j])


@njit(nogil=True, cache=True)
def _add_values(weights: Any, bits: Any, layout: int, pairs: Any, out: Any) -> None:
    row, token, place = pairs
    for j in range(len(token)):
        prefetch_row(bits, token[min(j + AHEAD, len(token) - 1)])
        add_row(out[row[j]], weights[place[j]], bits, layout, token[j])
