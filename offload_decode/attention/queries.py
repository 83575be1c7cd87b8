"""The queries of one layer, with what turns their inner products into attention logits."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from offload_decode.attention.state import cap
from offload_decode.attention.transfers import HostCopy


@dataclass(frozen=True)
class Queries:
    """Queries that one layer puts to the stored prefix in one forward pass.

    `rows [Hkv, R, D]` float32, unscaled. The R rows of a KV head are its `group` query heads times `tokens`
    new tokens, for every sequence of the batch: R = batch · group · tokens, tokens running fastest. `copy`:
    the same rows on their way to the host, where a search there was foreseen.
    """

    rows: Tensor
    scaling: float
    softcap: float | None = None
    group: int = 1
    tokens: int = 1
    copy: HostCopy | None = None

    def sent(self) -> Queries:
        """The same, on their way to the host: work given to the device after this does not delay them."""
        return replace(self, copy=HostCopy.begin(self.rows)) if self.rows.is_cuda else self

    def on_host(self) -> Tensor:
        """`rows` in host memory."""
        return self.rows.cpu() if self.copy is None else self.copy.wait()[0]

    @property
    def batch(self) -> int:
        """Sequences in the batch."""
        return self.rows.shape[1] // (self.group * self.tokens)

    def by_token(self) -> Tensor:
        """The rows as `[Hkv, batch, group, tokens, D]`."""
        return self.rows.reshape(len(self.rows), self.batch, self.group, self.tokens, -1)

    def by_list(self) -> Tensor:
        """The rows as `[Hkv, Q, group, D]`: a token's group together, Q = batch · tokens."""
        return self.by_token().transpose(2, 3).flatten(1, 2)

    def by_row(self, lists: Tensor) -> Tensor:
        """`lists [Hkv, Q, group or 1, ...]`, as in `by_list`, to `[Hkv, R, ...]`, shared ones repeated."""
        heads, _, members, *rest = lists.shape
        spread = lists.reshape(heads, self.batch, self.tokens, members, *rest).transpose(2, 3)
        return spread.expand(-1, -1, self.group, -1, *rest).flatten(1, 3)

    def part(self, start: int, end: int) -> Queries:
        """Rows `start:end`, each standing for itself."""
        copy = self.copy and replace(self.copy, parts=(self.copy.parts[0][:, start:end],))
        return replace(self, rows=self.rows[:, start:end], group=1, tokens=1, copy=copy)

    def logits(self, scores: Tensor) -> Tensor:
        """Attention logits of inner products q·k."""
        return cap(scores * self.scaling, self.softcap)


@dataclass(frozen=True)
class Places:
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
