"""Quest's pages on hosts: the reference of this room as compiled loops over the mapped keys and values.

Nothing is copied but one row or one block at a time. Work is split over a pool of threads, a KV head and a
range of its pages or lists to a task; tasks run outside the interpreter's lock. Offsets are 64 bits wide.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba import njit
from torch import Tensor

from indexes.rows.scan import (
    BRAIN,
    HALF,
    SINGLE,
    candidate,
    ordered,
    score_and_row,
    score_rows,
    widen_row,
)
from offload_decode.kernels.parts import run
from offload_decode.kernels.rows import Rows, numpy_view
from offload_decode.pages.reference import SCALE_PAGES, PageBounds
from offload_decode.types import AttentionState

Array = npt.NDArray[Any]

_LAYOUTS = {torch.float16: HALF, torch.bfloat16: BRAIN, torch.float32: SINGLE}
_QUERIES = 4  # `score_rows` takes queries in fours


def page_scores(query: Tensor, bounds: PageBounds) -> Tensor:
    """As `reference.page_scores`."""
    heads, lists, group, dim = query.shape
    pages = bounds.lower.shape[1]
    rows = _rows(query.reshape(heads, lists * group, dim))
    rising, falling = np.maximum(rows, 0), np.minimum(rows, 0)
    lower, upper = _bits(bounds.lower), _bits(bounds.upper)
    out = np.empty((heads, lists, pages), np.float32)

    def score(head: int, part: slice) -> None:
        own = (rising[head], falling[head], group, out[head, :, part])
        if bounds.scale is None:
            _score_pages(lower[head, part], upper[head, part], _LAYOUTS[bounds.lower.dtype], *own)
        else:
            scale = bounds.scale[head, part.start // SCALE_PAGES :].numpy()
            _score_bytes(lower[head, part], upper[head, part], scale, *own)

    run(score, heads, pages, SCALE_PAGES)
    return torch.from_numpy(out)


def top_pages(scores: Tensor, k: int) -> Tensor:
    """As `reference.top_pages`, without sorting what is not kept."""
    pages = scores.shape[2]
    rows = scores.flatten(0, 1).contiguous().numpy()
    out = np.empty((len(rows), min(k, pages)), np.int64)
    if out.size:
        run(lambda _, part: _keep_largest(rows[part], out[part]), 1, len(rows))
    return torch.from_numpy(out.reshape(*scores.shape[:2], out.shape[1]))


def token_scores(query: Tensor, keys: Sequence[Rows], pages: Tensor, page_size: int, limit: Tensor) -> Tensor:
    """Inner products q·k with the tokens of lists of pages, float32 `[Hkv, Q, G, K · S]` in the order of
    `reference.page_tokens` and -inf in its padding. Arguments as in `attend_pages`.
    """
    heads, lists, group, _ = query.shape
    rows, own, places = _rows(query), pages.numpy(), limit.tolist()
    out = np.full((heads, lists, group, pages.shape[2] * page_size), -np.inf, np.float32)

    def score(head: int, part: slice) -> None:
        chosen = (own[head, part], page_size, places[head])
        _score_lists(rows[head, part], keys[head].bits, keys[head].layout, *chosen, out[head, part])

    run(score, heads, lists)
    return torch.from_numpy(out)


def attend_pages(
    query: Tensor,
    keys: Sequence[Rows] | Tensor,
    values: Sequence[Rows] | Tensor,
    pages: Tensor,
    page_size: int,
    limit: Tensor,
    scaling: float,
    softcap: float | None = None,
) -> AttentionState:
    """As `reference.attend_pages`; `keys` and `values` are the stored rows of each KV head, or a tensor."""
    heads, lists, group, _ = query.shape
    rows, own, places = _rows(query), pages.numpy(), limit.tolist()
    stored = list(zip(_stored(keys), _stored(values), strict=True))
    out = np.zeros((heads, lists, group, stored[0][1].dim), np.float32)
    lse = np.full(query.shape[:3], -np.inf, np.float32)

    def attend(head: int, part: slice) -> None:
        key, value = stored[head]
        _attend_lists(
            rows[head, part],
            key.bits,
            value.bits,
            (key.layout, value.layout),
            own[head, part],
            page_size,
            places[head],
            scaling,
            softcap or 0.0,
            out[head, part],
            lse[head, part],
        )

    run(attend, heads, lists)
    return AttentionState(torch.from_numpy(out), torch.from_numpy(lse))


def _rows(query: Tensor) -> Array:
    """float32, with as many rows in the last but one dimension as `score_rows` takes at once."""
    rows: Array = query.float().contiguous().numpy()
    padding = -rows.shape[-2] % _QUERIES
    return np.pad(rows, [(0, 0)] * (rows.ndim - 2) + [(0, padding), (0, 0)]) if padding else rows


def _stored(parts: Sequence[Rows] | Tensor) -> Sequence[Rows]:
    return [Rows(numpy_view(own)) for own in parts] if isinstance(parts, Tensor) else parts


def _bits(numbers: Tensor) -> Array:
    """A tensor's memory: int8 as it is, floats as the unsigned integers that `score_rows` reads."""
    numbers = numbers.contiguous()
    if numbers.dtype is torch.int8:
        return numbers.numpy()
    return numbers.view(torch.uint32 if numbers.dtype is torch.float32 else torch.uint16).numpy()


