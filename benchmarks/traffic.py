"""The bytes that a step must read, by counting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.layers import Array, Float32, Layer
from offload_decode.indexes.base import VectorIndex
from offload_decode.indexes.clusters.index import ClusteredIndex
from offload_decode.indexes.flat import FlatIndex


@dataclass(frozen=True)
class Traffic:
    """Bytes `in_order`, and of `rows` from random places."""

    in_order: int
    rows: int


def of_search(
    layer: Layer, built: Sequence[VectorIndex], rows: Float32, ids: Sequence[Array]
) -> Traffic | None:
    """A search of every head for `rows [Hkv, R, D]`, which found `ids [R, k]`, and the values of these; what
    several rows of a head need is read once. None for kinds whose reading is not counted.
    """
    values = sum(len(np.unique(own[own >= 0])) for own in ids) * row_bytes(layer.values[0])
    if isinstance(built[0], FlatIndex):
        return Traffic(sum(keys.nbytes for keys in layer.keys), values)
    if not isinstance(built[0], ClusteredIndex):
        return None
    parts = [_of_cells(index, queries, own) for index, queries, own in zip(built, rows, ids, strict=True)]
    return Traffic(sum(part.in_order for part in parts), sum(part.rows for part in parts) + values)


def row_bytes(rows: Array) -> int:
    """Bytes of a stored row."""
    return rows.nbytes // len(rows)


def _of_cells(index: Any, queries: Float32, ids: Array) -> Traffic:
    """Every cell's mean and variance; the codes, scales and ids of the cells whose bound reaches the k-th
    best score of any row; and the keys that were found, to score them exactly.
    """
    cells = index.cells
    spread = np.sqrt(np.maximum(queries**2 @ cells.variances.T, 0))
    bounds = queries @ cells.means.T + index.deviations_for(ids.shape[1]) * spread
    worst = np.array(
        [(index.keys[own[-1]].astype(np.float32) * q).sum() for own, q in zip(ids, queries, strict=True)]
    )
    share = cells.counts[(bounds >= worst[:, None]).any(axis=0)].sum() / cells.counts.sum()
    coded = cells.codes.nbytes + cells.scales.nbytes + cells.ids.nbytes
    bounding = cells.means.nbytes + cells.variances.nbytes
    found = len(np.unique(ids)) * row_bytes(index.keys)
    return Traffic(int(bounding + share * coded), found)
