"""Attention of query rows to tokens of their own on hosts, over stored rows where they lie in memory.

Nothing is copied, and nothing is widened but what is multiplied. Rows are fetched some places ahead of their
turn. Where the queries of a KV head name more tokens than a sparse visit would, neighbouring tokens are
visited together, so that what the queries share comes from the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
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


def attend_tokens(
    query: Tensor,
    keys: Sequence[Rows],
    values: Sequence[Rows],
    ids: Tensor,
    scores: Tensor | None,
    scaling: float,
    softcap: float | None = None,
) -> tuple[AttentionState, int]:
    """Attend from R rows to k tokens each: `out [Hkv, R, D]`, `lse [Hkv, R]`, and the bytes of the rows read,
    those that queries of one thread share counted once.

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

    def attend(head: int, part: slice) -> None:
        read[head, part.start] = _attend(
            queries[head, part],
            keys[head].bits,
            values[head].bits,
            (keys[head].layout, values[head].layout),
            named[head, part],
            known[head, part],
            np.float32(scaling),
            np.float32(softcap or 0),
            (ENTRIES, SPARSE),
            out[head, part],
            lse[head, part],
        )

    if k and rows:
        # The rows of a head share what they read, unless threads would be without work.
        run(attend, heads, rows, multiple=rows if heads >= pool.THREADS else 1)
    assert (read >= 0).all(), "ids are of rows that there are"
    width = values[0].row_bytes + (keys[0].row_bytes if scores is None else 0)
    return AttentionState(torch.from_numpy(out), torch.from_numpy(lse)), int(read.sum()) * width


@njit(nogil=True, cache=True)
def _attend(
    query: Any,
    keys: Any,
    values: Any,
    layouts: Any,
    ids: Any,
    scores: Any,
    scaling: Any,
    softcap: Any,
    limits: Any,
    out: Any,
    lse: Any,
) -> Any:
    """One KV head, from zeros in `out [R, D]` and -inf in `lse [R]`; how many different tokens were read, or
    -1 for an id that is out of range.
    """
    rows, k = ids.shape
    most, sparse = limits
    step = min(rows, max(1, most // k))
    token, row = np.empty(step * k, np.int64), np.empty(step * k, np.int32)
    logit = np.empty(step * k, np.float32)
    highest, total = np.empty(step, np.float32), np.empty(step, np.float64)
    seen, different = np.zeros(len(values) // 64 + 1, np.uint64), np.int64(0)
    for start in range(0, rows, step):
        part = slice(start, min(start + step, rows))
        pairs = _order(ids[part], scores[part], len(values), sparse, token, row, logit)
        if pairs < 0:
            return -1
        if scores.shape[1] == 0:
            _score(query[part], keys, layouts[0], token[:pairs], row, logit)
        _cap(logit[:pairs], scaling, softcap)
        highest[:] = -np.inf
        for j in range(pairs):
            highest[row[j]] = max(highest[row[j]], logit[j])
        total[:] = 0
        for j in range(pairs):
            logit[j] = np.exp(logit[j] - highest[row[j]])
            total[row[j]] += logit[j]
        _add_values(logit, values, layouts[1], token[:pairs], row, out[part])
        for r in range(part.stop - start):
            if total[r] != 0:  # NaN as well
                lse[start + r] = highest[r] + np.log(total[r])
                for d in range(out.shape[1]):
                    out[start + r, d] = np.float32(out[start + r, d] / total[r])
        for j in range(pairs):
            word, bit = token[j] >> 6, np.uint64(1) << np.uint64(token[j] & 63)
            different += np.int64(seen[word] & bit == 0)
            seen[word] |= bit
    return different


@njit(nogil=True, cache=True)
def _order(ids: Any, scores: Any, tokens: int, sparse: int, token: Any, row: Any, logit: Any) -> int:
    """The pairs of a query and a token to `token`, `row` and, of known scores, `logit`: as they come where
    they are few, else by neighbourhoods. Returns their number, or -1 for an id that is out of range.
    """
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
def _score(query: Any, keys: Any, layout: int, token: Any, row: Any, logit: Any) -> None:
    for j in range(len(token)):
        prefetch_row(keys, token[min(j + AHEAD, len(token) - 1)])
        logit[j] = dot_row(query[row[j]], keys, layout, token[j])


@njit(nogil=True, cache=True)
def _cap(logit: Any, scaling: Any, softcap: Any) -> None:
    for j in range(len(logit)):
        logit[j] *= scaling
        if softcap:
            logit[j] = softcap * np.tanh(logit[j] / softcap)


@njit(nogil=True, cache=True)
def _add_values(weight: Any, values: Any, layout: int, token: Any, row: Any, out: Any) -> None:
    for j in range(len(token)):
        prefetch_row(values, token[min(j + AHEAD, len(token) - 1)])
        add_row(out[row[j]], weight[j], values, layout, token[j])
