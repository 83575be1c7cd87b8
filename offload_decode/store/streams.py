"""Arrays on disk as they grow: rows, encoded or plain, are written into chunk files and read through maps."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from contextlib import suppress
from functools import reduce
from math import sqrt
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from offload_decode.common.errors import InvalidIndexInput, StoreError
from offload_decode.common.rows import encodings
from offload_decode.store.files import check_sizes, map_files, map_parts
from offload_decode.store.format import Array, Manifest
from offload_decode.store.layout import ArraySpec, Samples, array_name, at


class RowStream:
    """The rows `[heads, rows, D]` of one array, appended in order; a CRC-32 a head runs over them. Files that
    were written to are added to `written`.
    """

    def __init__(self, root: Path, spec: ArraySpec, written: set[Path]) -> None:
        self.spec = spec
        self.rows = 0
        self.crcs = [0] * spec.shape[0]
        self._root, self._written = root, written
        self._parts = [spec.head_parts(head) for head in range(spec.shape[0])]
        self._views: dict[int, Array] = {}

    def restore(self, rows: int, crcs: list[int]) -> bool:
        """Go on after the first `rows` rows, if they are what the checksums say."""
        self.rows, self.crcs = rows, row_crcs(self._root, self.spec, rows)
        fits = self.spec.base_bytes <= rows * self.spec.row_bytes <= self.spec.shape[1] * self.spec.row_bytes
        return fits and self.crcs == crcs

    def write(self, block: Array) -> None:
        """Write `block [heads, T, D]` after the rows so far; they count once `advance` was called with it."""
        assert block.shape[::2] == self.spec.shape[::2], (
            f"{self.spec.name}: {block.shape} for {self.spec.shape}"
        )
        assert block.dtype == self.spec.numpy_dtype, f"{self.spec.name}: {block.dtype} for {self.spec.dtype}"
        assert self.rows + block.shape[1] <= self.spec.shape[1], f"{self.spec.name}: more rows than it has"
        for parts, rows in zip(self._parts, block, strict=True):
            data, position = as_bytes(rows), self.rows * self.spec.row_bytes
            while data:
                name, offset, room = at(parts, position)
                piece = data[:room]
                _write_at(self._root / name, offset, piece)
                self._written.add(self._root / name)
                data, position = data[len(piece) :], position + len(piece)

    def advance(self, block: Array) -> None:
        """Count `block`, which has been written."""
        self.rows += block.shape[1]
        self.crcs = [zlib.crc32(as_bytes(rows), crc) for rows, crc in zip(block, self.crcs, strict=True)]

    def view(self, head: int) -> Array:
        """The rows so far `[rows, D]`, or encoded `[rows]`, of one head: a read-only, zero-copy view."""
        if head in self._views:
            check_sizes((self._root / file, size) for file, size, _ in self._parts[head])
        else:
            self._views[head] = head_view(self._root, self.spec, head)
        return self._views[head][: self.rows]


KINDS = ("keys", "values", "key_norms", "page_min", "page_max", "queries", "spare_queries", "marks")
"""The arrays of a layer that grow with the tokens."""


def kind_of(spec: ArraySpec) -> str | None:
    """One of `KINDS`; None for an array that is written at once."""
    kind = spec.name.rpartition("/")[2]
    return kind if kind in KINDS else None


def rows_at(manifest: Manifest, samples: Samples, tokens: int) -> dict[str, int]:
    """Rows of each of `KINDS` when `tokens` tokens are written."""
    size, last = manifest.page_size, tokens == manifest.n_tokens
    pages = -(-tokens // size) if last else tokens // size
    marks = tokens // manifest.marks if manifest.marks else 0
    spare = samples.spare[: np.searchsorted(samples.positions, tokens)]
    queries = int((~spare).sum()), int(spare.sum())
    rows = (tokens, tokens, tokens, pages, pages, *queries, marks)
    return dict(zip(KINDS, rows, strict=True))


def allocate(root: Path, spec: ArraySpec) -> None:
    """Make the missing files of an array at their full size, as zeros that take no space yet."""
    for name, size in spec.sizes().items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError), open(root / name, "xb") as file:
            file.truncate(size)


def write_array(root: Path, spec: ArraySpec, array: Array) -> None:
    """Write a whole array of one chunk a head, or of one chunk."""
    heads = array if array.ndim == 3 else array[None]
    for name, rows in zip(spec.files(), heads, strict=True):
        _write_at(root / name, 0, as_bytes(rows))


def head_view(root: Path, spec: ArraySpec, head: int) -> Array:
    """One head's rows `[rows, D]`, or records `[rows]`, mapped from its files; read-only and zero-copy."""
    data = map_parts([(root / file, size, used) for file, size, used in spec.head_parts(head)])
    rows = data.view(spec.numpy_dtype).reshape(-1, spec.shape[2])[: spec.shape[1]]
    return encodings.as_records(rows, spec.dtype) if spec.dtype in encodings.LARGEST_CODE else rows


