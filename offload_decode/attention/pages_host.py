"""Quest's pages on hosts: the functions of `pages_reference` as compiled loops over the mapped keys and
values.

Bounds, keys and values are widened a few rows at a time, into the first-level cache, for all queries that
meet them; pages are prefetched. Each thread makes one compiled call for its share of the pages or lists of
all KV heads, outside the interpreter's lock.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from numba import njit
from torch import Tensor

from offload_decode.attention.host_tokens import Logits, State, divide, weigh
from offload_decode.attention.pages_reference import SCALE_PAGES, PageBounds
from offload_decode.attention.rows import HeadRows, Rows, head_bits, numpy_view
from offload_decode.common.rows import scan, threads
from offload_decode.common.rows.loops import prefetch_row
from offload_decode.common.rows.threads import Share
from offload_decode.types import AttentionState

BLOCK = 64  # pages whose scores for all queries stay in the first-level cache
AHEAD = 16  # pages of bounds, or tokens at the least, that are fetched before their turn
_TOGETHER = 4  # values that are added at once: `_add_four`


class Bounds(NamedTuple):
    """The bounds of a layer: lower and upper `[Hkv, P, D]`, int8 or the bits of floats, the layout of these,
    and the scales of int8, float32 `[Hkv, B, D]`, B = 0 for floats.
    """

    lower: npt.NDArray[Any]
    upper: npt.NDArray[Any]
    layout: int
    scale: npt.NDArray[np.float32]


class Listed(NamedTuple):
    """Lists of pages of `size` tokens, int64 `[Hkv, Q, K]`, -1 for none, and each head's limit `[Hkv]`."""

    pages: npt.NDArray[np.int64]
    size: int
    limit: npt.NDArray[np.int64]


