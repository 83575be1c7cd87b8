"""The step of one layer: select stored tokens, attend to them, estimate the others, merge."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offload_decode.attention.host_dense import attend_further
from offload_decode.attention.index_queries import IndexQueries
from offload_decode.attention.pages_reference import count_tokens
from offload_decode.attention.queries import Queries, joined, merge_states
from offload_decode.attention.transfers import to_device
from offload_decode.common.errors import ConfigError
from offload_decode.common.rows.arrays import Float32
from offload_decode.engine.citations import Observer, queries_of
from offload_decode.kv.generated import GeneratedKV
from offload_decode.kv.host_cache import HostKV, attend_selected, on_host
from offload_decode.selectors import unselected
from offload_decode.selectors.base import Attended, Selector
from offload_decode.selectors.budgeted import Budgeted
from offload_decode.selectors.budgets import SELECTED_IDS
from offload_decode.selectors.one_pass import OnePass
from offload_decode.selectors.registry import create
from offload_decode.selectors.unselected import Tail
from offload_decode.types import AttentionState, ModelShape, PageSelection, Selection, StepStats

Finish = Callable[[], AttentionState]
Promised = Callable[[], Sequence[tuple[AttentionState, StepStats]]]
Ask = Callable[[int, Tensor, float, float | None], Promised]
"""Begins to attend, as `Prefix.begin` does, from a float32 query on the host to every part; what is returned
waits for the state of each and what it cost.
"""


class StoredPrefix:
    """Implements `offload_decode.kv.generated.Prefix` over a store.

    watches: see what is attended to, one for each sequence of a pass; forks do not have them. spans: where
    conversations are packed into one sequence, the tokens of each that is watched. watchable: whether it can
    be seen what is attended to.
    """

    watchable = True

    def __init__(
        self, host: HostKV, chosen: Budgeted, tail: Tail | None = None, one_pass: OnePass | None = None
    ):
        self.host, self.chosen, self.tail = host, chosen, tail
        self.length = host.length  # stored tokens
        self.whole_generated = chosen.selector.whole_generated
        self.by_token = host.device.type == "cpu"
        self._kv_heads = chosen.selector.shape.kv_heads
        # What chooses and attends in one call, where there is such a thing.
        bounded = chosen.selector.bound is not None
        self.one_pass: OnePass | Selector | None = (
            chosen.selector if bounded else one_pass or OnePass.of(host, chosen, tail)
        )
        self.stats = StepStats()
        self.watches: tuple[Observer, ...] = ()
        self.spans: tuple[range, ...] = ()

    @classmethod
    def over(cls, host: HostKV, shape: ModelShape, selector: str, options: Mapping[str, Any]) -> StoredPrefix:
        """The prefix of a store as a selector of that name sees it, with options as users write them.

        Raises `ConfigError` for options that the selector does not have or cannot keep to.
        """
        chosen = create(selector, options, host, shape)
        return cls(host, chosen, unselected.create(chosen.selector))

    @property
    def selector(self) -> Selector:
        return self.chosen.selector

    @property
    def kind(self) -> Hashable:
        """Equal for prefixes that choose the same stored tokens for the same queries."""
        return self.host, type(self.selector), self.selector.options

    @property
    def remembers(self) -> bool:
        return self.selector.remembers

    def begin(
        self,
        layer: int,
        query: Tensor,
        scaling: float,
        softcap: float | None,
        index: IndexQueries | None = None,
    ) -> Finish:
        """From `query [B, H, T, D]` to a state over the tokens that the selector chooses for its rows.

        Only the copy of the query to the host begins here; the search runs in the function that is returned.
        It waits for no more than the launch of the kernels for generated tokens, and a thread of its own cost
        more than that saved (measured with a dozen launches of 6 µs). On a host the search has all cores.
        """
        queries = replace(self.grouped(query, scaling, softcap), index=index)
        return partial(self.finish, layer, queries.sent())

    def attend(self, layer: int, query: Tensor, scaling: float, softcap: float | None) -> AttentionState:
        """`begin` and what it returns, in one call."""
        return self.begin(layer, query, scaling, softcap)()

    def finish(self, layer: int, queries: Queries) -> AttentionState:
        """The state of queries that were sent, `[B, H, T, …]`."""
        count = queries.vectors.shape[1]
        watched = self._watched(queries) if self.watches else []
        step = max(queries.group, self.chosen.queries_at_once(layer, SELECTED_IDS))
        with self.host.lock:  # of several threads one searches at a time, on all cores
            if step >= count:
                return by_head(self._attend_part(layer, queries, watched), queries)
            states = []
            # In parts whose selections fit in memory; the queries of a group share a search.
            for start in range(0, count, int(step)):
                end = start + int(step)
                own = [seen[(seen >= start) & (seen < end)] - start for seen in watched]
                states.append(self._attend_part(layer, queries.part(start, end), own))
        return by_head(joined(states, 1), queries)

    def attend_token(
        self, layer: int, query: Float32, generated: GeneratedKV, scaling: float, softcap: float | None
    ) -> Float32:
        """Attend from one token on a host, `query [H, D]`, to the prefix and to all of the generated KV:
        `[H, Dv]`.
        """
        heads, dim = query.shape
        vectors = torch.from_numpy(query).view(self._kv_heads, -1, dim)
        queries = Queries(vectors, scaling, softcap, heads // self._kv_heads)
        watched = self._watched(queries) if self.watches else []
        with self.host.lock:
            state = self._attend_part(layer, queries, watched)
        attend_further(state, queries, *generated.compiled)
        return state.out.reshape(heads, -1).numpy()

    def attend_generated(
        self, layer: int, query: Tensor, generated: GeneratedKV, scaling: float, softcap: float | None
    ) -> AttentionState | None:
        """Attend to the pages of the conversation that the selector chooses, if it does."""
        queries = self.grouped(query, scaling, softcap)
        with self.host.lock:
            selection = self.selector.select_generated(layer, queries, generated)
        if selection is None:
            return None
        keys, values = generated.view()
        return by_head(attend_selected(queries, keys[0], values[0], selection), queries)

    def grouped(self, query: Tensor, scaling: float, softcap: float | None) -> Queries:
        """Of `query [B, H, T, D]`, by KV head."""
        batch, heads, tokens, dim = query.shape
        kv_heads = self._kv_heads
        # Detached: compiled attention on the host has no gradients.
        query = query.detach().float().reshape(batch, kv_heads, -1, dim)
        vectors = query.transpose(0, 1).reshape(kv_heads, -1, dim)
        return Queries(vectors, scaling, softcap, heads // kv_heads, tokens)

    def _watched(self, queries: Queries) -> list[Tensor]:
        spans = [(0, span) for span in self.spans] or [
            (sequence, range(queries.tokens)) for sequence in range(len(self.watches))
        ]
        return [
            queries_of(queries, sequence, span if watch.whole else span[-1:])
            for watch, (sequence, span) in zip(self.watches, spans, strict=True)
        ]

    def _attend_part(self, layer: int, queries: Queries, watched: Sequence[Tensor]) -> AttentionState:
        self.host.store.check_mapped(layer)
        began = time.perf_counter()
        attended = None if self.one_pass is None else self.one_pass.attend(layer, queries)
        if attended is not None:
            self.record(layer, queries, attended, time.perf_counter() - began, watched)
            return attended.state
        selection = on_host(self.chosen.select(layer, queries))
        self.stats.search_s += time.perf_counter() - began
        state = self._attend_selected(layer, queries, selection)
        for watch, last in zip(self.watches, watched, strict=True):
            watch.see(layer, last, queries, selection, state)
        return state

    def record(
        self,
        layer: int,
        queries: Queries,
        attended: Attended,
        seconds: float,
        watched: Sequence[Tensor] | None = None,
    ) -> None:
        """Count what was attended to in one call, which took so long, and tell those who watch: which rows
        each sees is `watched`, or that of all queries.
        """
        if watched is None:
            watched = self._watched(queries) if self.watches else ()
        self.stats.take(seconds, attended.searching, attended.read)
        rows = queries.vectors.shape[:2].numel()
        self._take(layer, rows, attended.tokens)
        if attended.stated is not None:
            self.stats.add_tail_error(attended.stated, rows)
            self.stats.whole_rows += attended.whole
        for watch, last in zip(self.watches, watched, strict=True):
            watch.see(layer, last, queries, attended.selection, attended.state)

    def _attend_selected(
        self, layer: int, queries: Queries, selection: Selection | PageSelection
    ) -> AttentionState:
        """With what is left out estimated, where that is asked for."""
        left_out = self._count(layer, queries, selection)
        state = self.host.attend(layer, queries, selection, self.stats)
        if self.tail is not None and left_out:
            with self.stats.timed("attend_s"):
                rest = self.tail.estimate(layer, queries, selection)
                state = merge_states(state, AttentionState(rest.out, rest.lse))
                if rest.deviation is not None:
                    relative = (rest.deviation - state.lse).exp()
                    self.stats.add_tail_error(float(relative.mean()), relative.numel())
        return state

    def _count(self, layer: int, queries: Queries, selection: Selection | PageSelection) -> int:
        """Takes a selection into the statistics; returns how many tokens it leaves out, over all queries."""
        count = queries.vectors.shape[:2].numel()
        selected = selected_tokens(selection, count, self.length)
        self._take(layer, count, selected)
        self.stats.bytes_moved += selection.moved if isinstance(selection, Selection) else 0
        return count * self.length - selected

    def _take(self, layer: int, queries: int, selected: int) -> None:
        self.stats.by_layer[layer] = self.stats.by_layer.get(layer, 0) + selected
        self.stats.selected += selected
        self.stats.rows += queries

    def fresh(self) -> StoredPrefix:
        """The same prefix for a conversation that begins."""
        forked = self.fork()
        forked.selector.reset()
        return forked

    def fork(self) -> StoredPrefix:
        """The same prefix for an independent continuation; what was built from the store stays shared."""
        chosen, own = self.chosen.fork(), self.one_pass
        return StoredPrefix(
            self.host, chosen, self.tail, own.fork(chosen) if isinstance(own, OnePass) else None
        )

    def __deepcopy__(self, memo: dict[int, object]) -> StoredPrefix:
        return self.fork()

    def take_stats(self) -> StepStats:
        """The costs since they were last taken."""
        stats, self.stats = self.stats, StepStats()
        return stats


def by_head(state: AttentionState, queries: Queries) -> AttentionState:
    """A state of queries as `[B, H, T, D]` and `[B, H, T]`."""
    kv_heads, dim = len(queries.vectors), state.out.shape[-1]
    split = (kv_heads, queries.batch, queries.group, queries.tokens)
    merged = (queries.batch, kv_heads * queries.group, queries.tokens)
    return AttentionState(
        state.out.reshape(*split, dim).transpose(0, 1).reshape(*merged, dim),
        state.lse.reshape(split).transpose(0, 1).reshape(merged),
    )


def selected_tokens(selection: Selection | PageSelection, queries: int, n_tokens: int) -> int:
    """Tokens attended to, summed over so many queries."""
    if isinstance(selection, PageSelection):
        lists, limit = selection.pages.shape[:2].numel(), selection.limit
        listed = count_tokens(selection.pages, selection.page_size, n_tokens, limit)
        return listed * queries // max(1, lists)
    if selection.ids is None:
        return queries * n_tokens
    # With numpy: torch wakes its threads for it, which takes longer.
    return int(np.count_nonzero(selection.ids.numpy() >= 0))


class ScatteredPrefix(StoredPrefix):
    """The prefix of a whole store, of which nothing is read here but windows and states.

    Every part chooses among its own tokens, with a selector and budgets of its own, so that a budget of 2% is
    2% of each part, and one of 1024 is that many of each. Merging is exact: with all tokens chosen, it is the
    attention of one process.

    Raises `ConfigError` for selectors that remember a conversation, which the parts do not know.
    """

    watchable = False

    def __init__(self, whole: StoredPrefix, ask: Ask):
        super().__init__(whole.host, whole.chosen)
        self.by_token = False
        if whole.selector.bound is not None:
            raise ConfigError(
                "error= bounds the output of a head, of which each worker sees a part: give a budget"
            )
        if whole.selector.remembers:
            raise ConfigError(
                f"selector '{whole.selector.name}' remembers a conversation, which workers with a part of "
                "the store do not know: choose another, such as topk"
            )
        if whole.selector.name == "own":
            raise ConfigError(
                "selector 'own' chooses among all tokens of a store, of which each worker has a part: choose "
                "another, such as topk"
            )
        self.ask = ask

    def begin(
        self, layer: int, query: Tensor, scaling: float, softcap: float | None, index: object = None
    ) -> Finish:
        if self.watches:
            raise ConfigError("what a store in parts attended to is not told: leave citations out")
        return partial(self._merged, query, self.ask(layer, query.detach().float().cpu(), scaling, softcap))

    def _merged(self, query: Tensor, promised: Promised) -> AttentionState:
        with self.stats.timed("attend_s"):
            parts = promised()
            state = reduce(merge_states, (state for state, _ in parts))
        for number, (_, cost) in enumerate(parts):
            self.stats.selected += cost.selected
            self.stats.rows += 0 if number else cost.rows
            self.stats.bytes_moved += cost.bytes_moved
            self.stats.add(StepStats(by_layer=cost.by_layer, attended=cost.attended))
        return AttentionState(*(to_device(part, query.device) for part in state))

    def fork(self) -> ScatteredPrefix:
        return ScatteredPrefix(self, self.ask)
