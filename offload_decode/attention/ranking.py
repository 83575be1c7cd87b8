"""The largest scores of a row that is too long to hold at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

BLOCK_SCORES = 1 << 22


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
