"""Scores of every stored key, a block at a time: what selectors that look at all keys have in common.

A block of keys is moved to the device as it is stored and widened there, so that neither a copy of the keys
nor all scores of a row are ever in memory.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from offload_decode.attention.pages_host import token_scores
from offload_decode.attention.pages_reference import page_tokens
from offload_decode.attention.rows import HeadRows, Rows
from offload_decode.attention.transfers import to_host
from offload_decode.kv.host_cache import BLOCK_TOKENS
from offload_decode.types import PageSelection, Selection

BLOCK_SCORES = 1 << 22  # in memory at once


def top_scores(
    score: Callable[[slice], Tensor], shape: tuple[int, ...], length: int, k: int
) -> tuple[Tensor, Tensor]:
    """The `k` largest of `[*shape, length]` float32 scores and their ids (int64), best first: both
    `[*shape, min(k, length)]`.

    `score(part)` gives `[*shape, part]` for a slice of the ids; the slices are taken in order, so that at
    most `BLOCK_SCORES` scores (and k a row) are in memory. Equal scores come in no particular order.
    """
    k = min(k, length)
    best, ids = torch.empty(*shape, 0), torch.empty(*shape, 0, dtype=torch.int64)
    step = max(1, BLOCK_SCORES // max(1, best.shape[:-1].numel())) if k else max(1, length)
    for start in range(0, length if k else 0, step):
        part = slice(start, min(start + step, length))
        scores = score(part)
        block, place = scores.topk(min(k, scores.shape[-1]), dim=-1)
        best = torch.cat([best.to(block.device), block], dim=-1)
        ids = torch.cat([ids.to(block.device), place + start], dim=-1)
        best, place = best.topk(min(k, best.shape[-1]), dim=-1)
        ids = ids.gather(-1, place)
    return best, ids


def blocks(length: int, start: int = 0, rows: int = 1) -> Iterator[slice]:
    """Slices of at most `BLOCK_TOKENS`, of which `rows` rows have at most `BLOCK_SCORES` scores."""
    step = max(1, min(BLOCK_TOKENS, BLOCK_SCORES // rows))
    for first in range(start, length, step):
        yield slice(first, min(first + step, length))


def inner_products(query: Tensor, keys: Rows, part: slice) -> Tensor:
    """`query [R, d]` float32 with rows `part` of the keys: `[R, part]` float32."""
    # Keys on the left: for the few rows of a decoding step twice as fast as the other way round.
    return (keys.read(part, query.device) @ query.T).T


def top_tokens(score: Callable[[slice], Tensor], rows: int, length: int, k: int) -> tuple[Tensor, Tensor]:
    """As `top_scores`, for a `score` of `[rows, part]` that is never asked for more than a block.

    Scores float32 and ids int64 `[rows, min(k, length)]`, best first, on the scores' device.
    """

    def wide(part: slice) -> Tensor:
        # In place: small scores kept between two widened blocks stop the allocator from reusing these.
        first, *others = blocks(part.stop, part.start)
        begun = score(first)
        scores = begun.new_empty(rows, part.stop - part.start)
        scores[:, : first.stop - part.start] = begun
        del begun
        for block in others:
            scores[:, block.start - part.start : block.stop - part.start] = score(block)
        return scores

    return top_scores(wide, (rows,), length, k)


def top_inner_products(query: Tensor, keys: Sequence[Rows], k: int) -> Selection:
    """The `k` keys of the largest inner product with each row, and these products in float32, on the host.

    `query [Hkv, R, d]` float32; `keys` of each KV head.
    """
    found = [
        top_tokens(partial(inner_products, own, rows), len(own), len(rows), k)
        for own, rows in zip(query, keys, strict=True)
    ]
    scores, ids = to_host(*(torch.stack(parts) for parts in zip(*found, strict=True)))
    return Selection(ids, scores)


def page_token_scores(query: Tensor, keys: HeadRows, chosen: PageSelection) -> tuple[Tensor, Tensor]:
    """Tokens of selected pages with their exact inner products, on the host: ids int64 `[Hkv, Q, 1, n]`,
    padded with -1, and scores float32 `[Hkv, Q, G, n]`, for `query [Hkv, Q, G, D]` and `keys` of each KV
    head.
    """
    query, pages, limit = to_host(query, chosen.pages, chosen.limit)
    scores = token_scores(query, keys, pages, chosen.page_size, limit)
    return page_tokens(pages, chosen.page_size, len(keys[0]), limit).unsqueeze(2), scores
