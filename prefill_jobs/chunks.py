"""Chunked prefill: model to store in memory that does not grow with the corpus.

Each chunk attends to itself causally and to the earlier tokens that its method chooses, read back from the
store block by block, or kept on the GPU where there is room. The parts are merged by log-sum-exp
(docs/methods.md §1), so that a dense prefill in chunks equals one in a single pass.

What a chunk adds is written at once on a CPU, by a thread behind the computation on a GPU.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offload_decode.attention.dense import attend_blocks, attend_dense, serves_bf16
from offload_decode.attention.index_queries import IndexQueries
from offload_decode.attention.queries import Queries, empty_state, merge_states
from offload_decode.attention.rows import Rows, numpy_view, tensor_view
from offload_decode.attention.transfers import HostCopy, to_device
from offload_decode.common.errors import UnsupportedModel
from offload_decode.hf.cache import CorpusCache
from offload_decode.hf.compat import DTYPES
from offload_decode.kv.host_cache import BLOCK_TOKENS
from offload_decode.kv.placement import QUEUED
from offload_decode.models.loading import LoadedModel
from offload_decode.prefill_jobs.finite import Extremes
from offload_decode.prefill_jobs.gpu_blocks import GPUBlocks, Stored
from offload_decode.prefill_jobs.methods.base import Method
from offload_decode.store.format import Array, Manifest
from offload_decode.store.writer import KVStoreWriter
from offload_decode.types import AttentionState


def prefill_chunks(
    loaded: LoadedModel,
    writer: KVStoreWriter,
    tokens: NDArray[np.int32],
    method: Method,
    progress: Callable[[str, int, int], None],
) -> None:
    """Run `tokens [N]` through the model from where the writer stands, committing after every chunk.

    `progress` gets the number of committed tokens, on a GPU a chunk behind what has run. Raises `StoreError`
    where a chunk cannot be written, and `ModelError` where the model gives numbers that are not finite
    (`finite`), on a GPU up to a chunk later.
    """
    chunk, begun, device = method.options.chunk, writer.done, loaded.device
    reported = begun
    progress("prefill", reported, len(tokens))
    with Extremes(loaded) as extremes, output_to(writer, device) as output:
        prefix = WrittenPrefix(writer, method, output, device, extremes)
        cache = _cache(loaded, writer, prefix, len(tokens))
        for start in range(writer.done, len(tokens), chunk):
            part = torch.from_numpy(tokens[start : start + chunk]).long()[None]
            prefix.begin_chunk(cache)
            hidden = loaded.encode(part, cache)
            prefix.end_chunk()
            extremes.see_last(hidden, logits=start == begun)
            layers, seen = extremes.take()
            output.submit(partial(extremes.check, layers), seen)
            for layer in loaded.shape.state_layers:
                states = [state[0] for state in cache.states(layer)]
                output.submit(lambda *states, layer=layer: writer.put_states(layer, states), *states)
            committed = output.commit(start + part.shape[1])
            cache.rebase()
            prefix.advance(start + part.shape[1])
            if committed > reported:
                progress("prefill", committed, len(tokens))
                reported = committed
    if reported < writer.done:
        progress("prefill", writer.done, len(tokens))
    progress("publish", 0, 1)


def _cache(loaded: LoadedModel, writer: KVStoreWriter, prefix: WrittenPrefix, total: int) -> CorpusCache:
    """A cache behind what is written so far, for `total` tokens in the end."""

    def batched(arrays: Iterable[NDArray[np.generic]]) -> list[Tensor]:
        return [tensor_view(array)[None].to(loaded.device) for array in arrays]

    shape, positions = loaded.shape, loaded.lengths.of_store(writer.manifest.rope, total)
    windows = {}
    for layer in shape.local_layers:
        keys, values = batched(writer.window(layer))
        windows[layer] = keys, values
    states = {layer: batched(writer.states(layer) or ()) for layer in shape.state_layers}
    return CorpusCache.over(prefix, shape, windows, states=states, positions=positions)


class Written(Protocol):
    """What the chunks of a prefill read of a `KVStoreWriter`, and write to it."""

    manifest: Manifest
    done: int

    def keys(self, layer: int, kv_head: int) -> Any: ...
    def values(self, layer: int, kv_head: int) -> Any: ...
    def key_norms(self, layer: int, kv_head: int) -> Any: ...
    def samples(self, start: int, stop: int) -> tuple[slice, Array, Array]: ...
    def append(self, layer: int, keys: Array, values: Array) -> None: ...
    def put_queries(self, layer: int, slots: slice, queries: Array) -> None: ...
    def commit(self, tokens: int) -> None: ...


class WrittenPrefix:
    """What is written so far, as `kv.generated.Prefix`; takes the query samples on their way through.

    `length`: the tokens before the current chunk, which it attends to. All of them are submitted to `output`;
    readers wait until they are written.
    """

    remembers = by_token = False
    whole_generated = math.inf

    def __init__(
        self,
        writer: Written,
        method: Method,
        output: ChunkWriter,
        device: torch.device,
        extremes: Extremes,
    ):
        self.writer = writer
        self.method = method
        self.shape = method.shape
        self.length = writer.done
        self._output = output
        self._extremes = extremes
        self._submitted: dict[int, Future[None] | None] = {}  # the last write of each layer
        self._appended: set[int] = set()  # layers whose KV of this chunk is submitted
        self._sampled: dict[int, int] = {}  # by layer, the length before its last samples
        self._cache: CorpusCache | None = None
        self._gpu: GPUBlocks | None = None
        if device.type == "cuda" and self.shape.full_layers:
            last = (writer.manifest.n_tokens - 1) // method.options.chunk * method.options.chunk
            self._gpu = GPUBlocks(self.shape.full_layers, self._stored, last, device)

    def begin_chunk(self, cache: CorpusCache) -> None:
        self._cache = cache
        self._appended.clear()
        if self._gpu is not None:
            self._gpu.begin_pass()

    def end_chunk(self) -> None:
        assert self._cache is not None
        for layer in self._cache.generated_layers:
            self._append(layer.index)

    def advance(self, tokens: int) -> None:
        """The next chunk attends to the first `tokens` tokens."""
        self.length = tokens
        if self._gpu is not None:
            self._gpu.grow(tokens + self.method.options.chunk)

    def begin(
        self,
        layer: int,
        query: Tensor,
        scaling: float,
        softcap: float | None,
        index: IndexQueries | None = None,
    ) -> Callable[[], AttentionState]:
        """Attention of `query [1, H, T, D]` to the tokens that the method chooses, or the model's own indexer
        where it chooses none, one block in memory at a time; all of it happens when the result is called for.
        """
        return partial(self._attend, layer, query, scaling, softcap, index)

    def _attend(
        self, layer: int, query: Tensor, scaling: float, softcap: float | None, index: IndexQueries | None
    ) -> AttentionState:
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
        own = self.shape.index
        if chosen is None and index is None and own is not None and self.length + query.shape[2] > own.topk:
            raise UnsupportedModel(
                "a prefill did not see what this model's indexer asks, and would attend to more than it "
                "does: use another release of transformers, or a prefill method that chooses, such as quoka"
            )
        if chosen is None and index is not None:
            state = self._attend_indexed(index, query, blocks, scaling, softcap)
        else:
            state = attend_blocks(query, blocks, self.shape.value_dim, scaling, softcap)
        if self._gpu is not None:
            self._append(layer)
        return state

    def _attend_indexed(
        self,
        index: IndexQueries,
        query: Tensor,
        blocks: Iterable[tuple[Tensor, Tensor]],
        scaling: float,
        softcap: float | None,
    ) -> AttentionState:
        """To those tokens of the blocks, all that are stored, that the model's own indexer chooses."""
        assert self.shape.index is not None
        whole, topk = index.generated.shape[2] + self.length, self.shape.index.topk
        if whole > topk and index.least is None:
            # In the blocks below, as scores that are compared must be equal bit by bit.
            best = index.generated
            for start in range(0, self.length, BLOCK_TOKENS):
                best = torch.cat([best, self._index_scores(index, start, BLOCK_TOKENS)], dim=-1)
                best = best.topk(min(topk, best.shape[-1])).values
            index.least = best.topk(topk).values[..., -1]
        state, start = empty_state(query, self.shape.value_dim), 0
        for key, value in blocks:
            mask = None
            if index.least is not None:
                mask = self._index_scores(index, start, key.shape[2]) >= index.least.unsqueeze(-1)
            own = attend_dense(query, key, value, scaling, None if mask is None else mask[:, None], softcap)
            state, start = merge_states(state, own), start + key.shape[2]
        return state

    def _index_scores(self, index: IndexQueries, start: int, tokens: int) -> Tensor:
        """Scores `[1, T, tokens]` of stored tokens, fewer at the end."""
        part = slice(start, min(start + tokens, self.length))
        rows = self.keys(index.layer, 0).read(part, index.vectors.device)
        return index.scores(rows[None, :, rows.shape[1] - index.vectors.shape[-1] :])

    def attend_generated(self, *_: object) -> None:
        """None: all of the chunk is attended to."""

    def keys(self, layer: int, head: int) -> Rows:
        return Rows(self._written(self.writer.keys, layer, head))

    def values(self, layer: int, head: int) -> Rows:
        return Rows(self._written(self.writer.values, layer, head))

    def key_norms(self, layer: int, head: int) -> Tensor:
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
        total = self.length if chosen is None else chosen.shape[1]
        if not total:
            return
        # Fused attention on a GPU, and half-precision products on a CPU, need keys of the queries' dtype;
        # everything else on a CPU is computed in float32.
        kinds, stored = self._stored(layer), (self.keys(layer, 0).dtype, self.values(layer, 0).dtype)
        dtype = query.dtype if query.is_cuda or serves_bf16(query, *stored) else torch.float32
        if chosen is not None:
            chosen = chosen.sort(dim=1).values  # nearly sequential reads
        for start in range(0, total, BLOCK_TOKENS):
            part = slice(start, min(start + BLOCK_TOKENS, total))
            parts = [part] * self.shape.kv_heads if chosen is None else list(chosen[:, part])
            block = []
            for kind in kinds:
                rows = [one.read(own, query.device, dtype) for one, own in zip(kind, parts, strict=True)]
                block.append(torch.stack(rows)[None])
            yield block[0], block[-1]

    def _append(self, layer: int) -> None:
        if layer in self._appended:
            return
        self._appended.add(layer)
        assert self._cache is not None
        parts = [part[0] for part in self._cache.layers[layer].generated.view()]
        self._extremes.see(layer, *parts)
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


