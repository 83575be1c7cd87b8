"""A long question in several forward passes: each attends to those before it, so that memory grows with a
pass and not with the square of the question.
"""

from __future__ import annotations

import torch
from torch import Tensor

from offload_decode.models.cache import PrefixCache
from offload_decode.models.loading import LoadedModel
from offload_decode.selection.budgets import pass_tokens


def run_in_passes(
    loaded: LoadedModel,
    tokens: Tensor,
    cache: PrefixCache,
    limit: int,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    every: bool = False,
) -> Tensor:
    """`LoadedModel.forward` for `tokens [B, T]`, about `limit` of them in a pass, in equal parts: the last
    token's logits `[B, V]`, or those of `every` one `[B, T, V]`.

    `attention_mask [B, covered + T]` and `position_ids [B, T]` are those of one forward pass.
    """
    batch, length = tokens.shape
    passes = -(-length // pass_tokens(limit, batch))
    covered = 0 if attention_mask is None else attention_mask.shape[1] - length
    before = cache.tail_length
    logits = []
    ends = [length * (one + 1) // passes for one in range(passes)]
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        seen = None
        if attention_mask is not None:
            seen = attention_mask[:, : covered + end]
            seen.offload_covered = getattr(attention_mask, "offload_covered", 0)  # type: ignore[attr-defined]
        positions = None if position_ids is None else position_ids[:, start:end]
        if every or end == length:
            logits.append(loaded.forward(tokens[:, start:end], cache, seen, positions, every))
        else:
            loaded.encode(tokens[:, start:end], cache, seen, positions)
    cache.join(before)
    return torch.cat(logits, dim=1) if every else logits[-1]
