"""Rows on their way into a store: encoded where the manifest says so, and what that cost."""

from __future__ import annotations

from functools import reduce
from math import sqrt
from typing import Any, NamedTuple

import numpy as np

from offload_decode.errors import StoreError
from offload_decode.indexes.errors import InvalidIndexInput
from offload_decode.indexes.rows import encodings
from offload_decode.store.format import Array, Manifest
from offload_decode.store.layout import array_name

KINDS = ("keys", "values")


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


class Block(NamedTuple):
    """Rows `[Hkv, T, ...]` as they are written, and the numbers `[Hkv, T, D]` that they stand for."""

    written: Array
    stored: Array


class Encoder:
    """Encodes the rows of every full-attention layer; `errors` are those of the encoded arrays, by name."""

    def __init__(self, manifest: Manifest, errors: dict[str, EncodingLoss]):
        self.manifest = manifest
        self.errors = errors
        self.at_seam = dict(errors)

    def block(self, layer: int, kind: str, rows: Array) -> Block:
        """`rows [Hkv, T, D]` of `keys` or `values`. Raises `StoreError` for numbers that have no code."""
        encoding = self.manifest.encoding(kind)
        if encoding is None:
            return Block(rows, rows)
        try:
            records = encodings.encode(rows, encoding)
        except InvalidIndexInput as error:
            raise StoreError(
                f"The {kind} of layer {layer} hold NaN or infinite values, which cannot be encoded: "
                "prefill in another dtype."
            ) from error
        return Block(encodings.as_raw(records), encodings.decode(records))

    def count(self, layer: int, kind: str, rows: Array, block: Block) -> None:
        """Add the error of rows that were written."""
        if self.manifest.encoding(kind):
            name = array_name(layer, kind)
            self.errors[name] = self.errors[name].after(rows, block.stored)

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


def errors_at_seam(manifest: Manifest) -> dict[str, EncodingLoss]:
    """Those of a written store, over the tokens up to its seam."""
    return {
        array_name(entry["layer"], kind): EncodingLoss(*entry["sums"])
        for kind, entries in manifest.kv_error.items()
        for entry in entries
    }


def no_errors(manifest: Manifest) -> dict[str, EncodingLoss]:
    """Those of a store before its first row."""
    stored = ("keys",) if manifest.shape.latent else KINDS
    kinds = [kind for kind in stored if manifest.encoding(kind)]
    return {array_name(layer, kind): EncodingLoss() for kind in kinds for layer in manifest.shape.full_layers}


def _sum(total: float, numbers: Array) -> float:
    """`total` and the sum of `numbers [Hkv, T, D]`, one token after another."""
    tokens: Array = reduce(np.add, numbers.sum(axis=-1))
    return float(np.cumsum(np.concatenate([[total], tokens]))[-1])