Write = Callable[..., None]


class ChunkWriter(AbstractContextManager["ChunkWriter"]):
    """Writes what it is given before it returns."""

    def __init__(self, writer: Written):
        self._writer = writer

    def submit(self, write: Write, *parts: Tensor) -> Future[None] | None:
        """Have `write` called with `parts` as numpy arrays, after earlier submissions; a future for `wait`,
        unless that is done. Raises what an earlier write raised.
        """
        write(*map(numpy_view, parts))
        return None

    def wait(self, submitted: Future[None] | None) -> None:
        """Return when a submission is written. Raises what it, or an earlier one, raised."""
        if submitted is not None:
            submitted.result()

    def commit(self, tokens: int) -> int:
        """Commit so many tokens after all submissions; how many are committed by now."""
        self._writer.commit(tokens)
        return tokens

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None: ...


class AsyncWriter(ChunkWriter):
    """Writes in a thread, in the order of submission, what a GPU computed: the KV of a layer as soon as the
    layer has it, through pinned memory and on a stream of its own. At most `QUEUED` writes wait, so that a
    slow disk slows the GPU and takes no memory. A killed process loses at most a chunk and the beginning of
    the next. Leaving the block waits for all writes or, after an exception, for the one in progress.
    """

    def __init__(self, writer: Written, device: torch.device):
        super().__init__(writer)
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="store writer")
        self._futures: deque[Future[None]] = deque(maxlen=QUEUED)
        self._last_commits: list[tuple[Future[None] | None, int]] = [(None, writer.done)]  # or two
        self._error: BaseException | None = None

    def submit(self, write: Write, *parts: Tensor) -> Future[None]:
        """The current stream may overwrite the parts with whatever it is given next."""
        if self._error is not None:
            raise self._error
        if len(self._futures) == QUEUED:
            self.wait(self._futures[0])
        copy = None
        if parts:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                copy = HostCopy.begin(*parts)
            for part in parts:
                part.record_stream(self._stream)
        self._futures.append(self._executor.submit(self._write, write, copy))
        return self._futures[-1]

    def commit(self, tokens: int) -> int:
        """Waits for the commit before this one, which it returns."""
        future = self.submit(lambda: self._writer.commit(tokens))
        self._last_commits = [self._last_commits[-1], (future, tokens)]
        before, committed = self._last_commits[0]
        self.wait(before)
        return committed

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._executor.shutdown(cancel_futures=error is not None)
        if error is None and self._error is not None:
            raise self._error

    def _write(self, write: Write, copy: HostCopy | None) -> None:
        """In the thread; after an error, nothing more is written."""
        if self._error is None:
            try:
                write(*([] if copy is None else map(numpy_view, copy.wait())))
            except BaseException as error:  # noqa: BLE001 - raised by the next call
                self._error = error
        if self._error is not None:
            raise self._error


def output_to(writer: Written, device: torch.device) -> ChunkWriter:
    """What writes to `writer` what is computed on a device."""
    return AsyncWriter(writer, device) if device.type == "cuda" else ChunkWriter(writer)
