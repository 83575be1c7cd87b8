"""Dense attention of a few rows on hosts, over stored rows where they lie in memory.

Tokens are widened to float32 a block at a time, which stays in a core's nearest cache, and every row meets
the block there: scores, an online softmax (Milakov and Gimelshein 2018, arXiv 1805.02867), values. Torch's
kernels take float32 alone; widening a prefix for them takes longer than attending to it does here.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba import njit
from torch import Tensor

from offload_decode.attention.queries import Queries, empty_state, joined
from offload_decode.attention.rows import HeadRows, LayerRows, head_bits
from offload_decode.common.rows.arrays import Float32
from offload_decode.common.rows.compiled import exponential
from offload_decode.common.rows.loops import prefetch_row
from offload_decode.common.rows.scan import (
    BF16,
    FP16,
    FP32,
    LANES,
    QUERIES,
    ROWS,
    SUMS,
    products,
    put,
    widen_block,
)
from offload_decode.common.rows.team import cells, closure, fork
from offload_decode.types import AttentionState

PART = 1 << 10  # tokens of a task, at least: threads take them one by one
PARTS = 64  # at most, as each holds a state of its rows
TOGETHER = 256  # rows that meet a block together
BLOCK = 64  # tokens that are widened together
TOKENS = 4  # whose values are added at once; BLOCK is a multiple of it, and of ROWS
_REASSOCIATE = {"reassoc", "contract", "nsz"}  # a sum may be vectorised; NaN and infinity keep their meaning
_LAYOUTS = {torch.float32: FP32, torch.float16: FP16, torch.bfloat16: BF16}


def attend_all(
    query: Tensor, keys: HeadRows, values: HeadRows, scaling: float, softcap: float | None = None
) -> AttentionState:
    """From `query [Hkv, R, D]` to all stored tokens, on a CPU: `out [Hkv, R, Dv]`, `lse [Hkv, R]`."""
    rows = query.shape[1]
    if not rows or not len(keys[0]):
        return empty_state(query, values[0].dim)
    layer = keys.compiled, values.compiled, values[0].dim
    parts = [
        _attend_rows(query[:, start : start + TOGETHER], *layer, scaling, softcap)
        for start in range(0, rows, TOGETHER)
    ]
    return joined(parts, 1)


def attend_groups(
    query: Float32,
    keys: LayerRows,
    values: LayerRows,
    width: int,
    group: int,
    skipped: npt.NDArray[np.bool_],
    scaling: float,
    softcap: float | None = None,
) -> tuple[Float32, Float32]:
    """From `query [H, R, D]` to every `group` consecutive tokens apart, P groups of S tokens in all, without
    those that a row has `skipped [H, R, S]`: `out [P, H, R, width]`, `lse [P, H, R]`.
    """
    count, rows = query.shape[1], _padded(query)
    left_out = np.zeros((*rows.shape[:2], skipped.shape[2]), np.bool_)
    left_out[:, :count] = skipped
    out = np.zeros((-(-keys.lengths[0] // group), *rows.shape[:2], width), np.float32)
    lse = np.full(out.shape[:3], -np.inf, np.float32)
    logits = np.float32(scaling), np.float32(softcap or 0.0)
    _attend_parts(cells(), (rows, query.shape[2], keys, values, group, left_out, *logits), out, lse)
    return out[:, :, :count], lse[:, :, :count]


def attend_tensors(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, softcap: float | None = None
) -> AttentionState | None:
    """`queries.attend` for `query [B, H, 1, D]`, `key [B, Hkv, S, D]` and `value [B, Hkv, S, Dv]` where all
    rows see all keys; None where these are no rows of floats on a host, one behind the other, or where
    gradients are to flow.
    """
    keys, values = _rows_of(key), _rows_of(value)
    flows = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    if keys is None or values is None or flows:
        return None
    batch, heads, tokens, dim = query.shape
    rows = query.detach().reshape(len(keys.addresses), -1, dim)
    out, lse = _attend_rows(rows, keys, values, value.shape[-1], scaling, softcap)
    return AttentionState(out.reshape(batch, heads, tokens, -1), lse.reshape(batch, heads, tokens))


def attend_further(state: AttentionState, queries: Queries, keys: LayerRows, values: LayerRows) -> None:
    """Merge attention to further tokens into a state `[Hkv, R]`, in place; all queries see all of them."""
    width = state.out.shape[-1]
    other = _attend_rows(queries.vectors, keys, values, width, queries.scaling, queries.softcap)
    _merge(*(part.numpy() for part in (*state, *other)))


def _rows_of(part: Tensor) -> LayerRows | None:
    """None where these are no rows of floats on a host, one behind the other."""
    # Not one that is traced, or of a device.
    plain = type(part) is Tensor and part.device.type == "cpu" and part.dtype in _LAYOUTS
    _, _, token, channel = part.stride()
    length, dim = part.shape[2:]
    if not plain or not length or channel != 1 or (length > 1 and token != dim):
        return None
    return layer_rows(part)


def layer_rows(part: Tensor) -> LayerRows:
    """`part [B, Hkv, S, D]`, floats on a host, in rows that lie one behind the other and outlive these."""
    batch, heads, length, dim = part.shape
    sequence, head, _, _ = part.stride()
    first, size = part.data_ptr(), part.itemsize
    steps = [first + size * (b * sequence + h * head) for b in range(batch) for h in range(heads)]
    lengths = np.full(len(steps), length)
    return LayerRows(np.array(steps, np.int64), lengths, size * dim, _LAYOUTS[part.dtype])


def _attend_rows(
    query: Tensor, keys: LayerRows, values: LayerRows, width: int, scaling: float, softcap: float | None
) -> AttentionState:
    """From `query [H, R, D]`: `out [H, R, width]`, `lse [H, R]`."""
    count, rows = query.shape[1], _padded(query.float().numpy())
    length = int(keys.lengths[0])
    step = _step(length)
    none = np.empty((*rows.shape[:2], 0), np.bool_)
    out = np.zeros((-(-length // step), *rows.shape[:2], width), np.float32)
    lse = np.full(out.shape[:3], -np.inf, np.float32)
    logits = np.float32(scaling), np.float32(softcap or 0.0)
    _attend_layer(cells(), (rows, query.shape[2], keys, values, step, none, *logits), out, lse)
    return AttentionState(torch.from_numpy(out[0, :, :count]), torch.from_numpy(lse[0, :, :count]))


def _padded(query: Float32) -> Float32:
    """Rows as many, and as wide, as are scored at once; zeros behind those of `query [H, R, D]`."""
    heads, count, dim = query.shape
    rows = np.zeros((heads, count + -count % QUERIES, dim + -dim % LANES), np.float32)
    rows[:, :count, :dim] = query
    return rows


def state_bytes(length: int, heads: int, rows: int, value_dim: int) -> int:
    """What `attend_all` holds beside its result: a state of some rows for each part."""
    parts = -(-length // _step(length)) if length else 0
    return 4 * heads * min(rows + QUERIES, TOGETHER) * (value_dim + 1) * (parts + 4)


def _step(length: int) -> int:
    return max(PART, -(-length // PARTS))


@njit(nogil=True, cache=True)
def _attend_layer(team: Any, given: Any, out: Any, lse: Any) -> None:
    """All parts of all heads, merged in the first of `out [P, H, R, Dv]` and of `lse [P, H, R]`; `given` is
    what `_attend_task` unpacks.
    """
    _attend_parts(team, given, out, lse)
    for part in range(1, len(out)):
        _merge(out[0], lse[0], out[part], lse[part])


@njit(nogil=True, cache=True)
def _attend_parts(team: Any, given: Any, out: Any, lse: Any) -> None:
    body, data = closure(_attend_task, (given, out, lse))
    fork(team, body, data, lse.shape[0] * lse.shape[1])


@njit(nogil=True, cache=True)
def _merge(out: Any, lse: Any, other: Any, lse_of_other: Any) -> None:
    """The state of other tokens into one of the same rows, `out [H, R, Dv]` and `lse [H, R]`."""
    for head in range(lse.shape[0]):
        for r in range(lse.shape[1]):
            merge_row(out[head, r], lse[head], other[head, r], lse_of_other[head, r], r)


@njit(nogil=True, cache=True)
def _attend_task(task: int, given: Any, out: Any, lse: Any) -> None:
    rows, dim, keys, values, step, skipped, scaling, softcap = given
    part, head = task // len(rows), task % len(rows)
    own = slice(part * step, min(part * step + step, keys.lengths[0]))
    key, value = head_bits(keys, head)[own], head_bits(values, head)[own]
    how = skipped[head, :, own], scaling, softcap
    _attend_part(
        rows[head], dim, key, keys.layout, value, values.layout, *how, out[part, head], lse[part, head]
    )


@njit(nogil=True, cache=True, fastmath={"contract"})
def merge_row(out: Any, lse: Any, other: Any, lse_of_other: Any, r: int) -> None:
    """The state of another part into row `r`: `queries.merge_states`."""
    if lse_of_other == -np.inf:
        return
    highest = lse_of_other if lse[r] == -np.inf else max(lse[r], lse_of_other)
    own, more = exponential(lse[r] - highest), exponential(lse_of_other - highest)
    total = own + more
    lse[r] = highest + np.log(total)
    own, more = own / total, more / total
    for d in range(len(out)):
        out[d] = own * out[d] + more * other[d]


@njit(nogil=True, cache=True)
def _attend_part(
    rows: Any,
    dim: int,
    keys: Any,
    key_layout: int,
    values: Any,
    value_layout: int,
    skipped: Any,
    scaling: Any,
    softcap: Any,
    out: Any,
    lse: Any,
) -> None:
    """From `rows [R, W]` of `dim` channels to the tokens of one part without those of `skipped [R, S]`, or
    `[R, 0]`; a softcap of 0 is none.
    """
    # What lies behind the last token of the last block is of no weight, and must be finite.
    key, value = np.zeros((BLOCK, rows.shape[1]), np.float32), np.zeros((BLOCK, out.shape[1]), np.float32)
    weights, sums = np.zeros((len(rows), BLOCK), np.float32), np.empty(SUMS, np.float32)
    highest, total = np.full(len(rows), -np.inf, np.float32), np.zeros(len(rows), np.float32)
    for start in range(0, len(keys), BLOCK):
        tokens = min(BLOCK, len(keys) - start)
        widen_block(keys[start : start + tokens], key_layout, dim, key)
        _fetch(values, start)
        _score(key, tokens, rows, sums, weights)
        for r in range(len(rows)):
            weights[r, tokens:] = -np.inf
            _cap(weights[r, :tokens], scaling, softcap)
            for t in range(start, min(start + tokens, skipped.shape[1])):
                if skipped[r, t]:
                    weights[r, t - start] = -np.inf
            _weigh(weights[r], r, highest, total, out)
        widen_block(values[start : start + tokens], value_layout, out.shape[1], value)
        _fetch(keys, start + BLOCK)
        for r in range(0, len(rows), QUERIES):
            _add(weights, value, r, out)
    for r in range(len(rows)):
        if total[r] != 0:  # NaN as well
            lse[r] = highest[r] + np.log(total[r])
            _scale(out[r], np.float32(1) / total[r])


@njit(nogil=True, cache=True)
def _fetch(rows: Any, start: int) -> None:
    for row in range(start, min(start + BLOCK, len(rows))):
        prefetch_row(rows, row)


@njit(nogil=True, cache=True)
def _score(keys: Any, tokens: int, rows: Any, sums: Any, scores: Any) -> None:
    for first in range(0, tokens, ROWS):
        for r in range(0, len(rows), QUERIES):
            products(keys[first : first + ROWS], rows, r, sums)
            put(sums, scores, r, first, ROWS)


@njit(nogil=True, cache=True)
def _cap(scores: Any, scaling: Any, softcap: Any) -> None:
    """Inner products to logits."""
    for t in range(len(scores)):
        scores[t] *= scaling
    if softcap:
        for t in range(len(scores)):
            scores[t] = softcap * np.float32(np.tanh(scores[t] / softcap))


@njit(nogil=True, cache=True, fastmath=_REASSOCIATE)
def _weigh(logits: Any, r: int, highest: Any, total: Any, out: Any) -> None:
    """Logits of row `r` to weights beside the highest logit so far, which what was added before now meets."""
    before = highest[r]
    now = before
    for t in range(len(logits)):
        now = max(now, logits[t])
    if now == -np.inf and _nothing(logits):
        logits[:] = 0
        return
    if now > before:
        rescale = exponential(before - now)
        highest[r] = now
        total[r] *= rescale
        _scale(out[r], rescale)
    added = np.float32(0)
    for t in range(len(logits)):
        logits[t] = exponential(logits[t] - now)
        added += logits[t]
    total[r] += added


@njit(nogil=True, cache=True)
def _nothing(logits: Any) -> Any:
    """Whether all are -inf, of which none has weight; NaN is not."""
    nothing = True
    for t in range(len(logits)):
        nothing &= logits[t] == -np.inf
    return nothing


@njit(nogil=True, cache=True)
def _scale(row: Any, by: Any) -> None:
    for d in range(len(row)):
        row[d] *= by


@njit(nogil=True, cache=True, fastmath={"contract"})
def _add(weights: Any, values: Any, r: int, out: Any) -> None:
    """Adds all values to four rows from `r`, four values at a time."""
    w0, w1, w2, w3 = weights[r], weights[r + 1], weights[r + 2], weights[r + 3]
    out0, out1, out2, out3 = out[r], out[r + 1], out[r + 2], out[r + 3]
    for t in range(0, BLOCK, TOKENS):
        w00, w01, w02, w03 = w0[t], w0[t + 1], w0[t + 2], w0[t + 3]
        w10, w11, w12, w13 = w1[t], w1[t + 1], w1[t + 2], w1[t + 3]
        w20, w21, w22, w23 = w2[t], w2[t + 1], w2[t + 2], w2[t + 3]
        w30, w31, w32, w33 = w3[t], w3[t + 1], w3[t + 2], w3[t + 3]
        v0, v1, v2, v3 = values[t], values[t + 1], values[t + 2], values[t + 3]
        for d in range(out.shape[1]):
            a, b, c, e = v0[d], v1[d], v2[d], v3[d]
            out0[d] += w00 * a + w01 * b + w02 * c + w03 * e
            out1[d] += w10 * a + w11 * b + w12 * c + w13 * e
            out2[d] += w20 * a + w21 * b + w22 * c + w23 * e
            out3[d] += w30 * a + w31 * b + w32 * c + w33 * e
