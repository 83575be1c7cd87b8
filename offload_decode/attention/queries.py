"""The queries of a layer, and attention to parts of its keys as states that merge: the plain torch reference
that every fast path is tested against.

Shapes: `B` batch, `H` query heads, `Hkv` KV heads (`G = H / Hkv`), `T` new tokens, `S` keys, `D` channels of
queries and keys, `Dv` of values. Everything is computed in float32 whatever the inputs are (docs/methods.md
§1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from offload_decode.attention.index_queries import IndexQueries
from offload_decode.attention.transfers import HostCopy
from offload_decode.types import AttentionState


@dataclass(frozen=True)
class Queries:
    """Queries that one layer puts to the stored prefix in one forward pass.

    `vectors [Hkv, R, D]` float32, unscaled. The R queries of a KV head are those of its `group` query heads
    for `tokens` new tokens, for every sequence of the batch: R = batch · group · tokens, tokens running
    fastest. `copy`: the same on their way to the host, where a search there was foreseen. `index`: what the
    model's own indexer asks, where it has one.
    """

    vectors: Tensor
    scaling: float
    softcap: float | None = None
    group: int = 1
    tokens: int = 1
    copy: HostCopy | None = None
    index: IndexQueries | None = None

    def sent(self) -> Queries:
        """The same, on their way to the host: work given to the device after this does not delay them."""
        return replace(self, copy=HostCopy.begin(self.vectors)) if self.vectors.is_cuda else self

    def on_host(self) -> Tensor:
        """`vectors` in host memory."""
        return self.vectors.cpu() if self.copy is None else self.copy.wait()[0]

    @property
    def batch(self) -> int:
        """Sequences in the batch."""
        return self.vectors.shape[1] // (self.group * self.tokens)

    def by_token(self) -> Tensor:
        """The vectors as `[Hkv, batch, group, tokens, D]`."""
        return self.vectors.reshape(len(self.vectors), self.batch, self.group, self.tokens, -1)

    def by_list(self) -> Tensor:
        """The vectors as `[Hkv, Q, group, D]`: a token's group together, Q = batch · tokens."""
        return self.by_token().transpose(2, 3).flatten(1, 2)

    def by_query(self, lists: Tensor) -> Tensor:
        """`lists [Hkv, Q, group or 1, ...]`, as in `by_list`, to `[Hkv, R, ...]`, shared ones repeated."""
        heads, _, members, *rest = lists.shape
        spread = lists.reshape(heads, self.batch, self.tokens, members, *rest).transpose(2, 3)
        return spread.expand(-1, -1, self.group, -1, *rest).flatten(1, 3)

    def part(self, start: int, end: int) -> Queries:
        """Queries `start:end` of every KV head, each standing for itself."""
        copy = self.copy and replace(self.copy, parts=(self.copy.parts[0][:, start:end],))
        return replace(self, vectors=self.vectors[:, start:end], group=1, tokens=1, copy=copy, index=None)

    def logits(self, scores: Tensor) -> Tensor:
        """Attention logits of inner products q·k."""
        return cap(scores * self.scaling, self.softcap)


@dataclass(frozen=True)
class CausalMask:
    """The causal mask of T consecutive queries, the last at the last of S keys: each sees the keys up to its
    own, with a `window` only the last so many, its own included.
    """

    window: int | None = None

    def seen(self, rows: slice, tokens: int, keys: int) -> slice:
        """The keys that some of these rows see."""
        first, last = keys - tokens + rows.start, keys - tokens + rows.stop
        return slice(0 if self.window is None else max(0, first - self.window + 1), last)

    def mask(self, rows: slice, tokens: int, keys: int, device: torch.device) -> Tensor:
        """Which keys of `seen` each of these rows sees, bool `[1, 1, rows, seen]`."""
        seen = self.seen(rows, tokens, keys)
        own = torch.arange(rows.start, rows.stop, device=device)[:, None] + (keys - tokens)
        key = torch.arange(seen.start, seen.stop, device=device)
        mask = key <= own
        if self.window is not None:
            mask &= own - key < self.window
        return mask[None, None]


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
    # Two empty parts: -inf minus -inf would be nan.
    share = torch.exp(first.lse - lse.masked_fill(lse.isneginf(), 0.0))
    return AttentionState(torch.lerp(second.out, first.out, share.unsqueeze(-1)), lse)


def joined(parts: Sequence[AttentionState], dim: int) -> AttentionState:
    """The states of rows that stand behind each other in a dimension."""
    if len(parts) == 1:
        return parts[0]
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
