"""Quest's pages on hosts: the reference of this room as compiled loops over the mapped keys and values.

Nothing is copied but a few rows at a time. Each thread of a pool makes one compiled call for its share of the
pages or lists of all KV heads, outside the interpreter's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from offload_decode.indexes.rows import pool
from offload_decode.indexes.rows.addresses import Share
from offload_decode.indexes.rows.products import LANES, QUERIES
from offload_decode.indexes.rows.scan import BRAIN, BYTES, HALF, SINGLE
from offload_decode.kernels.layer_rows import LayerRows
from offload_decode.kernels.rows import Rows, numpy_view
from offload_decode.kernels.softmax import Logits
from offload_decode.pages import host_loops
from offload_decode.pages.host_loops import Bounds, Listed, State
from offload_decode.pages.reference import SCALE_PAGES, PageBounds
from offload_decode.types import AttentionState

Array = npt.NDArray[Any]

_LAYOUTS = {torch.float16: HALF, torch.bfloat16: BRAIN, torch.float32: SINGLE, torch.int8: BYTES}


def page_scores(query: Tensor, bounds: PageBounds) -> Tensor:
    """As `reference.page_scores`."""
    heads, lists, group, dim = query.shape
    pages = bounds.lower.shape[1]
    rows = _padded(query.reshape(heads, lists * group, dim))
    queries = np.concatenate([np.maximum(rows, 0), np.minimum(rows, 0)], axis=2)
    scale = torch.empty(heads, 0, dim) if bounds.scale is None else bounds.scale
    own = Bounds(
        _bits(bounds.lower), _bits(bounds.upper), _LAYOUTS[bounds.lower.dtype], scale.contiguous().numpy()
    )
    out = np.empty((heads, lists, pages), np.float32)
    if out.size:
        _spread(
            lambda share: host_loops.score_layer(own, queries, group, share, out), heads * pages, SCALE_PAGES
        )
    return torch.from_numpy(out)


def top_pages(scores: Tensor, k: int) -> Tensor:
    """As `reference.top_pages`, without sorting what is not kept."""
    pages = scores.shape[2]
    rows = scores.flatten(0, 1).contiguous().numpy()
    out = np.empty((len(rows), min(k, pages)), np.int64)
    if out.size:
        _spread(lambda share: host_loops.keep_largest(rows, share, out), len(rows))
    return torch.from_numpy(out.reshape(*scores.shape[:2], out.shape[1]))


def token_scores(query: Tensor, keys: Sequence[Rows], pages: Tensor, page_size: int, limit: Tensor) -> Tensor:
    """Inner products q·k with the tokens of lists of pages, float32 `[Hkv, Q, G, K · S]` in the order of
    `reference.page_tokens` and -inf in its padding. Arguments as in `attend_pages`.
    """
    heads, lists, group, dim = query.shape
    queries, stored, listed = _padded(query), LayerRows.of(keys), _listed(pages, page_size, limit)
    out = np.full((heads, lists, group, pages.shape[2] * page_size), -np.inf, np.float32)
    if out.size:
        _spread(lambda share: host_loops.score_lists(queries, dim, stored, listed, share, out), heads * lists)
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
    heads, lists, group, dim = query.shape
    keys, values = _stored(keys), _stored(values)
    own = LayerRows.of(keys), LayerRows.of(values)
    queries, listed = _padded(query), _listed(pages, page_size, limit)
    logits = Logits.of(scaling, softcap)
    state = State(
        np.zeros((heads, lists, group, values[0].dim), np.float32),
        np.full((heads, lists, group), -np.inf, np.float32),
    )
    if pages.numel():
        _spread(
            lambda share: host_loops.attend_lists(queries, dim, *own, listed, logits, share, state),
            heads * lists,
        )
    return AttentionState(*map(torch.from_numpy, state))


def _spread(work: Callable[[Share], None], tasks: int, rows: int = 1) -> None:
    """One call a thread; a task is so many rows."""
    threads = min(pool.THREADS, -(-tasks // rows))
    pool.run(lambda first: work(Share(rows, first, threads)), range(threads))


def _padded(query: Tensor) -> Array:
    """float32 `[..., R, D]` with zeros behind, as `offload_decode.indexes.rows.products` takes them."""
    *heads, rows, dim = query.shape
    wide = np.zeros((*heads, rows + -rows % QUERIES, dim + -dim % LANES), np.float32)
    wide[..., :rows, :dim] = query.float().numpy()
    return wide


def _listed(pages: Tensor, page_size: int, limit: Tensor) -> Listed:
    return Listed(pages.contiguous().numpy(), page_size, limit.contiguous().numpy())


def _stored(parts: Sequence[Rows] | Tensor) -> Sequence[Rows]:
    return [Rows(numpy_view(own)) for own in parts] if isinstance(parts, Tensor) else parts


def _bits(numbers: Tensor) -> Array:
    """A tensor's memory: int8 as it is, floats as the unsigned integers that `widen_row` reads."""
    numbers = numbers.contiguous()
    if numbers.dtype is torch.int8:
        return numbers.numpy()
    return numbers.view(torch.uint32 if numbers.dtype is torch.float32 else torch.uint16).numpy()