@njit(nogil=True, cache=True)
def score_layer(bounds: Any, queries: Any, group: int, share: Any, out: Any) -> None:
    """Scores of a share of the pages, the largest of a group's, to `out [Hkv, Q, P]`, by `queries [Hkv, R, 2
    W]`: what meets the upper bounds, and what meets the lower ones.
    """
    heads, pages = len(out), out.shape[2]
    tasks = -(-pages // share.rows)
    scores = np.empty((queries.shape[1], BLOCK), np.float32)
    rows = np.zeros((scan.ROWS, queries.shape[2]), np.float32)
    for task in range(share.first, heads * tasks, share.step):
        head, start = task // tasks, task % tasks * share.rows
        own = Bounds(bounds.lower[head], bounds.upper[head], bounds.layout, bounds.scale[head])
        for first in range(start, min(start + share.rows, pages), BLOCK):
            count = min(BLOCK, pages - first)
            _score_block(own, queries[head], first, count, rows, scores)
            for q in range(out.shape[1]):
                _largest(scores[q * group : (q + 1) * group], out[head, q, first : first + count])


@njit(nogil=True, cache=True)
def _score_block(bounds: Any, queries: Any, start: int, count: int, rows: Any, scores: Any) -> None:
    lower, upper, layout, scale = bounds
    sums = np.empty(scan.SUMS, np.float32)
    for first in range(0, count, scan.ROWS):
        there = min(scan.ROWS, count - first)
        pages = slice(start + first, start + first + there)
        for page in range(pages.start + AHEAD, pages.stop + AHEAD):
            prefetch_row(upper, page)
            prefetch_row(lower, page)
        if len(scale):
            _widen_codes((upper[pages], lower[pages]), scale[pages.start // SCALE_PAGES], rows)
        else:
            _widen_floats(lower[pages], upper[pages], layout, rows)
        for g in range(0, len(queries), scan.QUERIES):
            scan.products(rows, queries, g, sums)
            scan.put(sums, scores, g, first, there)


# Functions of their own: see `common.rows.loops`.


@njit(nogil=True, cache=True)
def _widen_floats(lower: Any, upper: Any, layout: int, rows: Any) -> None:
    dim, half = lower.shape[1] // (4 if layout == scan.FP32 else 2), rows.shape[1] // 2
    for r in range(len(lower)):
        scan.widen_row(upper[r], layout, rows[r, :dim])
        scan.widen_row(lower[r], layout, rows[r, half : half + dim])


@njit(nogil=True, cache=True)
def _widen_codes(sides: Any, scale: Any, rows: Any) -> None:
    """Upper and lower bounds; one loop for both, as LLVM takes many channels at a time in the first alone."""
    dim, half = len(scale), rows.shape[1] // 2
    for side in range(2):
        codes = sides[side]
        for r in range(len(codes)):
            _widen_scaled(codes[r], scale, rows[r, side * half : side * half + dim])


@njit(nogil=True, cache=True)
def _widen_scaled(codes: Any, scale: Any, out: Any) -> None:
    for d in range(len(out)):
        out[d] = np.float32(np.int8(codes[d])) * scale[d]


@njit(nogil=True, cache=True)
def _largest(scores: Any, out: Any) -> None:
    out[:] = scores[0, : len(out)]
    for g in range(1, len(scores)):
        for p in range(len(out)):
            out[p] = max(out[p], scores[g, p])


@njit(nogil=True, cache=True)
def keep_largest(scores: Any, share: Any, out: Any) -> None:
    """Places of the `k` largest of a share of the rows `[R, P]` to `out [R, k]`, best first; of equal ones
    the earlier.

    Three histograms, of 12, 10 and 10 bits, find the k-th largest score; so k candidates are sorted and no
    more.
    """
    k, pages = out.shape[1], scores.shape[1]
    bits = np.empty(pages, np.uint32)
    candidates = np.empty(k, np.uint64)
    counts = np.empty(1 << 12, np.int64)
    for r in range(share.first, len(scores), share.step):
        for p in range(pages):
            bits[p] = scan.ordered(scores[r, p])
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
            candidates[found] = scan.candidate(scores[r, p], p)
            found += 1
        best = np.sort(candidates)
        for j in range(k):
            out[r, j] = scan.score_and_row(best[k - 1 - j])[1]


@njit(nogil=True, cache=True)
def score_lists(queries: Any, dim: int, keys: Any, listed: Any, share: Any, out: Any) -> None:
    """Inner products of `queries [Hkv, Q, R, W]`, of which `dim` channels are there, with the tokens of a
    share of the lists, to `out [Hkv, Q, G, K · S]`, which holds -inf.
    """
    lists = out.shape[1]
    for task in range(share.first, len(out) * lists, share.step):
        head, q = task // lists, task % lists
        _score_list(
            queries[head, q],
            dim,
            head_bits(keys, head),
            keys.layout,
            listed.pages[head, q],
            listed.size,
            listed.limit[head],
            out[head, q],
        )


@njit(nogil=True, cache=True)
def attend_lists(
    queries: Any, dim: int, keys: Any, values: Any, listed: Any, logits: Any, share: Any, state: Any
) -> None:
    """Attends from `queries [Hkv, Q, R, W]` to a share of the lists."""
    lists, group = state.lse.shape[1:]
    size, weights = listed.size, np.empty((group, listed.pages.shape[2] * listed.size), np.float32)
    for task in range(share.first, len(queries) * lists, share.step):
        head, q = task // lists, task % lists
        pages, limit, out = listed.pages[head, q], listed.limit[head], state.out[head, q]
        weights[:] = -np.inf
        _score_list(queries[head, q], dim, head_bits(keys, head), keys.layout, pages, size, limit, weights)
        totals = np.empty(group, np.float64)
        for g in range(group):
            state.lse[head, q, g], totals[g] = weigh(weights[g], logits)
        _add_values(weights, head_bits(values, head), values.layout, pages, size, limit, out)
        for g in range(group):
            divide(out[g], totals[g])


@njit(nogil=True, cache=True)
def _score_list(
    queries: Any, dim: int, keys: Any, layout: int, pages: Any, size: int, limit: int, scores: Any
) -> None:
    """Inner products of `queries [R, W]` with the tokens of one list to `scores [G, K · S]`."""
    ahead = -(-AHEAD // size)
    rows, sums = np.zeros((scan.ROWS, queries.shape[1]), np.float32), np.empty(scan.SUMS, np.float32)
    for j in range(len(pages)):
        start, place = pages[j] * size, j * size
        after = pages[min(j + ahead, len(pages) - 1)] * size
        tokens = min(size, len(keys) - start, limit - place) if start >= 0 else 0
        for first in range(0, tokens, scan.ROWS):
            there = min(scan.ROWS, tokens - first)
            for r in range(there):
                prefetch_row(keys, after + first + r)
                scan.widen_row(keys[start + first + r], layout, rows[r, :dim])
            for g in range(0, len(queries), scan.QUERIES):
                scan.products(rows, queries, g, sums)
                scan.put(sums, scores, g, place + first, there)


@njit(nogil=True, cache=True)
def _add_values(weights: Any, values: Any, layout: int, pages: Any, size: int, limit: int, out: Any) -> None:
    """Adds the values of one list, weighted by `weights [G, K · S]`, to `out [G, Dv]`."""
    rows, ahead = np.zeros((_TOGETHER, out.shape[1]), np.float32), -(-AHEAD // size)
    four = np.zeros((len(out), _TOGETHER), np.float32)
    for j in range(len(pages)):
        start, place = pages[j] * size, j * size
        after = pages[min(j + ahead, len(pages) - 1)] * size
        tokens = min(size, len(values) - start, limit - place) if start >= 0 else 0
        for first in range(0, tokens, _TOGETHER):
            there = min(_TOGETHER, tokens - first)
            for r in range(there):
                prefetch_row(values, after + first + r)
                scan.widen_row(values[start + first + r], layout, rows[r])
            for r in range(there, _TOGETHER):
                rows[r] = 0
            for g in range(len(out)):
                for r in range(_TOGETHER):
                    four[g, r] = weights[g, place + first + r] if r < there else np.float32(0)
            for g in range(len(out)):
                _add_four(four[g], rows, out[g])


@njit(nogil=True, cache=True, fastmath={"contract"})
def _add_four(weights: Any, rows: Any, out: Any) -> None:
    a, b, c, d = weights[0], weights[1], weights[2], weights[3]
    for i in range(len(out)):
        out[i] += a * rows[0, i] + b * rows[1, i] + c * rows[2, i] + d * rows[3, i]


Array = npt.NDArray[Any]

_FLOATS = {torch.float16: scan.FP16, torch.bfloat16: scan.BF16, torch.float32: scan.FP32}
_LAYOUTS = _FLOATS | {torch.int8: scan.INT8}


def page_scores(query: Tensor, bounds: PageBounds, corner: float = 1.0) -> Tensor:
    """As `pages_reference.page_scores`."""
    heads, lists, group, dim = query.shape
    pages = bounds.lower.shape[1]
    rows = _padded(query.reshape(heads, lists * group, dim))
    rising, falling, near, far = np.maximum(rows, 0), np.minimum(rows, 0), (1 + corner) / 2, (1 - corner) / 2
    # What meets the upper bounds and what the lower ones, narrowed to their corner.
    queries = np.concatenate([near * rising + far * falling, near * falling + far * rising], axis=2)
    scale = torch.empty(heads, 0, dim) if bounds.scale is None else bounds.scale
    own = Bounds(
        _bits(bounds.lower), _bits(bounds.upper), _LAYOUTS[bounds.lower.dtype], scale.contiguous().numpy()
    )
    out = np.empty((heads, lists, pages), np.float32)
    if out.size:
        _spread(lambda share: score_layer(own, queries, group, share, out), heads * pages, SCALE_PAGES)
    return torch.from_numpy(out)


def top_pages(scores: Tensor, k: int) -> Tensor:
    """As `pages_reference.top_pages`, without sorting what is not kept."""
    pages = scores.shape[2]
    rows = scores.flatten(0, 1).contiguous().numpy()
    out = np.empty((len(rows), min(k, pages)), np.int64)
    if out.size:
        _spread(lambda share: keep_largest(rows, share, out), len(rows))
    return torch.from_numpy(out.reshape(*scores.shape[:2], out.shape[1]))


def token_scores(query: Tensor, keys: HeadRows, pages: Tensor, page_size: int, limit: Tensor) -> Tensor:
    """Inner products q·k with the tokens of lists of pages, float32 `[Hkv, Q, G, K · S]` in the order of
    `page_tokens` and -inf in its padding. Arguments as in `attend_pages`.
    """
    heads, lists, group, dim = query.shape
    queries, stored, listed = _padded(query), keys.compiled, _listed(pages, page_size, limit)
    out = np.full((heads, lists, group, pages.shape[2] * page_size), -np.inf, np.float32)
    if out.size:
        _spread(lambda share: score_lists(queries, dim, stored, listed, share, out), heads * lists)
    return torch.from_numpy(out)


def attend_pages(
    query: Tensor,
    keys: HeadRows | Tensor,
    values: HeadRows | Tensor,
    pages: Tensor,
    page_size: int,
    limit: Tensor,
    scaling: float,
    softcap: float | None = None,
) -> AttentionState:
    """As `pages_reference.attend_pages`, of the stored rows of each KV head, or a tensor."""
    heads, lists, group, dim = query.shape
    keys, values = (
        HeadRows(Rows(numpy_view(own)) for own in side) if isinstance(side, Tensor) else side
        for side in (keys, values)
    )
    queries, listed = _padded(query), _listed(pages, page_size, limit)
    logits = Logits.of(scaling, softcap)
    state = State.empty(heads, lists, group, values[0].dim)
    if pages.numel():
        stored = keys.compiled, values.compiled
        _spread(
            lambda share: attend_lists(queries, dim, *stored, listed, logits, share, state), heads * lists
        )
    return AttentionState(*map(torch.from_numpy, state))


def _spread(work: Callable[[Share], None], tasks: int, rows: int = 1) -> None:
    """One call a thread; a task is so many rows."""
    workers = min(threads.THREADS, -(-tasks // rows))
    threads.run(lambda first: work(Share(rows, first, workers)), range(workers))


def _padded(query: Tensor) -> Array:
    """float32 `[..., R, D]` with zeros behind, as `offload_decode.common.rows.scan` takes them."""
    *heads, rows, dim = query.shape
    wide = np.zeros((*heads, rows + -rows % scan.QUERIES, dim + -dim % scan.LANES), np.float32)
    wide[..., :rows, :dim] = query.float().numpy()
    return wide


def _listed(pages: Tensor, page_size: int, limit: Tensor) -> Listed:
    return Listed(pages.contiguous().numpy(), page_size, limit.contiguous().numpy())


def _bits(numbers: Tensor) -> Array:
    """A tensor's memory as bytes."""
    return numbers.contiguous().view(torch.uint8).numpy()
