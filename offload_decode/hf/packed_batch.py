"""A packed batch: several conversations in one forward pass, one behind the other without padding.

A segment is what one conversation runs in the pass. Its keys join that conversation's generated KV, and its
queries attend to that KV alone. Segments that share a prefix query it as one block. No mask is built: what a
token sees of its segment follows from its position.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from offload_decode.attention.dense import attend_dense
from offload_decode.attention.index_queries import IndexQueries
from offload_decode.attention.queries import joined
from offload_decode.common.errors import ConfigError, UnsupportedModel
from offload_decode.hf.cache import CorpusCache
from offload_decode.hf.cache_layers import (
    KV,
    RUNNING,
    GeneratedLayer,
    KeylessLayer,
    LatentLayer,
    PassLayer,
    WindowLayer,
)
from offload_decode.kv.generated import Attendable
from offload_decode.types import AttentionState


class Segment(NamedTuple):
    """The next `tokens` of the conversation that `cache` holds."""

    cache: CorpusCache
    tokens: int


class Block(NamedTuple):
    """The next `tokens` of a pass, of one segment or of several, that `prefix` stands before."""

    prefix: Attendable
    tokens: int


class PackedCache(Cache):  # type: ignore[misc]
    """The cache of one packed pass, which grows the caches of its conversations.

    `blocks` are the prefixes in the order of the segments, one for each or one that several share.
    """

    def __init__(self, segments: Sequence[Segment], blocks: Sequence[Block] | None = None):
        blocks = blocks or [Block(cache.prefix, tokens) for cache, tokens in segments]
        assert sum(own.tokens for own in segments) == sum(own.tokens for own in blocks), "the same tokens"
        self.segments = list(segments)
        count = len(self.segments[0].cache.layers)
        super().__init__(layers=[_packed_layer(index, self.segments, blocks) for index in range(count)])
        self.generated_layers = [layer for layer in self.layers if isinstance(layer, PackedLayer)]
        self._begun = False

    @cached_property
    def positions(self) -> Tensor:
        """Of the tokens, int64 `[1, total]`."""
        firsts = ((cache.get_seq_length(), tokens) for cache, tokens in self.segments)
        return torch.cat([torch.arange(first, first + tokens) for first, tokens in firsts])[None]

    @property
    def rotated_for(self) -> int | None:
        """The length of text that all of the conversations are rotated for."""
        return self.segments[0].cache.positions.length

    def begin(self, tokens: int) -> None:
        """A pass of so many tokens begins. Raises where one of the conversations could not run its part."""
        if self._begun or tokens != sum(segment.tokens for segment in self.segments):
            raise ConfigError("a packed cache is for one pass over the tokens of its segments: make another")
        if len({id(segment.cache) for segment in self.segments}) < len(self.segments):
            raise ConfigError("a conversation is in a packed pass twice: give each segment its own fork")
        for own, count in self.segments:
            if own.recurrent or own.shown is not None:
                raise ConfigError("padded sequences and recurrent layers do not run in a packed pass")
            if own.positions.length != self.rotated_for:
                raise ConfigError("conversations that are rotated for other lengths do not run in one pass")
            own.take_back()
            if own.batch not in (None, 1):
                own.refuse_rows(1)
            if own.positions.most is not None:
                own.check_room(count, None)
        for layer in self.generated_layers:
            layer.begin()
        for own, count in self.segments:
            own.begin(1, count)
        self._begun = True

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> KV:
        if not self._begun:
            raise UnsupportedModel("a packed cache needs a model that attends to stored prefixes")
        return self.layers[layer_idx].update(key_states, value_states)  # type: ignore[no-any-return]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """As of one conversation, the longest: models that are told the positions count nothing from it."""
        layer = self.layers[layer_idx]
        return (layer if isinstance(layer, PackedLayer) else self.generated_layers[0]).get_seq_length()

    def check_attended(self) -> None:
        """Raise as `CorpusCache.check_attended` does; else the pass is over."""
        for layer in self.generated_layers:
            if layer.unattended or not layer.updated:
                raise UnsupportedModel(
                    f"layer {layer.index} attended without its stored prefixes: the model does not pass the "
                    "cache's keys to the registered attention function"
                )
        for own, _ in self.segments:
            own.begun = None


def logits_after(logits: Tensor, rows: Tensor) -> Tensor:
    """Logits `[n, V]` after `rows`, of a pass with `logits_to_keep=rows`, which some models ignore."""
    return logits[0] if logits.shape[1] == len(rows) else logits[0, rows]


class PackedLayer(PassLayer):
    """One layer of all conversations of a pass."""

    def __init__(
        self, index: int, generated_layers: list[GeneratedLayer], tokens: list[int], blocks: Sequence[Block]
    ):
        self.index, self.generated_layers, self.tokens, self.blocks = index, generated_layers, tokens, blocks
        self.unattended = self.updated = False
        self._first = 0
        self._new = sum(tokens)

    @property
    def latent(self) -> bool:
        return isinstance(self.generated_layers[0], LatentLayer)

    def begin(self) -> None:
        self._first = max(layer.get_seq_length() for layer in self.generated_layers)

    def update(self, key_states: Tensor, value_states: Tensor) -> KV:
        """Append `[1, Hkv, total, D]`, each segment to its own KV; the keys returned only tell the layer."""
        parts = (torch.split(states, self.tokens, dim=2) for states in (key_states, value_states))
        for layer, keys, values in zip(self.generated_layers, *parts, strict=True):
            layer.append(keys, values)
        tagged = key_states.view_as(key_states)
        RUNNING.current.updated(self, tagged)
        self.unattended = self.updated = True
        return tagged, value_states

    @property
    def index_dim(self) -> int:
        """Of index keys at the end of a row."""
        first = self.generated_layers[0]
        return first.index_dim if isinstance(first, LatentLayer) else 0

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """As `LatentLayer.update_indexer`, each segment's to its own rows."""
        layers: list[Any] = self.generated_layers
        for layer, keys in zip(layers, torch.split(indexer_key_states, self.tokens, dim=1), strict=True):
            layer.append_index(keys)
        RUNNING.current.indexed = self.index, layers
        return torch.zeros_like(indexer_key_states)

    def attend(self, query: Tensor, scaling: float, softcap: float | None) -> tuple[AttentionState, ...]:
        """From `query [1, H, total, D]` (latents: absorbed) to each segment's KV and the prefixes: states."""
        # The generated KV is attended to between these two, as behind one prefix, unless what is chosen of
        # the stored tokens says what is seen of it.
        counts = [tokens for _, tokens in self.blocks]
        asked = RUNNING.current.asked if self.index_dim and self.blocks else None
        index = [None] * len(counts) if asked is None else asked.packed(self.tokens, counts)
        queries = zip(self.blocks, torch.split(query, counts, dim=2) if counts else (), index, strict=True)
        finishes = [
            prefix.begin(self.index, part, scaling, softcap, own) for (prefix, _), part, own in queries
        ]
        stored = [] if asked is None else [finish() for finish in finishes]
        seen = self._seen(index)
        parts = zip(self.generated_layers, torch.split(query, self.tokens, dim=2), seen, strict=True)
        generated = joined([_attend_generated(*part, scaling, softcap) for part in parts], 2)
        self.unattended = False
        stored = stored or [finish() for finish in finishes]
        return (generated, joined(stored, 2)) if stored else (generated,)

    def _seen(self, index: Sequence[IndexQueries | None]) -> Sequence[Tensor | None]:
        """Which of its generated tokens a model's own indexer chose for each segment, bool `[1, 1, T, S]`."""
        chosen = [own if own is None else own.seen() for own in index]
        if all(own is None for own in chosen):
            return [None] * len(self.tokens)
        masks = (
            ~own.generated.isneginf()[:, None] if mask is None else mask
            for own, mask in zip(index, chosen, strict=True)
            if own is not None
        )
        return torch.split(torch.cat(list(masks), dim=2), self.tokens, dim=2)

    def get_seq_length(self) -> int:
        return self._first + (self._new if self.updated else 0)


