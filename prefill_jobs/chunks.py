"""Chunked prefill: model to store in memory that does not grow with the corpus.

Each chunk attends to itself causally and to the earlier tokens that its method chooses, read back from the
store block by block, or kept on the GPU where there is room. The parts are merged by log-sum-exp
(docs/methods.md §1), so that a dense prefill in chunks equals one in a single pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offload_decode.attention.dense import attend_blocks, serves_bf16
from offload_decode.attention.queries import Queries
from offload_decode.attention.rows import Rows, tensor_view
from offload_decode.attention.transfers import to_device
from offload_decode.hf.cache import PrefixCache
from offload_decode.hf.compat import DTYPES
from offload_decode.kv.host_cache import BLOCK_TOKENS
from offload_decode.models.loading import LoadedModel
from offload_decode.prefill_jobs.async_writer import AsyncWriter, ChunkWriter
from offload_decode.prefill_jobs.gpu_blocks import GPUBlocks, Stored
from offload_decode.prefill_jobs.methods.base import Method
from offload_decode.store.writer import KVStoreWriter
from offload_decode.types import AttentionState


def prefill_chunks(
    loaded: LoadedModel,
    writer: KVStoreWriter,
    tokens: NDArray[np.int32],
    method: Method,
    progress: Callable[[int], None],
) -> None:
    """Run `tokens [N]` through the model from where the writer stands, committing after every chunk.

    `progress` gets the number of committed tokens, on a GPU a chunk behind what has run. Raises `StoreError`
    where a chunk cannot be written, on a GPU up to a chunk later.
    """
    chunk, reported, device = method.options.chunk, writer.done, loaded.device
    with AsyncWriter(writer, device) if device.type == "cuda" else ChunkWriter(writer) as output:
        prefix = WrittenPrefix(writer, method, output, device)
        cache = _cache(loaded, writer, prefix, len(tokens))
        for start in range(writer.done, len(tokens), chunk):
            part = torch.from_numpy(tokens[start : start + chunk]).long()[None]
            prefix.begin_chunk(cache)
            loaded.encode(part, cache)
            prefix.end_chunk()
            for layer in loaded.shape.state_layers:
                states = [state[0] for state in cache.states(layer)]
                output.submit(lambda *states, layer=layer: writer.put_states(layer, states), *states)
            committed = output.commit(start + part.shape[1])
            cache.rebase()
            prefix.advance(start + part.shape[1])
            if committed > reported:
                progress(committed)
                reported = committed
    if reported < writer.done:
        progress(writer.done)


def _cache(loaded: LoadedModel, writer: KVStoreWriter, prefix: WrittenPrefix, total: int) -> PrefixCache:
    """A cache behind what is written so far, for `total` tokens in the end."""

    def batched(array: NDArray[np.generic]) -> Tensor:
        return tensor_view(array)[None].to(loaded.device)

    windows: dict[int, tuple[Tensor, Tensor]] = {}
    for layer in loaded.shape.local_layers:
        keys, values = writer.window(layer)
        windows[layer] = batched(keys), batched(values)
    states = {layer: list(map(batched, writer.states(layer) or ())) for layer in loaded.shape.state_layers}
    positions = loaded.lengths.held(writer.manifest.rope, total)
    return PrefixCache.over(prefix, loaded.shape, windows, states=states, positions=positions)


class WrittenPrefix:
    """What is written so far, as `kv.generated.Prefix`; takes the query samples on their way through.

    `length`: the tokens before the current chunk, which it attends to. All of them are submitted to `output`;
    readers wait until they are written.
    """

    remembers = False
    whole_generated = math.inf

    def __init__(self, writer: KVStoreWriter, method: Method, output: ChunkWriter, device: torch.device):
        self.writer = writer
        self.method = method
        self.shape = method.shape
        self.length = writer.done
        self._output = output
        self._submitted: dict[int, Future[None] | None] = {}  # the last write of each layer
        self._appended: set[int] = set()  # layers whose KV of this chunk is submitted
        self._sampled: dict[int, int] = {}  # by layer, the length before its last samples
        self._cache: PrefixCache | None = None
        self._gpu: GPUBlocks | None = None
        if device.type == "cuda" and self.shape.full_layers:
            last = (writer.manifest.n_tokens - 1) // method.options.chunk * method.options.chunk
            self._gpu = GPUBlocks(self.shape.full_layers, self._stored, last, device)

    def begin_chunk(self, cache: PrefixCache) -> None:
        """A chunk begins, whose keys and values `cache` will hold."""
        self._cache = cache
        self._appended.clear()
        if self._gpu is not None:
            self._gpu.begin_pass()

    def end_chunk(self) -> None:
        """The chunk has run: submit the keys and values that are not submitted yet."""
        assert self._cache is not None
        for layer in self._cache.tails:
            self._append(layer.index)

    def advance(self, tokens: int) -> None:
        """The next chunk attends to the first `tokens` tokens."""
        self.length = tokens
        if self._gpu is not None:
            self._gpu.grow(tokens + self.method.options.chunk)

    def begin(
        self, layer: int, query: Tensor, scaling: float, softcap: float | None
    ) -> Callable[[], AttentionState]:
        """Attention of `query [1, H, T, D]` to the tokens that the method chooses, one block in memory at a
        time; all of it happens when the result is called for.
        """
        return partial(self._attend, layer, query, scaling, softcap)

    def _attend(self, layer: int, query: Tensor, scaling: float, softcap: float | None) -> AttentionState:
        self._sample(layer, query)
        chosen = None
        if self.length:
            grouped = query[0].float().reshape(self.shape.kv_heads, -1, query.shape[-1])
            queries = Queries(grouped, scaling, softcap, self.shape.group, query.shape[2])
            chosen = self.method.select(layer, queries, self)
        if chosen is None and self._gpu is not None:
            blocks = self._gpu.blocks(layer, self.length, query.dtype)
        else:
            blocks = self._blocks(layer, chosen, query)
        state = attend_blocks(query, blocks, self.shape.value_dim, scaling, softcap)
        if self._gpu is not None:
            self._append(layer)
        return state

    def attend_generated(self, *_: object) -> None:
        """None: all of the chunk is attended to."""

    def keys(self, layer: int, head: int) -> Rows:
        """The N keys of one KV head, as they are stored."""
        return Rows(self._written(self.writer.keys, layer, head))

    def values(self, layer: int, head: int) -> Rows:
        """The N values of one KV head, as they are stored."""
        return Rows(self._written(self.writer.values, layer, head))

    def key_norms(self, layer: int, head: int) -> Tensor:
        """Lengths of the keys, float32 `[N]` on the host."""
        return tensor_view(self._written(self.writer.key_norms, layer, head))

    def _written(self, read: Callable[[int, int], Any], layer: int, head: int) -> Any:
        self._output.wait(self._submitted.get(layer))
        return read(layer, head)[: self.length]

    def _stored(self, layer: int) -> Stored:
        """The keys of every KV head, and the values where they are not the same."""
        heads = range(self.shape.kv_heads)
        kinds = (self.keys,) if self.shape.latent else (self.keys, self.values)
        return [[kind(layer, head) for head in heads] for kind in kinds]

    def _blocks(self, layer: int, chosen: Tensor | None, query: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values `[1, Hkv, S, …]` of the `chosen` tokens `[Hkv, k]` or of all, block by block."""
        if chosen is not None:
            chosen = chosen.sort(dim=1).values  # nearly sequential reads
        total = self.length if chosen is None else chosen.shape[1]
        for start in range(0, total, BLOCK_TOKENS):
            part = slice(start, min(start + BLOCK_TOKENS, total))
            parts = [part] * self.shape.kv_heads if chosen is None else list(chosen[:, part])
            yield self._block(layer, parts, query)

    def _block(self, layer: int, parts: Sequence[slice | Tensor], query: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values `[1, Hkv, S, …]` of a part of each KV head's tokens; latents are both."""
        # Fused attention on a GPU, and half-precision products on a CPU, need keys of the queries' dtype;
        # everything else on a CPU is computed in float32.
        stored = self.keys(layer, 0).dtype, self.values(layer, 0).dtype
        dtype = query.dtype if query.is_cuda or serves_bf16(query, *stored) else torch.float32

        def stacked(read: Callable[[int, int], Rows]) -> Tensor:
            rows = [read(layer, head).read(part, query.device, dtype) for head, part in enumerate(parts)]
            return torch.stack(rows)[None]

        keys = stacked(self.keys)
        return keys, keys if self.shape.latent else stacked(self.values)

    def _append(self, layer: int) -> None:
        """Submit the layer's keys and values of this chunk, once."""
        if layer in self._appended:
            return
        self._appended.add(layer)
        assert self._cache is not None
        parts = [part[0] for part in self._cache.layers[layer].tail.view()]
        if self.shape.layers[layer].latent:
            parts = parts[:1]
            written = self._output.submit(lambda rows: self.writer.append(layer, rows, rows), *parts)
        else:
            written = self._output.submit(partial(self.writer.append, layer), *parts)
        if layer in self.shape.full_layers:
            self._submitted[layer] = written
            if self._gpu is not None and not any(map(self.writer.manifest.encoding, ("keys", "values"))):
                self._gpu.keep(layer, self.length, parts)

    def _sample(self, layer: int, query: Tensor) -> None:
        if self._sampled.get(layer) == self.length:
            return  # a later layer reads the keys of this one
        self._sampled[layer] = self.length
        slots, positions, group_heads = self.writer.samples(self.length, self.length + query.shape[2])
        if len(positions):
            tokens = to_device(torch.from_numpy(positions - self.length), query.device)
            heads = to_device(torch.from_numpy(group_heads), query.device)
            grouped = query[0].reshape(self.shape.kv_heads, self.shape.group, *query.shape[2:])
            samples = grouped[:, heads, tokens].to(DTYPES[self.writer.manifest.dtype])
            self._output.submit(partial(self.writer.put_queries, layer, slots), samples)