def row_crcs(root: Path, spec: ArraySpec, rows: int) -> list[int]:
    """CRC-32 of the first `rows` rows of every head, without the bytes of a base, which nobody writes
    (`Committed.shared` is of those).
    """
    if not rows:
        return [0] * spec.shape[0]
    heads = (head_view(root, spec, head) for head in range(spec.shape[0]))
    return [zlib.crc32(as_bytes(head[:rows])[spec.base_bytes :]) for head in heads]


def list_view(root: Path, spec: ArraySpec) -> Array:
    """An array of rank 1, mapped from its one chunk file; read-only and zero-copy."""
    return map_files([root / name for name in spec.files()], spec.chunk_bytes).view(spec.numpy_dtype)


def as_bytes(array: Array) -> memoryview:
    """The bytes of an array, without a copy where it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _write_at(file: Path, offset: int, data: memoryview) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        write_all(descriptor, offset, data)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, offset: int, data: memoryview) -> None:
    """Write the data, of which the system may take less at once."""
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


class EncodingLoss(NamedTuple):
    """Sums over the rows so far: squares of the errors, squares of the numbers, and the largest error.

    They are summed token by token, so that they do not depend on how the tokens were grouped.
    """

    squares: float = 0.0
    power: float = 0.0
    largest: float = 0.0

    def after(self, rows: Array, stored: Array) -> EncodingLoss:
        """With `rows [Hkv, T, D]`, of which `stored` was kept."""
        wide = rows.astype(np.float64)
        off = wide - stored
        largest = float(np.abs(off).max(initial=self.largest))
        return EncodingLoss(_sum(self.squares, off * off), _sum(self.power, wide * wide), largest)


Errors = Mapping[str, tuple[float, float, float]]
"""By array, the sums of an `EncodingLoss`."""


class Encoder:
    """Encodes the rows of every full-attention layer; `errors` are those of the encoded arrays, by name."""

    def __init__(self, manifest: Manifest, errors: Errors, at_seam: Errors) -> None:
        if not {*errors} == {*at_seam} == {*no_errors(manifest)}:
            raise ValueError("these are the errors of other arrays")
        self.manifest = manifest
        self.errors = {name: EncodingLoss(*sums) for name, sums in errors.items()}
        self.at_seam = {name: EncodingLoss(*sums) for name, sums in at_seam.items()}

    def block(self, layer: int, kind: str, rows: Array) -> tuple[Array, Array]:
        """`rows [Hkv, T, D]` as they are written, and as numbers; `StoreError` where one has no code."""
        encoding = self.manifest.encoding(kind)
        if encoding is None:
            return rows, rows
        try:
            records = encodings.encode(rows, encoding)
        except InvalidIndexInput as error:
            raise StoreError(
                f"The {kind} of layer {layer} hold NaN or infinite values, which cannot be encoded: "
                "prefill in another dtype."
            ) from error
        return encodings.as_raw(records), encodings.decode(records)

    def count(self, layer: int, kind: str, rows: Array, stored: Array) -> None:
        """Add the error of rows that were written, of which `stored` was kept."""
        if self.manifest.encoding(kind):
            name = array_name(layer, kind)
            self.errors[name] = self.errors[name].after(rows, stored)

    def cost(self) -> dict[str, list[dict[str, Any]]]:
        """What the manifest says of the errors."""
        cost: dict[str, list[dict[str, Any]]] = {}
        for name, (squares, power, largest) in self.errors.items():
            _, layer, kind = name.split("/")
            relative = sqrt(squares / power) if power else 0.0
            sums = list(self.at_seam[name])
            entry = {"layer": int(layer), "relative_rms": relative, "largest": largest, "sums": sums}
            cost.setdefault(kind, []).append(entry)
        return cost


def no_errors(manifest: Manifest) -> dict[str, EncodingLoss]:
    """Those of a store before its first row."""
    layers = manifest.shape.full_layers
    return {array_name(layer, kind): EncodingLoss() for kind in manifest.encoded for layer in layers}


def _sum(total: float, numbers: Array) -> float:
    """`total` and the sum of `numbers [Hkv, T, D]`, one token after another."""
    tokens: Array = reduce(np.add, numbers.sum(axis=-1))
    return float(np.cumsum(np.concatenate([[total], tokens]))[-1])
