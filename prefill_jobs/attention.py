"""What a chunk attends to besides itself: what is written so far, read back from the store block by block
and merged by log-sum-exp, or lying on the card where that has room.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from offload_decode.attention.dense import attend_blocks, serves_half
from offload_decode.attention.queries import Queries
from offload_decode.attention.rows import Rows, tensor_view
from offload_decode.attention.transfers import to_device
from offload_decode.hf.cache import PrefixCache
from offload_decode.hf.compat import DTYPES
from offload_decode.kv.host_cache import BLOCK_TOKENS
from offload_decode.prefill_jobs.async_writer import Sink
from offload_decode.prefill_jobs.gpu_blocks import CardBlocks, Stored
from offload_decode.prefill_jobs.methods.base import Method
from offload_decode.store.writer import KVStoreWriter
from offload_decode.types import AttentionState


class StagedPrefix:
    """What is written so far, as `kv.tail.Prefix`; takes the query samples on their way through.

    `length`: tokens that a chunk attends to, all of those before it; they are given to `sink`, and written
    when whoever reads them has waited.
    """

    remembers = False
    whole_tail = math.inf

    def __init__(self, writer: KVStoreWriter, method: Method, sink: Sink, device: torch.device):
        self.writer = writer
        self.method = method
        self.shape = method.shape
        self.length = writer.done
        self._sink = sink
        self._given: dict[int, int] = {}  # by layer the number of its last rows in the sink
        self._left: set[int] = set()  # layers whose rows of this chunk are given to the sink
        self._sampled: dict[int, int] = {}  # by layer the length before its last samples
        self._cache: PrefixCache | None = None
        self._card: CardBlocks | None = None
        if device.type == "cuda" and self.shape.full_layers:
            last = (writer.manifest.n_tokens - 1) // method.options.chunk * method.options.chunk
            self._card = CardBlocks(self.shape.full_layers, self._stored, last, device)

    def begin_chunk(self, cache: PrefixCache) -> None:
        """A chunk begins, whose keys and values `cache` will hold."""
        self._cache = cache
        self._left.clear()
        if self._card is not None:
            self._card.begin_pass()

    def end_chunk(self) -> None:
        """The chunk has run: what of its keys and values was not given to the sink yet is now."""
        assert self._cache is not None
        for layer in self._cache.tails:
            self._leave(layer.index)

    def advance(self, tokens: int) -> None:
        """The next chunk attends to all of the first `tokens` tokens."""
        self.length = tokens
        if self._card is not None:
            self._card.grow(tokens + self.method.options.chunk)

    def begin(
        self, layer: int, query: Tensor, scaling: float, softcap: float | None
    ) -> Callable[[], AttentionState]:
        """Attention from `query [1, H, T, D]` to what the method chooses, one block in memory at a time: all
        of it when the result is called for.
        """
        return partial(self._attend, layer, query, scaling, softcap)

    def _attend(self, layer: int, query: Tensor, scaling: float, softcap: float | None) -> AttentionState:
        self._sample(layer, query)
        chosen = self._select(layer, query, scaling, softcap) if self.length else None
        if chosen is not None:
            blocks = self._chosen(layer, chosen, query)
        elif self._card is not None:
            blocks = self._card.blocks(layer, self.length, query.dtype)
        else:
            blocks = self._blocks(layer, query)
        state = attend_blocks(query, blocks, self.shape.value_dim, scaling, softcap)
        if self._card is not None:
            self._leave(layer)
        return state

    def _select(self, layer: int, query: Tensor, scaling: float, softcap: float | None) -> Tensor | None:
        rows = query[0].float().reshape(self.shape.kv_heads, -1, query.shape[-1])
        asking = Queries(rows, scaling, softcap, self.shape.group, query.shape[2])
        return self.method.select(layer, asking, self)

    def attend_tail(self, *_: object) -> None:
        """All of the chunk is attended."""

    def keys(self, layer: int, head: int) -> Rows:
        """The N keys of one KV head, as they are stored."""
        self._sink.wait(self._given.get(layer, 0))
        return Rows(self.writer.keys(layer, head)[: self.length])

    def values(self, layer: int, head: int) -> Rows:
        """The N values of one KV head, as they are stored."""
        self._sink.wait(self._given.get(layer, 0))
        return Rows(self.writer.values(layer, head)[: self.length])

    def key_norms(self, layer: int, head: int) -> Tensor:
        """Lengths of the keys, float32 `[N]` on the host."""
        self._sink.wait(self._given.get(layer, 0))
        return tensor_view(self.writer.key_norms(layer, head)[: self.length])

    def _stored(self, layer: int) -> Stored:
        """The keys of every KV head, and the values where they are not the same."""
        heads = range(self.shape.kv_heads)
        kinds = (self.keys,) if self.shape.latent else (self.keys, self.values)
        return [[kind(layer, head) for head in heads] for kind in kinds]

    def _chosen(self, layer: int, ids: Tensor, query: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        ids = ids.sort(dim=1).values  # nearly sequential reads
        for start in range(0, ids.shape[1], BLOCK_TOKENS):
            yield self._block(layer, list(ids[:, start : start + BLOCK_TOKENS]), query)

    def _blocks(self, layer: int, query: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, self.length, BLOCK_TOKENS):
            part = slice(start, min(start + BLOCK_TOKENS, self.length))
            yield self._block(layer, [part] * self.shape.kv_heads, query)

    def _block(self, layer: int, parts: Sequence[slice | Tensor], query: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values `[1, Hkv, S, …]` of a part of each KV head's tokens; latents are both."""
        # Fused attention on a card wants keys of the queries' dtype, as products of half precision on a CPU
        # do; else all is computed in float32 there.
        stored = self.keys(layer, 0).dtype, self.values(layer, 0).dtype
        dtype = query.dtype if query.is_cuda or serves_half(query, *stored) else torch.float32

        def stacked(read: Callable[[int, int], Rows]) -> Tensor:
            rows = [read(layer, head).read(part, query.device, dtype) for head, part in enumerate(parts)]
            return torch.stack(rows)[None]

        keys = stacked(self.keys)
        return keys, keys if self.shape.latent else stacked(self.values)

    def _leave(self, layer: int) -> None:
        """The layer's keys and values of this chunk go to the sink, once."""
        if layer in self._left:
            return
        self._left.add(layer)
        assert self._cache is not None
        keys, values = (part[0] for part in self._cache.layers[layer].tail.view())
        if self.shape.layers[layer].latent:
            parts = [keys]
            given = self._sink.give(lambda rows: self.writer.append(layer, rows, rows), *parts)
        else:
            parts = [keys, values]
            given = self._sink.give(partial(self.writer.append, layer), *parts)
        if layer in self.shape.full_layers:
            self._given[layer] = given
            if self._card is not None and not any(map(self.writer.manifest.encoding, ("keys", "values"))):
                self._card.keep(layer, self.length, parts)

    def _sample(self, layer: int, query: Tensor) -> None:
        if self._sampled.get(layer) == self.length:
            return  # a later layer reads the keys of this one
        self._sampled[layer] = self.length
        slots, positions, group_heads = self.writer.samples(self.length, self.length + query.shape[2])
        if len(positions):
            rows = to_device(torch.from_numpy(positions - self.length), query.device)
            heads = to_device(torch.from_numpy(group_heads), query.device)
            grouped = query[0].reshape(self.shape.kv_heads, self.shape.group, *query.shape[2:])
            kept = grouped[:, heads, rows].to(DTYPES[self.writer.manifest.dtype])
            self._sink.give(partial(self.writer.put_queries, layer, slots), kept)
