"""Where the stored keys and values live: `HostKV`, over the memory-mapped store."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Sequence
from math import isqrt
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offload_decode.attention import empty_state, softmax
from offload_decode.kernels.dense import attend_blocks
from offload_decode.kernels.pages import attend_pages, loaded_tokens
from offload_decode.queries import Queries
from offload_decode.store.reader import KVStore
from offload_decode.types import AttentionState, PageSelection, Selection, StepStats

BLOCK_TOKENS = 8192
SCORES = 1 << 22  # of one part of the rows: a handful of float32 temporaries of this size are held


class HostKV:
    """The stored prefix in host memory: `gather` moves chosen rows to the device, once for each GQA group."""

    def __init__(self, store: KVStore, device: torch.device):
        self.store = store
        self.device = device
        self.length = store.manifest.n_tokens

    def keys(self, layer: int, head: int) -> Tensor:
        """`[N, D]` on the host, a view of the store's file."""
        return tensor_view(self.store.keys(layer, head))

    def values(self, layer: int, head: int) -> Tensor:
        """`[N, D]` on the host, a view of the store's file."""
        return tensor_view(self.store.values(layer, head))

    def gather(self, rows: Tensor, ids: Tensor) -> Tensor:
        """Copy `rows[ids]` to the device as float32 `[U, D]`; pinned staging where the device is a GPU."""
        chosen = rows.index_select(0, ids)
        if self.device.type == "cuda":
            chosen = chosen.pin_memory()
        return chosen.to(self.device, non_blocking=True).float()

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
        stored = self.values(layer, head)
        values = self.gather(stored, fetch)
        keys = self.gather(self.keys(layer, head), fetch) if scores is None else None
        gathered = time.perf_counter()

        member = torch.full((ids.shape[0], union.numel()), -torch.inf, device=self.device)
        place = place.to(self.device)
        if keys is None:
            assert scores is not None
            member.scatter_(1, place, scores.to(self.device))
            logits = queries.logits(member[:, pad:])
        else:
            member.scatter_(1, place, 0.0)
            logits = queries.logits(query @ keys.T)
        moved = fetch.numel() * stored.shape[1] * stored.element_size()
        stats.bytes_moved += moved if keys is None else 2 * moved
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
        key = self.keys(layer, 0)
        stats.bytes_moved += 2 * len(heads) * key.numel() * key.element_size()
        stats.attend_s += time.perf_counter() - began
        return AttentionState(
            torch.cat([state.out[0] for state in per_head]), torch.cat([state.lse[0] for state in per_head])
        )

    def _attend_pages(
        self, layer: int, queries: Queries, selection: PageSelection, stats: StepStats
    ) -> AttentionState:
        began = time.perf_counter()
        heads = range(len(queries.rows))
        keys, values = ([read(layer, head) for head in heads] for read in (self.keys, self.values))
        state = attend_selected(queries, keys, values, selection)
        tokens = loaded_tokens(selection.pages, selection.page_size, self.length)
        stats.bytes_moved += 2 * tokens * keys[0].shape[1] * keys[0].element_size()
        stats.attend_s += time.perf_counter() - began
        return state

    def _blocks(self, layer: int, head: int) -> Iterator[tuple[Tensor, Tensor]]:
        keys, values = self.keys(layer, head), self.values(layer, head)
        for start in range(0, self.length, BLOCK_TOKENS):
            part = slice(start, start + BLOCK_TOKENS)
            yield keys[None, None, part], values[None, None, part]


def attend_selected(
    queries: Queries,
    keys: Sequence[Tensor] | Tensor,
    values: Sequence[Tensor] | Tensor,
    selection: PageSelection,
) -> AttentionState:
    """Attend from R rows to selected pages of `keys` and `values`, `[N, D]` for each KV head: `out
    [Hkv, R, D]`, `lse [Hkv, R]`.
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


def tensor_view(array: np.ndarray[Any, Any]) -> Tensor:
    """A tensor over the same memory. Read-only maps are welcome: nothing here writes to a prefix."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")
        if array.dtype.name == "bfloat16":
            return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
        return torch.from_numpy(array)


def numpy_view(tensor: Tensor) -> np.ndarray[Any, Any]:
    """A numpy array over a CPU tensor; bfloat16 becomes `ml_dtypes.bfloat16`."""
    tensor = tensor.detach().contiguous().cpu()
    if tensor.dtype is torch.bfloat16:
        import ml_dtypes

        return tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()
