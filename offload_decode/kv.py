"""Where keys and values live: `TailKV` on the device, `HostKV` in the memory-mapped store, one seam between
them.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from math import isqrt
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from offload_decode.attention import cap, empty_state, softmax
from offload_decode.kernels.dense import attend_blocks
from offload_decode.store.reader import KVStore
from offload_decode.types import AttentionState, Selection, StepStats

BLOCK_TOKENS = 8192
SCORES = 1 << 22  # of one part of the rows: a handful of float32 temporaries of this size are held


class Prefix(Protocol):
    """What stands before the tail: a stored corpus (decoding) or what is written of it so far (prefill)."""

    @property
    def length(self) -> int:
        """Tokens in the prefix."""
        ...

    def attend(self, layer: int, query: Tensor, scaling: float, softcap: float | None) -> AttentionState:
        """Attend from `query [B, H, T, D]` to the prefix of one full-attention layer; every row sees all of
        it.
        """
        ...


class TailKV:
    """Keys and values of the question and of generated tokens: `[B, Hkv, S, D]`, preallocated, grown by
    doubling.
    """

    def __init__(self) -> None:
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self.length = 0

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Add `[B, Hkv, T, D]` at the end."""
        end = self.length + keys.shape[2]
        self._keys = self._grown(self._keys, keys, end)
        self._values = self._grown(self._values, values, end)
        self._keys[:, :, self.length : end] = keys
        self._values[:, :, self.length : end] = values
        self.length = end

    def _grown(self, buffer: Tensor | None, like: Tensor, needed: int) -> Tensor:
        if buffer is not None and buffer.shape[2] >= needed:
            return buffer
        batch, heads, _, dim = like.shape
        grown = like.new_empty(batch, heads, max(64, 2 * needed), dim)
        if buffer is not None:
            grown[:, :, : self.length] = buffer[:, :, : self.length]
        return grown

    def view(self) -> tuple[Tensor, Tensor]:
        """Keys and values so far, without a copy; only after the first `append`."""
        assert self._keys is not None, "nothing was appended"
        assert self._values is not None
        return self._keys[:, :, : self.length], self._values[:, :, : self.length]

    def fork(self) -> TailKV:
        """An independent copy."""
        copy = TailKV()
        if self._keys is not None and self._values is not None:
            copy._keys, copy._values, copy.length = self._keys.clone(), self._values.clone(), self.length
        return copy

    def crop(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        assert 0 <= length <= self.length
        self.length = length

    def rows(self, index: Tensor) -> None:
        """Reorder, repeat or drop batch rows: `index` int64 over the present rows."""
        if self._keys is not None and self._values is not None:
            self._keys = self._keys.index_select(0, index.to(self._keys.device))
            self._values = self._values.index_select(0, index.to(self._values.device))


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
        self,
        layer: int,
        query: Tensor,
        selection: Selection,
        scaling: float,
        softcap: float | None,
        stats: StepStats,
    ) -> AttentionState:
        """Attend from `query [Hkv, R, D]` to the selected tokens of one layer: `out [Hkv, R, D]`, `lse
        [Hkv, R]`.
        """
        if selection.ids is None:
            return self._attend_all(layer, query, scaling, softcap, stats)
        state = empty_state(query)
        kv_heads, rows, k = selection.ids.shape
        # r rows meet a union of at most min(N, r·k) tokens, and are scored against all of it.
        step = max(1, SCORES // self.length, isqrt(SCORES // max(1, k)))
        for head in range(kv_heads):
            for start in range(0, rows if k else 0, step):
                part = slice(start, start + step)
                scores = None if selection.scores is None else selection.scores[head, part]
                out, lse = self._attend_rows(
                    layer, head, query[head, part], selection.ids[head, part], scores, scaling, softcap, stats
                )
                state.out[head, part], state.lse[head, part] = out, lse
        return state

    def _attend_rows(
        self,
        layer: int,
        head: int,
        query: Tensor,
        ids: Tensor,
        scores: Tensor | None,
        scaling: float,
        softcap: float | None,
        stats: StepStats,
    ) -> tuple[Tensor, Tensor]:
        """Rows of one KV head share the union of their tokens, so that each is fetched once; non-members
        are masked.
        """
        began = time.perf_counter()
        union, place = torch.unique(ids, return_inverse=True)
        pad = int(union[0] < 0)  # padding is -1 and sorts first
        fetch = union[pad:]
        stored = self.values(layer, head)
        values = self.gather(stored, fetch)
        keys = self.gather(self.keys(layer, head), fetch) if scores is None else None
        moved = fetch.numel() * stored.shape[1] * stored.element_size()
        gathered = time.perf_counter()

        member = torch.full((ids.shape[0], union.numel()), -torch.inf, device=self.device)
        place = place.to(self.device)
        if keys is None:
            assert scores is not None
            member.scatter_(1, place, scores.to(self.device))
            logits = cap(member[:, pad:] * scaling, softcap)
        else:
            member.scatter_(1, place, 0.0)
            logits = cap(query @ keys.T * scaling, softcap) + member[:, pad:]
        weights, lse = softmax(logits.masked_fill(torch.isneginf(member[:, pad:]), -torch.inf))
        out = weights @ values
        stats.bytes_moved += moved if keys is None else 2 * moved
        stats.gather_s += gathered - began
        stats.attend_s += time.perf_counter() - gathered
        return out, lse

    def _attend_all(
        self, layer: int, query: Tensor, scaling: float, softcap: float | None, stats: StepStats
    ) -> AttentionState:
        began = time.perf_counter()
        heads = range(query.shape[0])
        per_head = [
            attend_blocks(query[None, h : h + 1], self._blocks(layer, h), scaling, softcap) for h in heads
        ]
        key = self.keys(layer, 0)
        stats.bytes_moved += 2 * len(heads) * key.numel() * key.element_size()
        stats.attend_s += time.perf_counter() - began
        return AttentionState(
            torch.cat([state.out[0] for state in per_head]), torch.cat([state.lse[0] for state in per_head])
        )

    def _blocks(self, layer: int, head: int) -> Iterator[tuple[Tensor, Tensor]]:
        keys, values = self.keys(layer, head), self.values(layer, head)
        for start in range(0, self.length, BLOCK_TOKENS):
            part = slice(start, start + BLOCK_TOKENS)
            yield keys[None, None, part], values[None, None, part]


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
