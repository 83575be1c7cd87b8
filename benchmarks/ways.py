"""Our own ways of a decoding step in one layer, through the engine's code: search, then attention where the
rows lie. A way is made ready for a `k` and then timed by `step.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch

from benchmarks import traffic
from benchmarks.fidelity import Ids, Sample
from benchmarks.layers import Float32, Layer
from benchmarks.traffic import Traffic
from offload_decode.attention.pages import loaded_tokens
from offload_decode.attention.pages_reference import page_tokens
from offload_decode.attention.queries import Queries
from offload_decode.indexes import registry
from offload_decode.kv.host_cache import HostKV
from offload_decode.selectors.base import EVERYTHING
from offload_decode.selectors.registry import create
from offload_decode.store.memory import MemoryStore
from offload_decode.types import LayerKind, ModelShape, PageSelection, Selection, StepStats

OURS, BASELINE = "ours", "baseline"
INDEX_K, RECALL = 100, 0.98  # that indexes are tuned for
PAGE = 16


@dataclass(frozen=True)
class Way:
    """One way of a step. It serves the first `heads` KV heads of the layer, `side` says whose it is, and
    `parameter` what was tuned. `step` takes queries `[heads, R, D]`, R = batch · group, to outputs of the
    same shape; `chosen` gives the tokens that it attends to, a head's `[R, n]` padded with -1 (None: all
    tokens); `traffic` counts bytes, where they can be counted. A step goes through `layers` layers alike: a
    layer's time is that share of it.
    """

    name: str
    side: str
    heads: int
    build_seconds: float
    parameter: str
    step: Callable[[Float32], Float32]
    chosen: Callable[[Float32], list[Ids]] | None
    traffic: Callable[[Float32], Traffic | None] = lambda queries: None
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

    def at(k: int) -> Way:
        def step(rows: Float32) -> Float32:
            hits = chosen.search_heads(built, rows, k)
            scores = torch.from_numpy(hits.scores) if exact else None
            return memory.attend(rows, Selection(torch.from_numpy(hits.ids), scores))

        def tokens(rows: Float32) -> list[Ids]:
            return list(chosen.search_heads(built, rows, k).ids)

        def counted(rows: Float32) -> Traffic | None:
            return traffic.of_search(layer, built, rows, tokens(rows))

        tuned = {index.recall.value for index in built if index.recall is not None}
        record = next((index.recall for index in built if index.recall is not None), None)
        parameter = "" if record is None else f"{record.parameter} {min(tuned)}-{max(tuned)}"
        return Way(
            kind,
            OURS,
            len(built),
            seconds,
            parameter,
            step,
            tokens,
            counted,
        )

    return at


def quest_way(layer: Layer) -> Maker:
    """Quest's pages of 16 tokens, with the smallest budget (k, 2k, 4k, …) whose pages hold enough mass."""
    memory = MemoryLayer(layer)
    began = time.perf_counter()
    selector = create("quest", {"budget": "16"}, memory.host, memory.shape).selector
    selector.choose(0, memory.queries(layer.steps[0]), 16)  # makes the bounds
    seconds = time.perf_counter() - began
    pair = traffic.row_bytes(layer.keys[0]) + traffic.row_bytes(layer.values[0])
    bounds = 2 * (layer.length // PAGE) * layer.steps.shape[-1] * 2 * len(layer.keys)  # halves

    def select(rows: Float32, budget: int) -> PageSelection:
        return cast(PageSelection, selector.choose(0, memory.queries(rows), budget))

    def tokens(rows: Float32, budget: int) -> list[Ids]:
        own = select(rows, budget)
        listed = page_tokens(own.pages, own.page_size, layer.length, own.limit)
        return list(listed.repeat_interleave(memory.group, dim=1).numpy())

    def at(k: int) -> Way:
        sample = Sample.of(layer, k)
        budgets = [*(k << times for times in range(32) if k << times < layer.length), layer.length]
        budget = next(b for b in budgets if sample.holds_enough(tokens(sample.rows, b)) or b == budgets[-1])

        def counted(rows: Float32) -> Traffic:
            own = select(rows, budget)
            loaded = loaded_tokens(own.pages, own.page_size, layer.length)
            return Traffic(bounds + loaded * pair, 0)

        return Way(
            "quest",
            OURS,
            len(layer.keys),
            seconds,
            f"budget {budget:,}",
            lambda rows: memory.attend(rows, select(rows, budget)),
            lambda rows: tokens(rows, budget),
            counted,
        )

    return at


def all_way(layer: Layer) -> Maker:
    """Dense attention to the store as it lies, whatever the k."""
    memory = MemoryLayer(layer)
    read = sum(rows.nbytes for side in (layer.keys, layer.values) for rows in side)

    def at(k: int) -> Way:
        return Way(
            "all",
            OURS,
            len(layer.keys),
            0.0,
            "",
            lambda rows: memory.attend(rows, EVERYTHING),
            None,
            lambda queries: Traffic(read, 0),
        )

    return at


WHOLE: dict[str, Callable[[Layer], Maker]] = {"quest": quest_way, "all": all_way}
"""What is of no index kind."""
