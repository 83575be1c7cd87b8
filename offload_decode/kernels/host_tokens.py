"""Attention of query rows to tokens of their own on hosts, over stored rows where they lie in memory.

Nothing is copied, and nothing is widened but what is multiplied. Rows are fetched some places ahead of their
turn. Where the queries of a KV head name more tokens than a sparse visit would, neighbouring tokens are
visited together, so that what the queries share comes from the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from numba import njit
from torch import Tensor

from indexes.rows import pool
from indexes.rows.loops import add_row, dot_row
from indexes.rows.prefetch import prefetch_row
from offload_decode.kernels.parts import run
from offload_decode.kernels.rows import Rows
from offload_decode.types import AttentionState

AHEAD = 12  # rows that are fetched before their turn: enough to hide memory, few enough to stay in cache
ENTRIES = 1 << 18  # pairs of a query and a token that a thread holds at once: 16 bytes each
NEIGHBOURS = 10  # bits of a token's number within its neighbourhood, which stays in a core's cache
SPARSE = 32  # tokens for each pair: where they are more, queries share too little to be put in order


class Stored(NamedTuple):
    """The keys or values of one KV head: their `bits` in rows, and the `layout` of these."""

    bits: npt.NDArray[Any]
    layout: int


class Named(NamedTuple):
    """The tokens of R query rows: ids int64 `[R, k]` and, where they are known, scores float32 `[R, k]`, else
    `[R, 0]`.
    """

    ids: npt.NDArray[np.int64]
    scores: npt.NDArray[np.float32]


class Logits(NamedTuple):
    """What makes logits of scores; a softcap of 0 is none."""

    scaling: np.float32
    softcap: np.float32


class State(NamedTuple):
    """Where an attention state goes: out float32 `[R, Dv]`, all zeros, and lse float32 `[R]`, all -inf."""

    out: npt.NDArray[np.float32]
    lse: npt.NDArray[np.float32]


class Pairs(NamedTuple):
    """Pairs of a query row and a token: int32 `row`, int64 `token` and float32 `logit`, all `[n]`."""

    row: npt.NDArray[np.int32]
    token: npt.NDArray[np.int64]
    logit: npt.NDArray[np.float32]


def attend_tokens(
    query: Tensor,
    keys: Sequence[Rows],
    values: Sequence[Rows],
    ids: Tensor,
    scores: Tensor | None,
    scaling: float,
    softcap: float | None = None,
) -> tuple[AttentionState, int]:
    """Attend from R rows to k tokens each: `out [Hkv, R, Dv]`, `lse [Hkv, R]`, and the bytes of the rows
    read: once what queries of one thread share, and what is key and value in one.

    `query [Hkv, R, D]`, `keys` and `values` the stored rows of each KV head, `ids [Hkv, R, k]` int64, unique
    in a row and -1 where there is none. `scores [Hkv, R, k]` float32 are the inner products q·k where they
    are known, with -inf for no token: then keys are not read. All on a CPU.
    """
    heads, rows, k = ids.shape
    queries, named = query.float().contiguous().numpy(), ids.contiguous().numpy()
    known = np.empty((heads, rows, 0), np.float32) if scores is None else scores.contiguous().numpy()
    out = np.zeros((heads, rows, values[0].dim), np.float32)
    lse = np.full((heads, rows), -np.inf, np.float32)
    read = np.zeros((heads, rows), np.int64)  # at the first row of a part
    logits = Logits(np.float32(scaling), np.float32(softcap or 0))

    def attend(head: int, part: slice) -> None:
        read[head, part.start] = _attend(
            queries[head, part],
            Stored(keys[head].bits, keys[head].layout),
            Stored(values[head].bits, values[head].layout),
            Named(named[head, part], known[head, part]),
            logits,
            (ENTRIES, SPARSE),
            State(out[head, part], lse[head, part]),
        )

    if k and rows:
        # The rows of a head share what they read, unless threads would be without work.
        run(attend, heads, rows, multiple=rows if heads >= pool.THREADS else 1)
    if (read < 0).any():
        raise IndexError(f"an id is not of the {len(keys[0]):,} rows that there are")
    both = scores is None and keys[0] is not values[0]
    width = values[0].row_bytes + (keys[0].row_bytes if both else 0)
    return AttentionState(torch.from_numpy(out), torch.from_numpy(lse)), int(read.sum()) * width


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

    def score(head: int, _: slice) -> None:
        token = named[head].ravel()
        there, found = token >= 0, scores[head].reshape(-1)
        own = np.empty(np.count_nonzero(there), np.float32)
        _score(queries[head], Stored(keys[head].bits, keys[head].layout), token[there], row[there], own)
        found[there] = own

    run(score, heads, 1)
    return torch.from_numpy(scores)


@njit(nogil=True, cache=True)
def _attend(query: Any, keys: Any, values: Any, named: Any, logits: Any, limits: Any, state: Any) -> Any:
    """One KV head; how many different tokens were read, or -1 for an id that is out of range."""
    rows, k = named.ids.shape
    out, lse, tokens = state.out, state.lse, len(values.bits)
    most, sparse = limits
    step = min(rows, max(1, most // k))
    pairs = Pairs(np.empty(step * k, np.int32), np.empty(step * k, np.int64), np.empty(step * k, np.float32))
    row, token, logit = pairs
    highest, total = np.empty(step, np.float32), np.empty(step, np.float64)
    seen, different = np.zeros(tokens // 64 + 1, np.uint64), np.int64(0)
    for start in range(0, rows, step):
        part = slice(start, min(start + step, rows))
        count = _order(Named(named.ids[part], named.scores[part]), tokens, sparse, pairs)
        if count < 0:
            return -1
        if named.scores.shape[1] == 0:
            _score(query[part], keys, token[:count], row, logit)
        _cap(logit[:count], logits)
        highest[:] = -np.inf
        for j in range(count):
            highest[row[j]] = max(highest[row[j]], logit[j])
        total[:] = 0
        for j in range(count):
            logit[j] = np.exp(logit[j] - highest[row[j]])
            total[row[j]] += logit[j]
        _add_values(logit, values, token[:count], row, out[part])
        for r in range(part.stop - start):
            if total[r] != 0:  # NaN as well
                lse[start + r] = highest[r] + np.log(total[r])
                for d in range(out.shape[1]):
                    out[start + r, d] = np.float32(out[start + r, d] / total[r])
        for j in range(count):
            word, bit = token[j] >> 6, np.uint64(1) << np.uint64(token[j] & 63)
            different += np.int64(seen[word] & bit == 0)
            seen[word] |= bit
    return different


@njit(nogil=True, cache=True)
def _order(named: Any, tokens: int, sparse: int, pairs: Any) -> int:
    """The pairs of a query and a token to `pairs`, with the scores that are known as logits: as they come
    where they are few, else by neighbourhoods. Returns their number, or -1 for an id that is out of range.
    """
    ids, scores = named
    row, token, logit = pairs
    rows, k = ids.shape
    known = scores.shape[1] > 0
    shift = NEIGHBOURS if rows * k * sparse > tokens else 62
    place = np.zeros((tokens >> shift) + 2, np.int64)
    for r in range(rows):
        for j in range(k):
            if ids[r, j] >= tokens:
                return -1
            if ids[r, j] >= 0 and not (known and scores[r, j] == -np.inf):
                place[(ids[r, j] >> shift) + 1] += 1
    for part in range(1, len(place)):
        place[part] += place[part - 1]
    for r in range(rows):
        for j in range(k):
            if ids[r, j] >= 0 and not (known and scores[r, j] == -np.inf):
                own = place[ids[r, j] >> shift]
                place[ids[r, j] >> shift] = own + 1
                token[own], row[own] = ids[r, j], r
                if known:
                    logit[own] = scores[r, j]
    return int(place[-1])


@njit(nogil=True, cache=True)
def _score(query: Any, keys: Any, token: Any, row: Any, logit: Any) -> None:
    bits, layout = keys  # once: taken in the loop they cost as much as a short row
    for j in range(len(token)):
        prefetch_row(bits, token[min(j + AHEAD, len(token) - 1)])
        logit[j] = dot_row(query[row[j]], bits, layout, token[j])


@njit(nogil=True, cache=True)
def _cap(logit: Any, logits: Any) -> None:
    scaling, softcap = logits
    for j in range(len(logit)):
        logit[j] *= scaling
        if softcap:
            logit[j] = softcap * np.tanh(logit[j] / softcap)


@njit(nogil=True, cache=True)
def _add_values(weight: Any, values: Any, token: Any, row: Any, out: Any) -> None:
    bits, layout = values
    for j in range(len(token)):
        prefetch_row(bits, token[min(j + AHEAD, len(token) - 1)])
        add_row(out[row[j]], weight[j], bits, layout, token[j])
