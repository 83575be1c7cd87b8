"""The candidates against what they would replace: `python -m benchmarks.candidates.measure --store STORE`.

Each runs on one KV head at a time, on one thread, from cold caches, for the four queries of a group: heads
captured in a store (the mean over those of a layer) and two made-up ones (`benchmarks.layers`). Queries that
graphs learn from are never those that judge. `x flat`: how many times as fast as the exact scan, which is
timed in turns with each. `mass`: the softmax mass of the keys found over that of the exact top-k.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks import layers
from benchmarks.candidates import page_tree, query_graph, scans
from benchmarks.layers import Float32
from benchmarks.tables import table
from benchmarks.timing import flush
from indexes.flat import FlatIndex
from offload_decode.store.reader import KVStore

Ids = npt.NDArray[np.int64]
Record = dict[str, Any]

STEPS, LEARNED = 16, 256  # groups of queries that judge, and made-up ones that graphs learn from
TURNS = 11  # of a timing
KS, GRAPH_K = (64, 1024), 100
RERANKS = (1.0, 1.25, 2.0, 4.0)
RECALLS, MASS = (0.9, 0.95, 0.99), 0.99
CONSTRUCTION_BEAM = 200  # hnswlib's, its default


class Times(NamedTuple):
    """Milliseconds."""

    own: float
    flat: float


@dataclass(frozen=True)
class Head:
    """keys `[N, D]` in memory, training `[M, D]` and judging queries `[S, G, D]`."""

    keys: Float32
    training: Float32
    steps: Float32
    scaling: float

    @cached_property
    def judged(self) -> Float32:
        return self.steps.reshape(-1, self.steps.shape[-1])

    @cached_property
    def logits(self) -> Float32:
        """`[S G, N]`, above each row's largest."""
        scores = self.judged @ self.keys.T * np.float32(self.scaling)
        scores -= scores.max(axis=1, keepdims=True)
        return scores

    @cached_property
    def best(self) -> Ids:
        """The largest of KS, best first."""
        return query_graph.nearest(self.keys, self.judged, max(KS)).astype(np.int64)

    def judge(self, ids: Ids, k: int) -> tuple[float, float]:
        """Recall and mass ratio of `ids [S G, k]`, padded with -1."""
        recall, mass = [], []
        for row, found, logits in zip(self.best[:, :k], ids, self.logits, strict=True):
            found = found[found >= 0]
            recall.append(len(np.intersect1d(row, found)) / k)
            mass.append(np.exp(logits[found]).sum() / np.exp(logits[row]).sum())
        return float(np.mean(recall)), float(np.mean(mass))

    def against_flat(self, search: Callable[[Float32], object], k: int, queries: int | None = None) -> Times:
        """Milliseconds of `search` and of the exact scan, for a step or its first `queries`: medians of turns
        in which both are timed, one after the other, so that what else the machine does meets both. The
        processor's time, not the clock's: all runs on this thread, and others may want the cores.
        """
        index = FlatIndex.build(self.keys, digest="measured")
        taken: list[tuple[float, float]] = []
        search(self.steps[0][:queries])
        for turn in range(TURNS):
            step, pair = self.steps[turn % len(self.steps)][:queries], []
            for work in (search, lambda step: index.search(step, k)):
                flush()
                began = time.thread_time()
                work(step)
                pair.append(1e3 * (time.thread_time() - began))
            taken.append((pair[0], pair[1]))
        return Times(*np.median(taken, axis=0))


