"""The stored prefix as the attention seam sees it: select, fetch, attend, and count what that cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from offload_decode.attention.queries import Queries
from offload_decode.attention.states import merge_states
from offload_decode.kv.host import HostKV, attend_selected
from offload_decode.kv.tail import TailKV
from offload_decode.pages.reference import count_tokens
from offload_decode.selection.budgets import SELECTED_IDS
from offload_decode.selection.selector import Selector
from offload_decode.tails.base import Tail
from offload_decode.types import AttentionState, PageSelection, Selection, StepStats


class StoredPrefix:
    """Implements `offload_decode.kv.tail.Prefix` over a store."""

    def __init__(self, host: HostKV, selector: Selector):
        self.host = host
        self.selector = selector
        self.stats = StepStats()

    @property
    def length(self) -> int:
        """Stored tokens."""
        return self.host.length

    @property
    def remembers(self) -> bool:
        """As its selector does."""
        return self.selector.remembers

    def begin(
        self, layer: int, query: Tensor, scaling: float, softcap: float | None
    ) -> Callable[[], AttentionState]:
        """`query [B, H, T, D]` to a state over the tokens that the selector chose for each of its rows.

        What is begun is the query's way to the host. The search runs in place, when what is returned is
        called. It then waits for no more than the launch of the tail's kernels, and where a dozen launches of
        6 µs stood in for these, another thread for it cost more than it saved. On a host it has all cores.
        """
        return partial(self._finish, layer, self._queries(query, scaling, softcap).sent())

    def attend(self, layer: int, query: Tensor, scaling: float, softcap: float | None) -> AttentionState:
        """`begin` and its end, for callers that have nothing to do between."""
        return self.begin(layer, query, scaling, softcap)()

    def _finish(self, layer: int, queries: Queries) -> AttentionState:
        states = [self._attend_rows(layer, part) for part in self._parts(layer, queries)]
        out, lse = (torch.cat(parts, dim=1) for parts in zip(*states, strict=True))
        return _by_head(AttentionState(out, lse), queries)

    def attend_tail(
        self, layer: int, query: Tensor, tail: TailKV, scaling: float, softcap: float | None
    ) -> AttentionState | None:
        """Attend to the pages of the conversation that the selector chooses, if it does."""
        queries = self._queries(query, scaling, softcap)
        selection = self.selector.select_tail(layer, queries, tail)
        if selection is None:
            return None
        keys, values = tail.view()
        return _by_head(attend_selected(queries, keys[0], values[0], selection), queries)

    def _queries(self, query: Tensor, scaling: float, softcap: float | None) -> Queries:
        batch, heads, tokens, dim = query.shape
        kv_heads = self.selector.shape.kv_heads
        # Detached: compiled attention on the host has no gradients.
        query = query.detach().float().reshape(batch, kv_heads, -1, dim)
        rows = query.transpose(0, 1).reshape(kv_heads, -1, dim)
        return Queries(rows, scaling, softcap, heads // kv_heads, tokens)

    def _parts(self, layer: int, queries: Queries) -> Iterator[Queries]:
        k, rows = self.selector.budgets[layer], queries.rows.shape[1]
        if k is None or not self.selector.per_row:
            yield queries
            return
        # The rows of a group share a search and what it fetches.
        step = max(queries.group, SELECTED_IDS // max(1, k * queries.rows.shape[0]))
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
        self.stats.bytes_moved += selection.moved if isinstance(selection, Selection) else 0
        state = self.host.attend(layer, queries, selection, self.stats)
        if self.selector.tail is None or chosen == rows * self.length:
            return state
        return self._with_tail(self.selector.tail, state, layer, queries, selection)

    def _with_tail(
        self,
        tail: Tail,
        state: AttentionState,
        layer: int,
        queries: Queries,
        selection: Selection | PageSelection,
    ) -> AttentionState:
        began = time.perf_counter()
        rest = tail.estimate(layer, queries, selection)
        state = merge_states(state, AttentionState(rest.out, rest.lse))
        if rest.deviation is not None:
            relative = (rest.deviation - state.lse).exp()
            self.stats.add_tail_error(float(relative.mean()), relative.numel())
        self.stats.attend_s += time.perf_counter() - began
        return state

    def fresh(self) -> StoredPrefix:
        """The same prefix for a conversation that begins."""
        selector = self.selector.fork()
        selector.reset()
        return StoredPrefix(self.host, selector)

    def take_stats(self) -> StepStats:
        """The costs since they were last taken."""
        stats, self.stats = self.stats, StepStats()
        return stats


def _by_head(state: AttentionState, queries: Queries) -> AttentionState:
    """A state of rows as `[B, H, T, D]` and `[B, H, T]`."""
    kv_heads, dim = len(queries.rows), state.out.shape[-1]
    split = (kv_heads, queries.batch, queries.group, queries.tokens)
    merged = (queries.batch, kv_heads * queries.group, queries.tokens)
    return AttentionState(
        state.out.reshape(*split, dim).transpose(0, 1).reshape(*merged, dim),
        state.lse.reshape(split).transpose(0, 1).reshape(merged),
    )


def selected_tokens(selection: Selection | PageSelection, rows: int, n_tokens: int) -> int:
    """Tokens attended to, summed over `rows` query rows."""
    if isinstance(selection, PageSelection):
        lists, limit = selection.pages.shape[:2].numel(), selection.limit
        listed = count_tokens(selection.pages, selection.page_size, n_tokens, limit)
        return listed * rows // max(1, lists)
    if selection.ids is None:
        return rows * n_tokens
    return int((selection.ids >= 0).sum())
