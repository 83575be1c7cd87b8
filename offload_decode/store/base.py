"""`Store`: what decoding reads of a store, wherever it lies; a range of one, and an empty one."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import numpy as np

from offload_decode.common.errors import ConfigError
from offload_decode.store.format import Array, Manifest


class Store(Protocol):
    """Implemented by `KVStore`, on disk, and `MemoryStore`, over arrays. Arrays are read-only.

    N tokens, keys of D channels, values of Dv; all but `window` and `states` are of full-attention layers
    alone.
    """

    @property
    def manifest(self) -> Manifest:
        """What the store says about itself."""

    @property
    def path(self) -> Path:
        """Its name, beside which indexes lie."""

    @property
    def query_positions(self) -> Array:
        """Token positions of the sampled queries, int64 `[n]`, in order."""

    @property
    def query_heads(self) -> Array:
        """Which head of its group each of the sampled queries is of, int64 `[n]`."""

    @property
    def store_digest(self) -> str:
        """A SHA-256 that names the whole store."""

    def keys(self, layer: int, kv_head: int) -> Array:
        """Post-RoPE keys `[N, D]`, or encoded `[N]` (`offload_decode.common.rows.encodings`)."""

    def values(self, layer: int, kv_head: int) -> Array:
        """Values `[N, Dv]`, or encoded `[N]`; those of latents are their keys."""

    def key_norms(self, layer: int, kv_head: int) -> Array:
        """Lengths of the keys, float32 `[N]`."""

    def pages(self, layer: int, kv_head: int) -> tuple[Array, Array]:
        """Channel-wise minimum and maximum `[ceil(N / page_size), D]` of the keys of each page."""

    def queries(self, layer: int, kv_head: int) -> Array:
        """Sampled post-RoPE prefill queries `[n, D]` of the heads that share `kv_head`."""

    def window(self, layer: int) -> tuple[Array, Array]:
        """Keys and values `[Hkv, w, …]` of the last `w = min(N, window - 1)` tokens of a local layer."""

    def states(self, layer: int) -> tuple[Array, ...]:
        """The recurrent states of a layer after the last token, in the order of its shape."""

    def digest(self, layer: int, kv_head: int) -> str:
        """A SHA-256 that names one head's keys."""

    def check_mapped(self, layer: int) -> None:
        """StoreDamaged where a layer cannot be read any more."""


def ranges(n_tokens: int, parts: int, page_size: int) -> list[tuple[int, int]]:
    """Tokens `start:end` of each of so many parts, whole pages and about as many in each; of fewer parts
    where there are not so many pages.
    """
    pages = -(-n_tokens // page_size)
    parts = max(1, min(parts, pages))
    ends = [min(n_tokens, pages * number // parts * page_size) for number in range(parts + 1)]
    return list(pairwise(ends))


class StoreRange:
    """Implements `Store` by views of the tokens `start:end` of another, for one of several machines. `start`
    begins a page. The sampled queries, windows and states are those of the whole store, whose indexes do not
    apply.
    """

    def __init__(self, whole: Store, start: int, end: int) -> None:
        own = whole.manifest
        if not 0 <= start < end <= own.n_tokens or start % own.page_size:
            raise ConfigError(
                f"tokens {start:,} to {end:,} are no part of {whole.path}, which has {own.n_tokens:,} in "
                f"pages of {own.page_size}: begin with a page"
            )
        self.whole = whole
        self.tokens = slice(start, end)
        self.path = Path(f"{whole.path}.tokens-{start}-{end}")
        self.manifest = replace(own, n_tokens=end - start)
        self._pages = slice(start // own.page_size, -(-end // own.page_size))
        self.queries, self.window, self.states = whole.queries, whole.window, whole.states
        self.check_mapped = whole.check_mapped

    @property
    def query_positions(self) -> Array:
        """As of the whole store."""
        return self.whole.query_positions

    @property
    def query_heads(self) -> Array:
        """As of the whole store."""
        return self.whole.query_heads

    @property
    def store_digest(self) -> str:
        """Of the whole store and the range."""
        return self._named(self.whole.store_digest)

    def keys(self, layer: int, kv_head: int) -> Array:
        """Keys `[n, D]` of the part's tokens."""
        return self.whole.keys(layer, kv_head)[self.tokens]

    def values(self, layer: int, kv_head: int) -> Array:
        """Values `[n, Dv]` of the part's tokens."""
        return self.whole.values(layer, kv_head)[self.tokens]

    def key_norms(self, layer: int, kv_head: int) -> Array:
        """Lengths of the part's keys, float32 `[n]`."""
        return self.whole.key_norms(layer, kv_head)[self.tokens]

    def pages(self, layer: int, kv_head: int) -> tuple[Array, Array]:
        """Bounds of the part's pages. The last one's may be wider than its tokens, never narrower."""
        lowest, highest = self.whole.pages(layer, kv_head)
        return lowest[self._pages], highest[self._pages]

    def digest(self, layer: int, kv_head: int) -> str:
        """Of the whole store's keys and the range."""
        return self._named(self.whole.digest(layer, kv_head))

    def _named(self, digest: str) -> str:
        return hashlib.sha256(f"{digest}:{self.tokens.start}:{self.tokens.stop}".encode()).hexdigest()


class EmptyStore:
    """Implements `Store` for a conversation with the bare model; `manifest` states 0 tokens."""

    path = Path("empty.kv")
    store_digest = hashlib.sha256().hexdigest()

    def __init__(self, manifest: Manifest) -> None:
        assert not manifest.n_tokens, "there is nothing to read"
        self.manifest = manifest
        self.query_positions = self.query_heads = np.zeros(0, np.int64)

    def keys(self, layer: int, kv_head: int) -> Array:
        """Keys `[0, D]`."""
        return np.zeros((0, self.manifest.shape.layers[layer].key_dim), self.manifest.numpy_dtype)

    def values(self, layer: int, kv_head: int) -> Array:
        """Values `[0, Dv]`."""
        return np.zeros((0, self.manifest.shape.layers[layer].value_dim), self.manifest.numpy_dtype)

    def key_norms(self, layer: int, kv_head: int) -> Array:
        """Lengths of the keys, float32 `[0]`."""
        return np.zeros(0, np.float32)

    def pages(self, layer: int, kv_head: int) -> tuple[Array, Array]:
        """No pages: `[0, D]` twice."""
        return self.keys(layer, kv_head), self.keys(layer, kv_head)

    def queries(self, layer: int, kv_head: int) -> Array:
        """Queries `[0, D]`."""
        return self.keys(layer, kv_head)

    def window(self, layer: int) -> tuple[Array, Array]:
        """Keys and values `[Hkv, 0, …]`."""
        heads = self.manifest.shape.layers[layer].kv_heads
        keys, values = self.keys(layer, 0), self.values(layer, 0)
        return np.stack([keys] * heads), np.stack([values] * heads)

    def states(self, layer: int) -> tuple[Array, ...]:
        """None: before its first token a recurrent layer has no state."""
        return ()

    def digest(self, layer: int, kv_head: int) -> str:
        """Of nothing."""
        return self.store_digest

    def check_mapped(self, layer: int) -> None:
        """Nothing is mapped."""
