"""The stored prefix as the attention seam sees it: select, fetch, attend, and count what that cost."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from offload_decode.kv import HostKV
from offload_decode.selectors.base import Selector
from offload_decode.types import AttentionState, StepStats

SELECTED_IDS = 1 << 23  # ids and scores in memory at once: a long question is taken in parts


class StoredPrefix:
    """Implements `offload_decode.kv.Prefix` over a store."""

    def __init__(self, host: HostKV, selector: Selector):
        self.host = host
        self.selector = selector
        self.stats = StepStats()

    @property
    def length(self) -> int:
        """Stored tokens."""
        return self.host.length

    def attend(self, layer: int, query: Tensor, scaling: float, softcap: float | None) -> AttentionState:
        """`query [B, H, T, D]` to a state over the tokens that the selector chose for each of its rows."""
        batch, heads, tokens, dim = query.shape
        kv_heads = self.selector.shape.kv_heads
        rows = query.float().reshape(batch, kv_heads, -1, dim).transpose(0, 1).reshape(kv_heads, -1, dim)

        k = self.selector.budgets[layer]
        step = rows.shape[1] if k is None else max(1, SELECTED_IDS // max(1, k * kv_heads))
        parts = [
            self._attend_rows(layer, rows[:, start : start + step], scaling, softcap)
            for start in range(0, rows.shape[1], step)
        ]
        out, lse = (torch.cat(states, dim=1) for states in zip(*parts, strict=True))
        shape = (kv_heads, batch, heads // kv_heads, tokens)
        return AttentionState(
            out.reshape(*shape, dim).transpose(0, 1).reshape(batch, heads, tokens, dim),
            lse.reshape(shape).transpose(0, 1).reshape(batch, heads, tokens),
        )

    def _attend_rows(self, layer: int, rows: Tensor, scaling: float, softcap: float | None) -> AttentionState:
        began = time.perf_counter()
        selection = self.selector.select(layer, rows)
        self.stats.search_s += time.perf_counter() - began
        chosen = self.host.length if selection.ids is None else selection.ids.shape[-1]
        queries = rows.shape[0] * rows.shape[1]
        self.stats.by_layer[layer] = self.stats.by_layer.get(layer, 0) + chosen * queries
        self.stats.selected += chosen * queries
        self.stats.rows += queries
        return self.host.attend(layer, rows, selection, scaling, softcap, self.stats)

    def take_stats(self) -> StepStats:
        """The costs since they were last taken."""
        stats, self.stats = self.stats, StepStats()
        return stats
