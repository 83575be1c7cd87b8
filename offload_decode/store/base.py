"""What decoding reads of a store, wherever it lies."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

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
        """Post-RoPE keys `[N, D]`, or encoded `[N]` (`offload_decode.indexes.rows.encodings`)."""

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
