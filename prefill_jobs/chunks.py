"""Chunked prefill: model to store in memory that does not grow with the corpus.

Each chunk attends to itself causally and to what its method chooses of everything before it
(`prefill_jobs.staged`), merged by log-sum-exp (docs/methods.md §1), so that a dense prefill in chunks equals
one that is not.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offload_decode.attention.rows import tensor_view
from offload_decode.hf.cache import PrefixCache
from offload_decode.models.loading import LoadedModel
from offload_decode.prefill_jobs.async_writer import sink_for
from offload_decode.prefill_jobs.attention import StagedPrefix
from offload_decode.prefill_jobs.methods.base import Method
from offload_decode.store.writer import KVStoreWriter


def prefill_chunks(
    loaded: LoadedModel,
    writer: KVStoreWriter,
    tokens: NDArray[np.int32],
    method: Method,
    progress: Callable[[int], None],
) -> None:
    """Run `tokens [N]` through the model from where the writer stands, committing after every chunk.

    `progress` is told what is committed, which on a card is a chunk behind what has run. Raises `StoreError`
    where a chunk cannot be written, on a card up to a chunk later.
    """
    chunk, told = method.options.chunk, writer.done
    with sink_for(writer, loaded.device) as sink:
        prefix = StagedPrefix(writer, method, sink, loaded.device)
        cache = _cache(loaded, writer, prefix, len(tokens))
        for start in range(writer.done, len(tokens), chunk):
            part = torch.from_numpy(tokens[start : start + chunk]).long()[None]
            prefix.begin_chunk(cache)
            loaded.encode(part, cache)
            prefix.end_chunk()
            for layer in loaded.shape.state_layers:
                held = [state[0] for state in cache.states(layer)]
                sink.give(lambda *states, layer=layer: writer.put_states(layer, states), *held)
            committed = sink.commit(start + part.shape[1])
            cache.rebase()
            prefix.advance(start + part.shape[1])
            if committed > told:
                progress(committed)
                told = committed
    if told < writer.done:
        progress(writer.done)


def _cache(loaded: LoadedModel, writer: KVStoreWriter, prefix: StagedPrefix, total: int) -> PrefixCache:
    """A cache behind what is written so far, of `total` tokens in the end."""
    windows = {layer: _to_device(writer.window(layer), loaded.device) for layer in loaded.shape.local_layers}
    states = {
        layer: [tensor_view(state)[None].to(loaded.device) for state in writer.states(layer) or ()]
        for layer in loaded.shape.state_layers
    }
    positions = loaded.lengths.held(writer.manifest.rope, total)
    return PrefixCache.over(prefix, loaded.shape, windows, states=states, positions=positions)


def _to_device(
    window: tuple[NDArray[np.generic], NDArray[np.generic]], device: torch.device
) -> tuple[Tensor, Tensor]:
    keys, values = (tensor_view(part)[None].to(device) for part in window)
    return keys, values
