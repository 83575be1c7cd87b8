"""Which arrays a store has, their shapes, and the chunk files that hold them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import numpy as np

from offload_decode.indexes.rows import encodings
from offload_decode.store.format import Manifest, numpy_dtype
from offload_decode.types import LayerKind, LayerShape

CHUNK_TOKENS = 65_536
"""Tokens of one head in a chunk file, until a head would have more than MAX_CHUNKS of them."""
MAX_CHUNKS = 32
MAX_KV_MAPS, MAX_PAGE_MAPS = 40_960, 10_240
"""Linux lets a process have 65,530 memory maps: a whole store stays under that, with room for the rest."""
SEAM = "_seam"
"""Ends the name of a state at the seam (`Manifest.seam`)."""
ALIGNMENT = 64 * 1024
"""Chunk files that are mapped one after another end on a page of the machine, which has 4 to 64 KiB."""


@dataclass(frozen=True)
class ArraySpec:
    """One array: `shape`, cut into chunks of the shape `chunk`; edge chunks are padded with zeros.

    Arrays of rank 3 are `[heads, rows, D]` in chunks of one head; all others are of rank 1 and one chunk.
    """

    name: str
    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    dtype: str

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        return numpy_dtype(self.dtype)

    @property
    def row_bytes(self) -> int:
        return self.numpy_dtype.itemsize * (self.shape[-1] if len(self.shape) == 3 else 1)

    @property
    def chunk_bytes(self) -> int:
        return math.prod(self.chunk) * self.numpy_dtype.itemsize

    @property
    def metadata_file(self) -> str:
        return f"{self.name}/zarr.json"

    @property
    def file_count(self) -> int:
        """Chunk files."""
        return math.prod(-(-size // step) for size, step in zip(self.shape, self.chunk, strict=True))

    def files(self) -> Iterator[str]:
        """Every chunk file, head by head, in the order of the rows."""
        grid = (range(-(-size // step)) for size, step in zip(self.shape, self.chunk, strict=True))
        return (f"{self.name}/c." + ".".join(map(str, index)) for index in product(*grid))

    def head_files(self, head: int) -> list[str]:
        """The chunk files of one head, in the order of the rows."""
        assert 0 <= head < self.shape[0], f"{self.name} has no head {head}"
        return [f"{self.name}/c.{head}.{i}.0" for i in range(-(-self.shape[1] // self.chunk[1]))]


def chunk_rows(rows: int, row_bytes: int, target: int | None = None, most: int = MAX_CHUNKS) -> int:
    """Rows of a chunk: about `target`, more where that would make more than `most` chunks.

    Several chunks are each a multiple of ALIGNMENT; a single one has exactly `rows` rows.
    """
    chunks = min(-(-rows // (target or CHUNK_TOKENS)), most)
    unit = ALIGNMENT // math.gcd(ALIGNMENT, row_bytes)
    return min(rows, -(-rows // chunks // unit) * unit) if chunks > 1 else rows


def layer_name(layer: int) -> str:
    """The group of one layer."""
    return f"layers/{layer:03d}"


@cache
def array_name(layer: int, kind: str) -> str:
    """The array of one layer and kind (`keys`, `page_min`, …); formatted once, as every chunk asks for it."""
    return f"{layer_name(layer)}/{kind}"


def grown_rows(rows: int, earlier: ArraySpec, most: int) -> int | None:
    """Rows of a chunk of a head that begins as an `earlier` array: as many as there, so that its chunk files
    can be shared, or twice as many for as long as there would be more than `most`. None where it has but one.
    """
    size = earlier.chunk[1]
    if size >= earlier.shape[1]:
        return None
    while -(-rows // size) > most:
        size *= 2
    return size


def array_specs(
    manifest: Manifest, n_documents: int, name_bytes: int, earlier: Mapping[str, ArraySpec] | None = None
) -> Iterator[ArraySpec]:
    """Every array of a store that is to be written; `earlier` are those of the store that it begins as."""
    for name, length, dtype in (
        ("tokens", manifest.n_tokens, "int32"),
        ("documents/offsets", n_documents + 1, "int64"),
        ("documents/names", name_bytes, "uint8"),
        ("query_positions", manifest.n_samples, "int64"),
    ):
        yield ArraySpec(name, (length,), (length,), dtype)

    for layer, own in enumerate(manifest.shape.layers):
        if own.local:
            yield from _window(manifest, layer_name(layer), own)
        elif own.kind is LayerKind.FULL:
            yield from _whole(manifest, layer_name(layer), own, earlier or {})
        for state in own.states:
            length = math.prod(state.shape)
            for name in (state.name, state.name + SEAM) if manifest.keeps_seam else (state.name,):
                yield ArraySpec(f"{layer_name(layer)}/{name}", (length,), (length,), state.dtype)


def _window(manifest: Manifest, group: str, own: LayerShape) -> Iterator[ArraySpec]:
    length = manifest.kept_window(own)
    for kind, dim in (("keys", own.key_dim), ("values", own.value_dim)):
        yield ArraySpec(
            f"{group}/window_{kind}", (own.kv_heads, length, dim), (1, length, dim), manifest.dtype
        )


def _whole(
    manifest: Manifest, group: str, own: LayerShape, earlier: Mapping[str, ArraySpec]
) -> Iterator[ArraySpec]:
    heads = own.kv_heads
    streams = 2 * heads * len(manifest.shape.full_layers)

    def rows(name: str, length: int, dim: int, maps: int | None, dtype: str = manifest.dtype) -> ArraySpec:
        width = dim if dtype == manifest.dtype else encodings.row_bytes(dtype, dim)
        most = max(1, min(MAX_CHUNKS, maps // streams)) if maps else 1
        before = earlier.get(f"{group}/{name}")
        size = before and grown_rows(length, before, most)
        size = size or chunk_rows(length, width * numpy_dtype(dtype).itemsize, most=most)
        return ArraySpec(f"{group}/{name}", (heads, length, width), (1, size, width), dtype)

    tokens, pages = manifest.n_tokens, -(-manifest.n_tokens // manifest.page_size)
    yield rows("keys", tokens, own.key_dim, MAX_KV_MAPS, manifest.kv["keys"])
    if not own.latent:
        yield rows("values", tokens, own.value_dim, MAX_KV_MAPS, manifest.kv["values"])
    yield ArraySpec(f"{group}/key_norms", (heads, tokens, 1), (1, tokens, 1), "float32")
    yield rows("page_min", pages, own.key_dim, MAX_PAGE_MAPS)
    yield rows("page_max", pages, own.key_dim, MAX_PAGE_MAPS)
    yield rows("queries", manifest.n_samples, own.key_dim, None)