@njit(nogil=True, cache=True)
def _keep_largest(scores: Any, out: Any) -> None:
    """Places of the `k` largest of each row to `out [R, k]`, best first; of equal ones the earlier.

    Three histograms, of 12, 10 and 10 bits, find the k-th largest score; so k candidates are sorted and no
    more.
    """
    k, pages = out.shape[1], scores.shape[1]
    bits = np.empty(pages, np.uint32)
    candidates = np.empty(k, np.uint64)
    counts = np.empty(1 << 12, np.int64)
    for r in range(len(scores)):
        for p in range(pages):
            bits[p] = ordered(scores[r, p])
        bound, equal = np.uint32(0), k  # of the scores that begin like `bound`, `equal` are kept
        for shift, width in ((20, 12), (10, 10), (0, 10)):
            mask = (1 << width) - 1
            counts[: mask + 1] = 0
            for p in range(pages):
                if bits[p] >> (shift + width) == bound:
                    counts[(bits[p] >> shift) & mask] += 1
            digit = mask
            while counts[digit] < equal:
                equal -= counts[digit]
                digit -= 1
            bound = np.uint32((bound << width) | digit)
        found = 0
        for p in range(pages):
            if bits[p] < bound or (bits[p] == bound and equal == 0):
                continue
            equal -= bits[p] == bound
            candidates[found] = candidate(scores[r, p], p)
            found += 1
        best = np.sort(candidates)
        for j in range(k):
            out[r, j] = score_and_row(best[k - 1 - j])[1]


@njit(nogil=True, cache=True)
def _score_pages(
    lower: Any, upper: Any, layout: int, rising: Any, falling: Any, group: int, out: Any
) -> None:
    """A KV head's pages for `rising` and `falling [R, D]`; the largest of a group of rows to `out [Q, P]`."""
    above = np.empty((len(rising), SCALE_PAGES), np.float32)
    below = np.empty((len(rising), SCALE_PAGES), np.float32)
    for start in range(0, len(lower), SCALE_PAGES):
        end = min(start + SCALE_PAGES, len(lower))
        score_rows(upper[start:end], layout, rising, above)
        score_rows(lower[start:end], layout, falling, below)
        for q in range(len(out)):
            for p in range(end - start):
                best = above[q * group, p] + below[q * group, p]
                for g in range(q * group + 1, (q + 1) * group):
                    best = max(best, above[g, p] + below[g, p])
                out[q, start + p] = best


