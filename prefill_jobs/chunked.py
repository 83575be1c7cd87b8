"""Chunked prefill: model to store in memory that does not grow with the corpus.

Each chunk attends to itself causally and to what its method chooses of everything before it, which is read
back from the store block by block and merged by log-sum-exp (docs/methods.md §1), so that a dense prefill in
chunks equals one that is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offload_decode.attention.queries import Queries
from offload_decode.kernels.dense import attend_blocks
from offload_decode.kernels.rows import Rows, numpy_view, tensor_view
from offload_decode.kv.host import BLOCK_TOKENS
from offload_decode.models.cache import PrefixCache
from offload_decode.models.devices import DTYPES
from offload_decode.models.loading import LoadedModel
from offload_decode.store.writer import KVStoreWriter
from offload_decode.types import AttentionState
from prefill_jobs.methods.base import Method


class StagedPrefix:
    """What is written so far, as `kv.tail.Prefix`; takes the query samples on their way through."""

    remembers = False
    whole_tail = math.inf

    def __init__(self, writer: KVStoreWriter, method: Method):
        self.writer = writer
        self.method = method
        self.shape = method.shape
        self._sampled: dict[int, int] = {}  # by layer the length before its last samples

    @property
    def length(self) -> int:
        """Tokens written and committed."""
        return self.writer.done

    def begin(
        self, layer: int, query: Tensor, scaling: float, softcap: float | None
    ) -> Callable[[], AttentionState]:
        """Attention from `query [1, H, T, D]` to what the method chooses, one block in memory at a time: all
        of it when the result is called for.
        """
        return partial(self._attend, layer, query, scaling, softcap)

    def _attend(self, layer: int, query: Tensor, scaling: float, softcap: float | None) -> AttentionState:
        self._sample(layer, query)
        chosen = None
        if self.length:
            rows = query[0].float().reshape(self.shape.kv_heads, -1, query.shape[-1])
            asking = Queries(rows, scaling, softcap, self.shape.group, query.shape[2])
            chosen = self.method.select(layer, asking, self)
        device = query.device
        blocks = self._blocks(layer, device) if chosen is None else self._chosen(layer, chosen, device)
        return attend_blocks(query, blocks, self.values(layer, 0).dim, scaling, softcap)

    def attend_tail(self, *_: object) -> None:
        """All of the chunk is attended."""

    def keys(self, layer: int, head: int) -> Rows:
        """The N keys of one KV head, as they are stored."""
        return Rows(self.writer.keys(layer, head))

    def values(self, layer: int, head: int) -> Rows:
        """The N values of one KV head, as they are stored."""
        return Rows(self.writer.values(layer, head))

    def key_norms(self, layer: int, head: int) -> Tensor:
        """Lengths of the keys, float32 `[N]` on the host."""
        return tensor_view(self.writer.key_norms(layer, head))

    def _chosen(self, layer: int, ids: Tensor, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        ids = ids.sort(dim=1).values  # nearly sequential reads
        for start in range(0, ids.shape[1], BLOCK_TOKENS):
            yield self._block(layer, list(ids[:, start : start + BLOCK_TOKENS]), device)

    def _blocks(self, layer: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, self.length, BLOCK_TOKENS):
            part = slice(start, min(start + BLOCK_TOKENS, self.length))
            yield self._block(layer, [part] * self.shape.kv_heads, device)

    def _block(
        self, layer: int, parts: Sequence[slice | Tensor], device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Keys and values `[1, Hkv, S, …]` of a part of each KV head's tokens; latents are both."""

        def stacked(read: Callable[[int, int], Rows]) -> Tensor:
            rows = [read(layer, head).read(part, device) for head, part in enumerate(parts)]
            return torch.stack(rows)[None]

        keys = stacked(self.keys)
        return keys, keys if self.shape.latent else stacked(self.values)

    def _sample(self, layer: int, query: Tensor) -> None:
        if self._sampled.get(layer) == self.length:
            return  # a later layer reads the keys of this one
        self._sampled[layer] = self.length
        slots, positions, group_heads = self.writer.samples(self.length, self.length + query.shape[2])
        if len(positions):
            rows = torch.from_numpy(positions - self.length).to(query.device)
            heads = torch.from_numpy(group_heads).to(query.device)
            grouped = query[0].reshape(self.shape.kv_heads, self.shape.group, *query.shape[2:])
            kept = grouped[:, heads, rows].to(DTYPES[self.writer.manifest.dtype])
            self.writer.put_queries(layer, slots, numpy_view(kept))


def prefill_chunks(
    loaded: LoadedModel,
    writer: KVStoreWriter,
    tokens: NDArray[np.int32],
    method: Method,
    progress: Callable[[int], None],
) -> None:
    """Run `tokens [N]` through the model from where the writer stands, committing after every chunk."""
    prefix, chunk = StagedPrefix(writer, method), method.options.chunk
    windows = {layer: _to_device(writer.window(layer), loaded.device) for layer in loaded.shape.local_layers}
    states = {
        layer: [tensor_view(state)[None].to(loaded.device) for state in writer.states(layer) or ()]
        for layer in loaded.shape.state_layers
    }
    positions = loaded.lengths.held(writer.manifest.rope, len(tokens))
    cache = PrefixCache.over(prefix, loaded.shape, windows, states=states, positions=positions)
    for start in range(writer.done, len(tokens), chunk):
        part = torch.from_numpy(tokens[start : start + chunk]).long()[None]
        loaded.encode(part, cache)
        for layer in cache.tails:
            keys, values = layer.tail.view()
            rows = numpy_view(keys[0])
            latent = loaded.shape.layers[layer.index].latent
            writer.append(layer.index, rows, rows if latent else numpy_view(values[0]))
        for recurrent in loaded.shape.state_layers:
            held = [numpy_view(state[0]) for state in cache.states(recurrent)]
            writer.put_states(recurrent, held)
        writer.commit(start + part.shape[1])
        cache.rebase()
        progress(writer.done)


def _to_device(
    window: tuple[NDArray[np.generic], NDArray[np.generic]], device: torch.device
) -> tuple[Tensor, Tensor]:
    keys, values = (tensor_view(part)[None].to(device) for part in window)
    return keys, values
