"""Our own ways of a decoding step in one layer, through the engine's code: search, then attention where the
rows lie; and the bytes that a step must read, by counting. A way is made ready for a `k` and then timed by
`step.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.fidelity import Ids
from benchmarks.layers import Array, Float32, Layer, MemoryLayer
from offload_decode.indexes import registry
from offload_decode.indexes.base import VectorIndex
from offload_decode.indexes.clusters.index import ClusteredIndex
from offload_decode.selectors.base import EVERYTHING
from offload_decode.types import Selection

OURS, BASELINE = "ours", "baseline"
INDEX_K, RECALL = 100, 0.98  # that indexes are tuned for


@dataclass(frozen=True)
class Traffic:
    """Bytes `in_order`, and of `rows` from random places."""

    in_order: int
    rows: int


@dataclass(frozen=True)
class Way:
    """One way of a step. It serves the first `heads` KV heads of the layer, `side` says whose it is, and
    `parameter` what was tuned. `step` takes queries `[heads, R, D]`, R = batch · group, to outputs of the
    same shape; `chosen` gives the tokens that are attended to, a head's `[R, n]` padded with -1 (None: all
    tokens); `traffic` counts bytes, where they can be counted.
    """

    name: str
    side: str
    heads: int
    step: Callable[[Float32], Float32]
    chosen: Callable[[Float32], list[Ids]] | None = None
    parameter: str = ""
    traffic: Callable[[Float32], Traffic] | None = None


Maker = Callable[[int], Way]  # of a k


def index_way(layer: Layer, kind: str) -> Maker:
    """Top-k attention with one index of `kind` for each KV head, as the engine searches it."""
    chosen = registry.get(kind)
    built = [
        chosen.build(keys, tuning, digest="benchmark", target_recall=RECALL, k=min(INDEX_K, layer.length))
        for keys, tuning in zip(layer.keys, layer.tuning, strict=True)
    ]
    memory, exact = MemoryLayer(layer), chosen.exact_scores
    records = [index.recall for index in built if index.recall is not None]
    tuned = {record.value for record in records}
    parameter = f"{records[0].parameter} {min(tuned)}-{max(tuned)}" if records else ""

    def at(k: int) -> Way:
        def step(rows: Float32) -> Float32:
            hits = chosen.search_heads(built, rows, k)
            scores = torch.from_numpy(hits.scores) if exact else None
            return memory.attend(rows, Selection(torch.from_numpy(hits.ids), scores))

        def tokens(rows: Float32) -> list[Ids]:
            return list(chosen.search_heads(built, rows, k).ids)

        def traffic(rows: Float32) -> Traffic:
            return search_traffic(layer, built, rows, tokens(rows))

        counted = traffic if chosen is ClusteredIndex else None
        return Way(kind, OURS, len(built), step, tokens, parameter, counted)

    return at


def all_way(layer: Layer) -> Maker:
    """Dense attention to the store as it lies, whatever the k."""
    memory = MemoryLayer(layer)
    return lambda k: Way("all", OURS, len(layer.keys), lambda rows: memory.attend(rows, EVERYTHING))


def search_traffic(
    layer: Layer, built: Sequence[VectorIndex], rows: Float32, ids: Sequence[Array]
) -> Traffic:
    """A search of the clusters of every head for `rows [Hkv, R, D]`, which found `ids [R, k]`, and the values
    of these; what several rows of a head need is read once.
    """
    values = sum(len(np.unique(found[found >= 0])) for found in ids) * row_bytes(layer.values[0])
    heads = [_cell_traffic(*head) for head in zip(built, rows, ids, strict=True)]
    return Traffic(sum(head.in_order for head in heads), sum(head.rows for head in heads) + values)


def row_bytes(rows: Array) -> int:
    """Bytes of a stored row."""
    return rows.nbytes // len(rows)


def _cell_traffic(index: Any, queries: Float32, ids: Array) -> Traffic:
    """Every cell's mean and variance; the codes, scales and ids of the cells whose bound reaches the k-th
    best score of any row; and the keys that were found, to score them exactly.
    """
    cells = index.cells
    spread = np.sqrt(np.maximum(queries**2 @ cells.variances.T, 0))
    bounds = queries @ cells.means.T + index.deviations_for(ids.shape[1]) * spread
    worst = (index.keys[ids[:, -1]].astype(np.float32) * queries).sum(axis=1)
    share = cells.counts[(bounds >= worst[:, None]).any(axis=0)].sum() / cells.counts.sum()
    coded = cells.codes.nbytes + cells.scales.nbytes + cells.ids.nbytes
    bounding = cells.means.nbytes + cells.variances.nbytes
    return Traffic(int(bounding + share * coded), len(np.unique(ids)) * row_bytes(index.keys))
