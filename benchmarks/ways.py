"""Our own ways of a decoding step in one layer, through the engine's code: search, then attention where the
rows lie; and the bytes that a step must read, by counting. A way is made ready for a `k` and then timed by
`step.py`.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

from benchmarks.fidelity import Ids, Sample
from benchmarks.layers import Array, Float32, Layer
from offload_decode.attention.pages import loaded_tokens
from offload_decode.attention.pages_reference import page_tokens
from offload_decode.attention.queries import Queries
from offload_decode.indexes import registry
from offload_decode.indexes.base import VectorIndex
from offload_decode.indexes.clusters.index import ClusteredIndex
from offload_decode.indexes.flat import FlatIndex
from offload_decode.kv.host_cache import HostKV
from offload_decode.selectors.base import EVERYTHING
from offload_decode.selectors.registry import create
from offload_decode.store.memory import MemoryStore
from offload_decode.types import LayerKind, ModelShape, PageSelection, Selection, StepStats

OURS, BASELINE = "ours", "baseline"
INDEX_K, RECALL = 100, 0.98  # that indexes are tuned for
PAGE = 16


@dataclass(frozen=True)
class Traffic:
    """Bytes `in_order`, and of `rows` from random places."""

    in_order: int
    rows: int


@dataclass(frozen=True)
class Way:
    """One way of a step. It serves the first `heads` KV heads of the layer, `side` says whose it is, and
    `parameter` what was tuned. `step` takes queries `[heads, R, D]`, R = batch · group, to outputs of the
    same shape; `traffic` counts bytes, where they can be counted; `chosen` gives the tokens that are attended
    to, a head's `[R, n]` padded with -1 (None: all tokens). A step goes through `layers` layers alike: a
    layer's time is that share of it.
    """

    name: str
    side: str
    heads: int
    step: Callable[[Float32], Float32]
    traffic: Callable[[Float32], Traffic | None]
    chosen: Callable[[Float32], list[Ids]] | None = None
    build_seconds: float = 0.0
    parameter: str = ""
    layers: int = 1


Maker = Callable[[int], Way]  # of a k


class MemoryLayer:
    """A layer behind the engine's `HostKV`, without a store on disk."""

    def __init__(self, layer: Layer):
        self.layer = layer
        _, heads, self.group, dim = layer.steps.shape
        self.shape = ModelShape.uniform((LayerKind.FULL,), heads * self.group, heads, dim)
        # Bounds of pages are made from the keys, as pages of the store would be larger than Quest's.
        store = MemoryStore(self.shape, [layer.keys], [layer.values], page_size=1 << 20)
        self.host = HostKV(store, torch.device("cpu"))

    def queries(self, rows: Float32) -> Queries:
        return Queries(torch.from_numpy(rows), self.layer.scaling, None, self.group)

    def attend(self, rows: Float32, selection: Selection | PageSelection) -> Float32:
        out: Float32 = self.host.attend(0, self.queries(rows), selection, StepStats()).out.numpy()
        return out


def index_way(layer: Layer, kind: str) -> Maker:
    """Top-k attention with one index of `kind` for each KV head, as the engine searches it."""
    chosen = registry.get(kind)
    began = time.perf_counter()
    built = [
        chosen.build(keys, tuning, digest="benchmark", target_recall=RECALL, k=min(INDEX_K, layer.length))
        for keys, tuning in zip(layer.keys, layer.tuning, strict=True)
    ]
    seconds = time.perf_counter() - began
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

        def traffic(rows: Float32) -> Traffic | None:
            return search_traffic(layer, built, rows, tokens(rows))

        return Way(kind, OURS, len(built), step, traffic, tokens, seconds, parameter)

    return at


def quest_way(layer: Layer) -> Maker:
    """Quest's pages of 16 tokens, with the smallest budget (k, 2k, 4k, …) whose pages hold enough mass."""
    memory = MemoryLayer(layer)
    began = time.perf_counter()
    selector = create("quest", {"budget": "16"}, memory.host, memory.shape).selector
    selector.choose(0, memory.queries(layer.steps[0]), 16)  # makes the bounds
    seconds = time.perf_counter() - began
    pair = row_bytes(layer.keys[0]) + row_bytes(layer.values[0])
    bounds = 2 * (layer.length // PAGE) * layer.steps.shape[-1] * 2 * len(layer.keys)  # halves

    def select(rows: Float32, budget: int) -> PageSelection:
        return cast(PageSelection, selector.choose(0, memory.queries(rows), budget))

    def tokens(rows: Float32, budget: int) -> list[Ids]:
        selection = select(rows, budget)
        listed = page_tokens(selection.pages, selection.page_size, layer.length, selection.limit)
        return list(listed.numpy())

    def at(k: int) -> Way:
        sample = Sample.of(layer, k)
        budgets = [*(k << times for times in range(32) if k << times < layer.length), layer.length]
        budget = next(b for b in budgets if sample.holds_enough(tokens(sample.rows, b)) or b == budgets[-1])

        def traffic(rows: Float32) -> Traffic:
            selection = select(rows, budget)
            return Traffic(
                bounds + loaded_tokens(selection.pages, selection.page_size, layer.length) * pair, 0
            )

        return Way(
            "quest",
            OURS,
            len(layer.keys),
            lambda rows: memory.attend(rows, select(rows, budget)),
            traffic,
            lambda rows: tokens(rows, budget),
            seconds,
            f"budget {budget:,}",
        )

    return at


def all_way(layer: Layer) -> Maker:
    """Dense attention to the store as it lies, whatever the k."""
    memory = MemoryLayer(layer)
    size = sum(rows.nbytes for rows in (*layer.keys, *layer.values))

    def step(rows: Float32) -> Float32:
        return memory.attend(rows, EVERYTHING)

    return lambda k: Way("all", OURS, len(layer.keys), step, lambda rows: Traffic(size, 0))


WHOLE: dict[str, Callable[[Layer], Maker]] = {"quest": quest_way, "all": all_way}
"""What is of no index kind."""


def search_traffic(
    layer: Layer, built: Sequence[VectorIndex], rows: Float32, ids: Sequence[Array]
) -> Traffic | None:
    """A search of every head for `rows [Hkv, R, D]`, which found `ids [R, k]`, and the values of these; what
    several rows of a head need is read once. None for kinds whose reading is not counted.
    """
    values = sum(len(np.unique(found[found >= 0])) for found in ids) * row_bytes(layer.values[0])
    if isinstance(built[0], FlatIndex):
        return Traffic(sum(keys.nbytes for keys in layer.keys), values)
    if not isinstance(built[0], ClusteredIndex):
        return None
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
