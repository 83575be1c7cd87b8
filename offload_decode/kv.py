"""Where the stored keys and values live: `HostKV`, over the memory-mapped store."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from math import isqrt

import torch
from torch import Tensor

from offload_decode.attention import empty_state, softmax
from offload_decode.kernels.dense import attend_blocks
from offload_decode.kernels.pages import attend_pages, loaded_tokens
from offload_decode.queries import Queries
from offload_decode.rows import Rows, tensor_view
from offload_decode.store.reader import KVStore
from offload_decode.types import AttentionState, PageSelection, Selection, StepStats

BLOCK_TOKENS = 8192
SCORES = 1 << 22  # of one part of the rows: a handful of float32 temporaries of this size are held


class HostKV:
    """The stored prefix in host memory: chosen rows move to the device, once for each GQA group."""

    def __init__(self, store: KVStore, device: torch.device):
        self.store = store
        self.device = device
        self.length = store.manifest.n_tokens
        self._keys: dict[tuple[int, int], Rows] = {}
        self._values: dict[tuple[int, int], Rows] = {}

    def keys(self, layer: int, head: int) -> Rows:
        """The keys of one KV head, a view of the store's file."""
        if (layer, head) not in self._keys:
            self._keys[layer, head] = Rows(self.store.keys(layer, head))
        return self._keys[layer, head]

    def values(self, layer: int, head: int) -> Rows:
        """The values of one KV head, a view of the store's file."""
        if (layer, head) not in self._values:
            self._values[layer, head] = Rows(self.store.values(layer, head))
        return self._values[layer, head]

    def layer_keys(self, layer: int) -> list[Rows]:
        """The keys of every KV head of a layer."""
        return [self.keys(layer, head) for head in range(self.store.manifest.shape.kv_heads)]

    def layer_values(self, layer: int) -> list[Rows]:
        """The values of every KV head of a layer."""
        return [self.values(layer, head) for head in range(self.store.manifest.shape.kv_heads)]

    def key_norms(self, layer: int, head: int) -> Tensor:
        """Lengths of the keys, float32 `[N]` on the host."""
        return tensor_view(self.store.key_norms(layer, head))

    def attend(
        self, layer: int, queries: Queries, selection: Selection | PageSelection, stats: StepStats
    ) -> AttentionState:
        """Attend from R rows to the selected tokens of one layer: `out [Hkv, R, D]`, `lse [Hkv, R]`."""
        if isinstance(selection, PageSelection):
            return self._attend_pages(layer, queries, selection, stats)
        if selection.ids is None:
            return self._attend_all(layer, queries, stats)
        state = empty_state(queries.rows)
        kv_heads, rows, k = selection.ids.shape
        # r rows meet a union of at most min(N, r·k) tokens, and are scored against all of it.
        step = max(1, SCORES // self.length, isqrt(SCORES // max(1, k)))
        for head in range(kv_heads):
            for start in range(0, rows if k else 0, step):
                part = slice(start, start + step)
                scores = None if selection.scores is None else selection.scores[head, part]
                query, ids = queries.rows[head, part], selection.ids[head, part]
                logits, values = self._logits(layer, head, query, ids, scores, queries, stats)
                began = time.perf_counter()
                weights, state.lse[head, part] = softmax(logits)
                state.out[head, part] = weights @ values
                stats.attend_s += time.perf_counter() - began
        return state

    def _logits(
        self,
        layer: int,
        head: int,
        query: Tensor,
        ids: Tensor,
        scores: Tensor | None,
        queries: Queries,
        stats: StepStats,
    ) -> tuple[Tensor, Tensor]:
        """Rows of one KV head share the union of their U tokens, so that each is fetched once: logits
        `[r, U]`, -inf where a token is not the row's, and values `[U, D]`.
        """
        began = time.perf_counter()
        union, place = torch.unique(ids, return_inverse=True)
        pad = int(union.numel() > 0 and union[0] < 0)  # padding is -1 and sorts first
        fetch = union[pad:]
        wanted = (self.values, self.keys) if scores is None else (self.values,)
        stored = [rows(layer, head) for rows in wanted]
        values, *keys = (rows.read(fetch, self.device) for rows in stored)
        gathered = time.perf_counter()

        member = torch.full((ids.shape[0], union.numel()), -torch.inf, device=self.device)
        place = place.to(self.device)
        if scores is not None:
            member.scatter_(1, place, scores.to(self.device))
            logits = queries.logits(member[:, pad:])
        else:
            member.scatter_(1, place, 0.0)
            logits = queries.logits(query @ keys[0].T)
        stats.bytes_moved += fetch.numel() * sum(rows.row_bytes for rows in stored)
        stats.gather_s += gathered - began
        stats.attend_s += time.perf_counter() - gathered
        return logits.masked_fill(torch.isneginf(member[:, pad:]), -torch.inf), values

    def _attend_all(self, layer: int, queries: Queries, stats: StepStats) -> AttentionState:
        began = time.perf_counter()
        rows, heads = queries.rows, range(queries.rows.shape[0])
        per_head = [
            attend_blocks(rows[None, h : h + 1], self._blocks(layer, h), queries.scaling, queries.softcap)
            for h in heads
        ]
        stats.bytes_moved += len(heads) * self.length * self._row_bytes(layer)
        stats.attend_s += time.perf_counter() - began
        return AttentionState(
            torch.cat([state.out[0] for state in per_head]), torch.cat([state.lse[0] for state in per_head])
        )

    def _attend_pages(
        self, layer: int, queries: Queries, selection: PageSelection, stats: StepStats
    ) -> AttentionState:
        began = time.perf_counter()
        keys, values = self.layer_keys(layer), self.layer_values(layer)
        state = attend_selected(queries, keys, values, selection)
        tokens = loaded_tokens(selection.pages, selection.page_size, self.length)
        stats.bytes_moved += tokens * self._row_bytes(layer)
        stats.attend_s += time.perf_counter() - began
        return state

    def _row_bytes(self, layer: int) -> int:
        """What moves for the key and the value of a token of one KV head."""
        return self.keys(layer, 0).row_bytes + self.values(layer, 0).row_bytes

    def _blocks(self, layer: int, head: int) -> Iterator[tuple[Tensor, Tensor]]:
        keys, values = self.keys(layer, head), self.values(layer, head)
        for start in range(0, self.length, BLOCK_TOKENS):
            part = slice(start, start + BLOCK_TOKENS)
            yield keys.read(part, self.device)[None, None], values.read(part, self.device)[None, None]


def attend_selected(
    queries: Queries,
    keys: Sequence[Rows] | Tensor,
    values: Sequence[Rows] | Tensor,
    selection: PageSelection,
) -> AttentionState:
    """Attend from R rows to selected pages of `keys` and `values`, the stored rows of each KV head or
    `[Hkv, N, D]` on the queries' device: `out [Hkv, R, D]`, `lse [Hkv, R]`.
    """
    grouped = queries.by_list() if selection.shared else queries.rows.unsqueeze(2)
    out, lse = attend_pages(
        grouped,
        keys,
        values,
        selection.pages,
        selection.page_size,
        selection.limit,
        queries.scaling,
        queries.softcap,
    )
    if selection.shared:
        return AttentionState(queries.by_row(out), queries.by_row(lse))
    return AttentionState(out.squeeze(2), lse.squeeze(2))