def heads(store: Path | None, length: int) -> Iterator[tuple[str, list[Head]]]:
    """By name: those of a store's layers, and made-up ones."""
    if store is not None:
        layer = layers.captured(store, steps=STEPS)
        kv_heads = KVStore.open(store).manifest.shape.kv_heads
        for first in range(0, len(layer.keys), kv_heads):
            own = [_head(layer, number, length) for number in range(first, first + kv_heads)]
            full = KVStore.open(store).manifest.shape.full_layers[first // kv_heads]
            yield f"captured, layer {full}", own
    for make in (layers.long_tailed, layers.gaussian):
        made = make(length, heads=1, dtype="float32", steps=STEPS + LEARNED)
        learned = made.steps[STEPS:].reshape(1, -1, made.steps.shape[-1])
        yield made.name, [_head(replace(made, steps=made.steps[:STEPS], tuning=learned), 0, length)]


def _head(layer: layers.Layer, number: int, length: int) -> Head:
    keys = np.array(layer.keys[number][:length], np.float32)
    steps = np.ascontiguousarray(layer.steps[:, number])
    return Head(keys, layer.tuning[number], steps, layer.scaling)


def measure_scans(name: str, own: Sequence[Head]) -> Iterator[Record]:
    """Every scan at every k and rerank."""
    kinds: list[Callable[[Float32], scans.Scan]] = [
        lambda keys: scans.IntegerScan(keys, 8),
        lambda keys: scans.IntegerScan(keys, 4),
        lambda keys: scans.PqScan(keys, 32),
        lambda keys: scans.PqScan(keys, 16),
        scans.RabitqScan,
    ]
    for kind in kinds:
        began = time.perf_counter()
        built = [kind(head.keys) for head in own]
        build = (time.perf_counter() - began) / len(own)
        for k in KS:
            for rerank in RERANKS:
                found = []
                for scan, head in zip(built, own, strict=True):

                    def search(queries: Float32, scan: Any = scan, head: Head = head) -> Ids:
                        return scans.search(scan, head.keys, queries, k, rerank)  # noqa: B023

                    ids = np.concatenate([search(step) for step in head.steps])
                    found.append((*head.judge(ids, k), *head.against_flat(search, k)))
                recall, mass, taken, flat = np.mean(found, axis=0)
                yield {
                    "data": name,
                    "k": k,
                    "way": built[0].name,
                    "bytes": built[0].bytes,
                    "build_s": build,
                    "rerank": rerank,
                    "ms": taken,
                    "flat_ms": flat,
                    "times_flat": flat / taken,
                    "recall": recall,
                    "mass": mass,
                }


def measure_graphs(name: str, own: Sequence[Head]) -> Iterator[Record]:
    """The first head: graphs at each beam of a ladder, and the int8 scan; milliseconds a query. `met` is 0
    where a library does not count the keys that it meets.
    """
    head = own[0]
    group = head.steps.shape[1]
    scan = scans.IntegerScan(head.keys, 8)

    def by_scan(queries: Float32) -> Ids:
        return scans.search(scan, head.keys, queries, GRAPH_K, 2)

    ways: list[tuple[str, float, Callable[[Float32, int], tuple[Ids, float]]]] = []
    began = time.perf_counter()
    graph = query_graph.QueryGraph(head.keys, head.training)
    ways.append(
        (
            "query-aware graph",
            time.perf_counter() - began,
            lambda queries, beam: graph.search(queries, GRAPH_K, beam),
        )
    )
    for links in (16, 32):
        began = time.perf_counter()
        hnsw = _hnsw(head.keys, links)

        def walk(queries: Float32, beam: int, hnsw: Any = hnsw) -> tuple[Ids, float]:
            hnsw.set_ef(beam)
            return hnsw.knn_query(queries, GRAPH_K, num_threads=1)[0].astype(np.int64), 0

        ways.append((f"hnswlib M={links}", time.perf_counter() - began, walk))
    for way, build, find in ways:
        beam = GRAPH_K
        recall = mass = 0.0
        while (recall < max(RECALLS) or mass < MASS) and beam <= len(head.keys) // 4:
            ids, met = find(head.judged, beam)
            recall, mass = head.judge(ids, GRAPH_K)
            times = head.against_flat(lambda step: find(step, beam), GRAPH_K)  # noqa: B023
            yield _graph_record(name, way, build, beam, met, times, group, recall, mass)
            beam = int(beam * 1.5)
    recall, mass = head.judge(np.concatenate([by_scan(step) for step in head.steps]), GRAPH_K)
    for way, queries in (("int8 scan, r = 2", group), ("the same for 1 query", 1)):
        times = head.against_flat(by_scan, GRAPH_K, queries)
        yield _graph_record(name, way, 0.0, 0, len(head.keys), times, queries, recall, mass)


def _hnsw(keys: Float32, links: int) -> Any:
    """A graph of Euclidean neighbours walked by inner product, as `indexes.hnswlib` has it."""
    import hnswlib

    graph = hnswlib.Index(space="l2", dim=keys.shape[1])
    graph.init_index(max_elements=len(keys), M=links, ef_construction=CONSTRUCTION_BEAM)
    graph.add_items(keys, num_threads=1)
    return hnswlib.Index(params=graph.__getstate__()[0] | {"space": "ip"})


def _graph_record(
    name: str,
    way: str,
    build: float,
    beam: int,
    met: float,
    times: Times,
    queries: int,
    recall: float,
    mass: float,
) -> Record:
    return {
        "data": name,
        "way": way,
        "build_s": build,
        "beam": beam,
        "met": met,
        "ms": times.own / queries,
        "flat_ms": times.flat / queries,
        "times_flat": times.flat / times.own,
        "recall": recall,
        "mass": mass,
    }


def measure_trees(name: str, own: Sequence[Head]) -> Iterator[Record]:
    """Exact top-k of one query at a time, keys in the order of the text and in a compact one."""
    for k in KS:
        for order, arranged in (("text", None), ("k-d", page_tree.compact_order)):
            found = []
            for head in own:
                tree = page_tree.PageTree(head.keys, arranged and arranged(head.keys))
                ids, visited = tree.search(head.judged, k)
                times = head.against_flat(lambda step: tree.search(step, k), k, 1)  # noqa: B023
                shares = visited.keys / len(head.keys), visited.nodes / tree.nodes
                found.append((head.judge(ids, k)[0], *shares, *times))
            recall, keys, nodes, taken, flat = np.mean(found, axis=0)
            yield {
                "data": name,
                "k": k,
                "order": order,
                "recall": recall,
                "keys": keys,
                "nodes": nodes,
                "ms": taken,
                "flat_ms": flat,
                "times_flat": flat / taken,
            }


def show_scans(records: Sequence[Record]) -> str:
    """A cell is: times as fast as flat, recall, mass ratio."""
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for one in records:
        groups.setdefault((one["data"], one["k"], one["way"]), []).append(one)
    rows = [
        [
            f"{data}, k = {k}: {way}",
            f"{own[0]['bytes']:g}",
            f"{own[0]['build_s']:.2f}",
            f"{np.median([one['flat_ms'] for one in own]):.2f}",
            *(f"{one['times_flat']:.1f}x {one['recall']:.3f} {one['mass']:.4f}" for one in own),
        ]
        for (data, k, way), own in groups.items()
    ]
    return table(
        ["compressed scans", "bytes/key", "build s", "flat ms", *(f"r = {r:g}" for r in RERANKS)], rows
    )


def show_graphs(records: Sequence[Record]) -> str:
    """The least time of a query at each recall and at the mass, among the beams that were tried."""
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for one in records:
        groups.setdefault((one["data"], one["way"]), []).append(one)
    rows = []
    for (data, way), own in groups.items():
        cells = []
        for figure, target in (*(("recall", recall) for recall in RECALLS), ("mass", MASS)):
            able = [one for one in own if one[figure] >= target]
            if not able:
                cells.append("never")
                continue
            best = min(able, key=lambda one: float(one["ms"]))
            met = f" {best['met']:,.0f}" if best["met"] else ""
            cells.append(f"{best['ms']:.3f} ({best['times_flat']:.1f}x){met}")
        rows.append([f"{data}: {way}", f"{own[0]['build_s']:.1f}", f"{own[0]['flat_ms']:.2f}", *cells])
    wanted = [*(f"recall {recall:g}: ms (x flat) met" for recall in RECALLS), f"mass {MASS:g}"]
    return table([f"graphs, k = {GRAPH_K}, a query", "build s", "flat ms", *wanted], rows)


def show_trees(records: Sequence[Record]) -> str:
    rows = [
        [
            f"{one['data']}, k = {one['k']}: {one['order']} order",
            f"{one['recall']:.3f}",
            f"{one['keys']:.1%}",
            f"{one['nodes']:.1%}",
            f"{one['ms']:.2f}",
            f"{one['times_flat']:.2f}x",
        ]
        for one in records
    ]
    return table(["page tree, a query", "recall", "keys visited", "nodes visited", "ms", "x flat"], rows)


CANDIDATES: dict[str, tuple[Callable[..., Iterator[Record]], Callable[[Sequence[Record]], str]]] = {
    "scans": (measure_scans, show_scans),
    "graph": (measure_graphs, show_graphs),
    "tree": (measure_trees, show_trees),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--store", type=Path, help="whose keys and sampled queries are used; else made-up ones"
    )
    parser.add_argument("--length", type=int, default=131_072, help="keys of a head")
    parser.add_argument("--which", default=",".join(CANDIDATES), help="of scans, graph, tree")
    parser.add_argument("--data", help="only data whose name contains this, such as `layer 3`")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the tables")
    arguments = parser.parse_args()
    chosen = arguments.which.split(",")
    if unknown := set(chosen) - set(CANDIDATES):
        parser.error(f"no such candidate: {', '.join(sorted(unknown))}; there are {', '.join(CANDIDATES)}")
    if arguments.length < 2 * max(KS):
        parser.error(f"--length must be at least {2 * max(KS)}")
    found: dict[str, list[Record]] = {name: [] for name in chosen}
    for name, own in heads(arguments.store, arguments.length):
        if arguments.data and arguments.data not in name:
            continue
        for candidate in chosen:
            print(f"{name}: {candidate}", file=sys.stderr, flush=True)
            found[candidate] += CANDIDATES[candidate][0](name, own)
    if arguments.json:
        print(json.dumps({"length": arguments.length, **found}, default=float))
    else:
        print("\n\n".join(CANDIDATES[name][1](records) for name, records in found.items()))


if __name__ == "__main__":
    main()