@njit(nogil=True, cache=True)
def _score_bytes(lower: Any, upper: Any, scale: Any, rising: Any, falling: Any, group: int, out: Any) -> None:
    """As `_score_pages` for int8 bounds, widened block by block."""
    wide = np.empty((2, SCALE_PAGES, lower.shape[1]), np.float32)
    for block in range(-(-len(lower) // SCALE_PAGES)):
        start = block * SCALE_PAGES
        pages = min(SCALE_PAGES, len(lower) - start)
        for p in range(pages):
            for d in range(lower.shape[1]):
                wide[0, p, d] = np.float32(lower[start + p, d]) * scale[block, d]
                wide[1, p, d] = np.float32(upper[start + p, d]) * scale[block, d]
        low, high = wide[0, :pages].view(np.uint32), wide[1, :pages].view(np.uint32)
        _score_pages(low, high, SINGLE, rising, falling, group, out[:, start : start + pages])


@njit(nogil=True, cache=True)
def _score_list(query: Any, keys: Any, layout: int, pages: Any, page_size: int, limit: int, out: Any) -> None:
    """Inner products of `query [G', D]` with the tokens of one list to `out [G, K · S]`."""
    scores = np.empty((len(query), page_size), np.float32)
    for j in range(len(pages)):
        start, place = pages[j] * page_size, j * page_size
        tokens = min(page_size, len(keys) - start, limit - place)
        if start < 0 or tokens <= 0:
            continue
        score_rows(keys[start : start + tokens], layout, query, scores)
        for g in range(len(out)):
            for t in range(tokens):
                out[g, place + t] = scores[g, t]


@njit(nogil=True, cache=True)
def _score_lists(
    query: Any, keys: Any, layout: int, pages: Any, page_size: int, limit: int, out: Any
) -> None:
    for q in range(len(query)):
        _score_list(query[q], keys, layout, pages[q], page_size, limit, out[q])


@njit(nogil=True, cache=True)
def _attend_lists(
    query: Any,
    keys: Any,
    values: Any,
    layouts: Any,
    pages: Any,
    page_size: int,
    limit: int,
    scaling: float,
    softcap: float,
    out: Any,
    lse: Any,
) -> None:
    weights = np.empty((out.shape[1], pages.shape[1] * page_size), np.float32)
    for q in range(len(out)):
        weights[:] = -np.inf
        _score_list(query[q], keys, layouts[0], pages[q], page_size, limit, weights)
        for g in range(out.shape[1]):
            lse[q, g] = _softmax(weights[g], scaling, softcap)
        _add_values(weights, values, layouts[1], pages[q], page_size, limit, out[q])


@njit(nogil=True, cache=True)
def _softmax(scores: Any, scaling: float, softcap: float) -> Any:
    """Turns inner products into weights; returns the log-sum-exp. -inf has no weight."""
    highest = -np.inf
    for t in range(len(scores)):
        if scores[t] > -np.inf:
            logit = scores[t] * scaling
            scores[t] = softcap * np.tanh(logit / softcap) if softcap else logit
            highest = max(highest, scores[t])
    if highest == -np.inf:
        scores[:] = 0
        return highest
    total = 0.0
    for t in range(len(scores)):
        scores[t] = np.exp(scores[t] - np.float32(highest))
        total += scores[t]
    for t in range(len(scores)):
        scores[t] /= total
    return highest + np.log(total)


@njit(nogil=True, cache=True, fastmath={"contract"})
def _add_values(
    weights: Any, values: Any, layout: int, pages: Any, page_size: int, limit: int, out: Any
) -> None:
    """Adds the values of one list, weighted by `weights [G, K · S]`, to `out [G, Dv]`."""
    row = np.empty(out.shape[1], np.float32)
    for j in range(len(pages)):
        start, place = pages[j] * page_size, j * page_size
        if start < 0:
            continue
        for t in range(min(page_size, len(values) - start, limit - place)):
            widen_row(values[start + t], layout, row)
            for g in range(len(out)):
                weight = weights[g, place + t]
                for d in range(len(row)):
                    out[g, d] += weight * row[d]
