"""Attention as states that merge: the plain torch reference that every fast path is tested against.

Shapes: `B` batch, `H` query heads, `Hkv` KV heads (`G = H / Hkv`), `T` new tokens, `S` keys, `D` channels of
queries and keys, `Dv` of values. Everything is computed in float32 whatever the inputs are (docs/methods.md
§1).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from offload_decode.types import AttentionState


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    mask: Tensor | None = None,
    softcap: float | None = None,
) -> AttentionState:
    """Attend to one part of the keys.

    `query [B, H, T, D]`, `key [B, Hkv, S, D]`, `value [B, Hkv, S, Dv]`, `mask` bool, True where a key may be
    seen, broadcast to `[B, 1, T, S]`. `softcap` bounds the scaled scores by `cap * tanh(score / cap)` (Gemma
    2). Returns `out [B, H, T, Dv]` and `lse [B, H, T]`; a row that sees nothing is the empty state
    `(0, -inf)`.
    """
    batch, heads, tokens, dim = query.shape
    kv_heads = key.shape[1]
    grouped = query.float().reshape(batch, kv_heads, -1, dim)
    scores = (grouped @ key.float().transpose(-1, -2)).reshape(batch, heads, tokens, key.shape[2])
    scores = cap(scores * scaling, softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    weights, lse = softmax(scores)
    out = weights.reshape(batch, kv_heads, heads // kv_heads * tokens, key.shape[2]) @ value.float()
    return AttentionState(out.reshape(batch, heads, tokens, value.shape[-1]), lse)


def cap(scores: Tensor, softcap: float | None) -> Tensor:
    """Soft-cap scaled scores; no cap is the identity."""
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def softmax(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Weights `[..., S]` and log-sum-exp `[...]` of `scores [..., S]`; rows of only -inf give zeros."""
    if scores.shape[-1] == 0:
        return scores, scores.new_full(scores.shape[:-1], -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse.unsqueeze(-1))
    return torch.where(torch.isneginf(lse).unsqueeze(-1), 0.0, weights), lse


def merge_states(first: AttentionState, second: AttentionState) -> AttentionState:
    """The state of two disjoint parts together; commutative and associative (docs/methods.md §1)."""
    lse = torch.logaddexp(first.lse, second.lse)
    # Two empty parts: -inf minus -inf would be nan, and both weights are zero.
    weigh = torch.where(torch.isneginf(lse), 0.0, lse)
    out = first.out * torch.exp(first.lse - weigh).unsqueeze(-1) + second.out * torch.exp(
        second.lse - weigh
    ).unsqueeze(-1)
    return AttentionState(out, lse)


def joined(parts: Sequence[AttentionState], dim: int) -> AttentionState:
    """The states of rows that stand behind each other in a dimension."""
    out, lse = (torch.cat(part, dim) for part in zip(*parts, strict=True))
    return AttentionState(out, lse)


def empty_state(query: Tensor, value_dim: int) -> AttentionState:
    """The state of attending to nothing, for `query [..., D]`: `out [..., value_dim]`."""
    out = torch.zeros(*query.shape[:-1], value_dim, device=query.device)
    return AttentionState(out, out.new_full(out.shape[:-1], -torch.inf))


def sink_state(sinks: Tensor, like: AttentionState) -> AttentionState:
    """The state of attention sinks `[H]` (gpt-oss): they take their share of the softmax and add no value."""
    lse = sinks.float().reshape(1, -1, 1).expand_as(like.lse)
    return AttentionState(torch.zeros_like(like.out), lse)