def _packed_layer(index: int, segments: list[Segment], blocks: Sequence[Block]) -> PackedLayer | KeylessLayer:
    layers = [segment.cache.layers[index] for segment in segments]
    if not isinstance(layers[0], GeneratedLayer):
        return KeylessLayer(index)
    stored = [] if isinstance(layers[0], WindowLayer) else blocks
    return PackedLayer(index, layers, [segment.tokens for segment in segments], stored)


def _attend_generated(
    layer: GeneratedLayer, query: Tensor, chosen: Tensor | None, scaling: float, softcap: float | None
) -> AttentionState:
    """From the last tokens of a conversation, `query [1, H, T, D]`, to the generated KV before them, or to
    what a bool mask `[1, 1, T, S or more]` names as `chosen` of it.
    """
    tokens = query.shape[2]
    if isinstance(layer, WindowLayer):
        keys, values, mask = layer.near(tokens)
    else:
        keys, values = layer.generated.view()
        if chosen is not None:
            return attend_dense(query, keys, values, scaling, chosen[..., : keys.shape[2]], softcap)
        mask = None
        if tokens > 1:
            mask = torch.ones(tokens, keys.shape[2], dtype=torch.bool, device=keys.device)
            mask = mask.tril(keys.shape[2] - tokens)
    return attend_dense(query, keys, values, scaling, None if mask is None else mask[None, None], softcap)
