"""How many bytes it takes to ask a store: arithmetic on a model's outline and a request, nothing measured."""

from __future__ import annotations

from math import isqrt

from offload_decode.attention.transfers import power_of_two
from offload_decode.indexes import registry
from offload_decode.kernels import dense, host_dense
from offload_decode.kernels.host_tokens import ENTRIES
from offload_decode.kv.host import BLOCK_TOKENS, SCORES
from offload_decode.models.outline import Outline
from offload_decode.planning.request import QUESTION_TOKENS, Workload
from offload_decode.planning.sizes import (
    attended_numbers,
    itemsize,
    layer_bytes,
    mask_bytes,
    pair_dim,
    row_bytes,
    tail_bytes,
)
from offload_decode.selection.budgets import SELECTED_IDS, pass_tokens
from offload_decode.types import ModelShape

_PAGE_SCORES = 1 << 24  # of Quest, in memory at once


def ask_bytes(outline: Outline, request: Workload, on_gpu: bool) -> int:
    """Beyond weights and pages, on the device: the tail, and what a question holds while a layer attends."""
    shape, n = outline.shape, request.tokens
    question, largest = _question(request), _largest(request, shape)
    total = request.batch * tail_bytes(shape, request.tail, outline.dtype) + layer_bytes(outline, question)
    total += mask_bytes(question, request.tail)
    # The layer that attends widens its part of the tail.
    total += request.batch * 4 * attended_numbers(shape) * request.tail
    fetched = 0
    if largest and request.selector == "quest":
        fetched = 8 * min(_PAGE_SCORES, shape.kv_heads * question * (n // request.page_size))
        if on_gpu:
            fetched += shape.kv_heads * largest * pair_dim(shape) * (4 + itemsize(outline.dtype))
    elif largest and on_gpu:
        fetched = _copied_bytes(outline, request)
    block = 0
    if None in request.budgets(shape).values():
        rows = shape.group * question
        if on_gpu:
            length = min(BLOCK_TOKENS, n)
            block = length * pair_dim(shape) * (4 + itemsize(outline.dtype))
            block += 4 * 4 * min(rows * length, dense.DEVICE_SCORES)
        else:
            block = host_dense.state_bytes(n, shape.kv_heads, rows, shape.value_dim)
    return total + max(fetched, block)


def search_bytes(outline: Outline, request: Workload, threads: int) -> int:
    """On the host, while a question is searched for: ids and scores, which are held twice when the heads are
    joined, else beside the candidates of the search or the pairs of a query and a token that are attended to.
    """
    shape, k = outline.shape, _largest(request, outline.shape)
    if request.selector != "topk" or not k:
        return 0
    rows = _part_rows(request, shape)
    ids = 12 * shape.kv_heads * rows * k
    pairs = 20 * min(max(ENTRIES, k), rows * k) + request.tokens // 8  # and a bit for each token
    searching = registry.stated(request.index).search_bytes(request.tokens, k, shape.kv_heads, rows)
    return ids + max(ids, threads * pairs, searching)


def staged_bytes(outline: Outline, request: Workload) -> int:
    """On the host of a GPU: two buffers for values on their way there, and the bookkeeping of its cache."""
    shape, k = outline.shape, _largest(request, outline.shape)
    if request.selector != "topk" or not k:
        return 0
    key, value = row_bytes(shape, request.kv, outline.dtype)
    _, union = _union(request, shape, k)
    kept = request.device_cache // max(key, value)
    # A kept row has its number and two neighbours, in a table that is at most half full.
    return 2 * power_of_two(shape.kv_heads * union * value) + 16 * kept + 4 * power_of_two(2 * kept)


def _copied_bytes(outline: Outline, request: Workload) -> int:
    """On a GPU: the values that some rows share, as they are stored and as floats, and these rows' scores."""
    shape, k = outline.shape, _largest(request, outline.shape)
    rows, union = _union(request, shape, k)
    _, value = row_bytes(shape, request.kv, outline.dtype)
    stored = value * (2 if request.device_cache else 1)  # what is kept is copied once more
    # Floats at most three times: of the rows before, of codes, and of codes and their scales.
    floats = 3 * 4 * shape.value_dim
    # Seven tensors from scores to weights, and of each selected token its place.
    return shape.kv_heads * (union * (stored + floats) + 8 * rows * k) + 7 * 4 * rows * union


def _union(request: Workload, shape: ModelShape, k: int) -> tuple[int, int]:
    """Rows that fetch together for a GPU, and the most tokens that they name."""
    rows = min(max(1, SCORES // request.tokens, isqrt(SCORES // k)), _part_rows(request, shape))
    return rows, min(request.tokens, rows * k)


def _part_rows(request: Workload, shape: ModelShape) -> int:
    """Query rows of a KV head that are searched for together."""
    held = SELECTED_IDS // (_largest(request, shape) * shape.kv_heads)
    return min(shape.group * _question(request), max(shape.group, held))


def _largest(request: Workload, shape: ModelShape) -> int:
    """The most tokens that a query row chooses; 0 where all layers are dense."""
    return max((k for k in request.budgets(shape).values() if k is not None), default=0)


def _question(request: Workload) -> int:
    """Tokens of questions that are run together: of all but room for an answer, those of a pass."""
    wanted = request.batch * max(1, request.tail - QUESTION_TOKENS)
    return min(wanted, request.batch * pass_tokens(request.pass_tokens, request.batch))
