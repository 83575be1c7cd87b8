"""The stored prefix as the attention seam sees it: select, fetch, attend, and count what that cost."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch import Tensor

from offload_decode.kv import HostKV
from offload_decode.paging import page_tokens
from offload_decode.queries import Queries
from offload_decode.selectors.base import Selector
from offload_decode.types import AttentionState, PageSelection, Selection, StepStats

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
        queries = Queries(rows, scaling, softcap, heads // kv_heads, tokens)

        states = [self._attend_rows(layer, part) for part in self._parts(layer, queries)]
        out, lse = (torch.cat(parts, dim=1) for parts in zip(*states, strict=True))
        shape = (kv_heads, batch, heads // kv_heads, tokens)
        return AttentionState(
            out.reshape(*shape, dim).transpose(0, 1).reshape(batch, heads, tokens, dim),
            lse.reshape(shape).transpose(0, 1).reshape(batch, heads, tokens),
        )

    def _parts(self, layer: int, queries: Queries) -> Iterator[Queries]:
        k, rows = self.selector.budgets[layer], queries.rows.shape[1]
        if k is None or not self.selector.per_row:
            yield queries
            return
        step = max(1, SELECTED_IDS // max(1, k * queries.rows.shape[0]))
        if step >= rows:
            yield queries
            return
        for start in range(0, rows, step):
            yield queries.part(start, start + step)

    def _attend_rows(self, layer: int, queries: Queries) -> AttentionState:
        began = time.perf_counter()
        selection = self.selector.select(layer, queries)
        self.stats.search_s += time.perf_counter() - began
        rows = queries.rows.shape[0] * queries.rows.shape[1]
        chosen = selected_tokens(selection, rows, self.host.length)
        self.stats.by_layer[layer] = self.stats.by_layer.get(layer, 0) + chosen
        self.stats.selected += chosen
        self.stats.rows += rows
        return self.host.attend(layer, queries, selection, self.stats)

    def fresh(self) -> StoredPrefix:
        """The same prefix for a conversation that begins."""
        selector = self.selector.fork()
        selector.reset()
        return StoredPrefix(self.host, selector)

    def take_stats(self) -> StepStats:
        """The costs since they were last taken."""
        stats, self.stats = self.stats, StepStats()
        return stats


def selected_tokens(selection: Selection | PageSelection, rows: int, n_tokens: int) -> int:
    """Tokens attended to, summed over `rows` query rows."""
    if isinstance(selection, PageSelection):
        ids = page_tokens(selection.pages, selection.page_size, n_tokens, selection.limit)
        return int((ids >= 0).sum()) * rows // max(1, ids.shape[0] * ids.shape[1])
    if selection.ids is None:
        return rows * n_tokens
    return int((selection.ids >= 0).sum())
