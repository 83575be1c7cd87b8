"""A store of no tokens: what stands before a conversation with the bare model."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from offload_decode.store.format import Array, Manifest


class EmptyStore:
    """Implements `offload_decode.store.base.Store` over nothing at all; `manifest` states 0 tokens."""

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
