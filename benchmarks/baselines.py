"""What our ways are compared with, none slowed down: their keys are float32 copies, as Faiss keeps them.

`per query head` is the top-k paper's code path (arXiv 2502.06766): one index for each KV head, one search for
each query head, the values gathered by numpy, the softmax in torch. Lists and graphs get the smallest
`nprobe` or `ef` that reaches `fidelity.ENOUGH` of the oracle's mass on the tuning queries. Their graphs link
Euclidean neighbours and are walked by inner product: graphs built by inner product found less at any `ef`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.fidelity import Ids, Sample
from benchmarks.layers import Float32, Layer
from benchmarks.traffic import Traffic
from benchmarks.ways import BASELINE, Maker, Way
from offload_decode.common.rows import encodings
from offload_decode.indexes import registry

faiss = registry.faiss()

LINKS, CONSTRUCTION_EF = 32, 100
LISTS = 4  # times the square root of the number of keys
TRAINING = 64  # keys a list

Search = Callable[[int, Float32, int, int], tuple[Ids, Float32]]  # head, queries, k, parameter


def flat(layer: Layer, grouped: bool = False) -> Maker:
    """Faiss' exact scan, one search for each query head; `grouped`: one for all queries of a KV head."""
    began = time.perf_counter()
    built = [faiss.IndexFlatIP(keys.shape[1]) for keys in layer.keys]
    for index, keys in zip(built, layer.keys, strict=True):
        index.add(encodings.decode(keys))
    seconds = time.perf_counter() - began
    size: int = layer.length * layer.steps.shape[-1] * 4

    def search(head: int, rows: Float32, k: int, _: int) -> tuple[Ids, Float32]:
        scores, ids = built[head].search(rows, k)
        return ids, scores

    def read(rows: int, _: Callable[[], object]) -> Traffic:
        return Traffic(len(built) * size * (1 if grouped else rows), 0)

    name = "faiss flat per KV head" if grouped else "faiss flat per query head"
    return _searched(layer, name, seconds, search, lambda k: [0], "", read, grouped)


def ivf(layer: Layer) -> Maker:
    """Inverted lists, trained on Euclidean distance, `4 sqrt(N)` of them."""
    began = time.perf_counter()
    lists = max(1, min(int(LISTS * layer.length**0.5), layer.length // 40))
    built = []
    for keys in layer.keys:
        wide = encodings.decode(keys)
        clustering = faiss.Clustering(wide.shape[1], lists)
        clustering.niter, clustering.min_points_per_centroid = 10, 1
        clustering.max_points_per_centroid = TRAINING
        nearest = faiss.IndexFlatL2(wide.shape[1])
        clustering.train(wide, nearest)
        coarse = faiss.IndexFlatIP(wide.shape[1])
        coarse.add(faiss.vector_to_array(clustering.centroids).reshape(lists, -1))
        index = faiss.IndexIVFFlat(coarse, wide.shape[1], lists, faiss.METRIC_INNER_PRODUCT)
        index.own_fields = True
        coarse.this.disown()
        index.is_trained = True
        own = nearest.search(wide, 1)[1].ravel()
        index.add_core(len(wide), faiss.swig_ptr(wide), None, faiss.swig_ptr(own))
        built.append(index)
    seconds = time.perf_counter() - began

    def search(head: int, rows: Float32, k: int, probes: int) -> tuple[Ids, Float32]:
        scores, ids = built[head].search(rows, k, params=faiss.SearchParametersIVF(nprobe=probes))
        return ids, scores

    def read(rows: int, searched: Callable[[], object]) -> Traffic:
        faiss.cvar.indexIVF_stats.reset()
        searched()
        scored = faiss.cvar.indexIVF_stats.ndis + rows * len(built) * lists
        return Traffic(scored * layer.steps.shape[-1] * 4, 0)

    name = "faiss IVF per query head"
    return _searched(layer, name, seconds, search, lambda k: rising(1, lists), "nprobe", read)


def hnsw(layer: Layer) -> Maker:
    """Faiss' graphs."""
    began = time.perf_counter()
    built = []
    for keys in layer.keys:
        graph = faiss.IndexHNSWFlat(keys.shape[1], LINKS, faiss.METRIC_L2)
        graph.hnsw.efConstruction = CONSTRUCTION_EF
        graph.add(encodings.decode(keys))
        graph.metric_type = graph.storage.metric_type = faiss.METRIC_INNER_PRODUCT
        built.append(faiss.deserialize_index(faiss.serialize_index(graph)))  # derives the search's direction
    seconds = time.perf_counter() - began

    def search(head: int, rows: Float32, k: int, ef: int) -> tuple[Ids, Float32]:
        scores, ids = built[head].search(rows, k, params=faiss.SearchParametersHNSW(efSearch=ef))
        return ids, scores

    def efs(k: int) -> list[int]:
        return rising(k, layer.length)

    def read(_: int, searched: Callable[[], object]) -> Traffic:
        faiss.cvar.hnsw_stats.reset()
        searched()
        walked = faiss.cvar.hnsw_stats
        return Traffic(0, 4 * (walked.ndis * layer.steps.shape[-1] + walked.nhops * 2 * LINKS))

    return _searched(layer, "faiss HNSW per query head", seconds, search, efs, "ef", read)


def hnswlib(layer: Layer) -> Maker:
    """The graphs of HNSW's authors."""
    library = registry.hnswlib()
    began = time.perf_counter()
    built = []
    for keys in layer.keys:
        graph = library.Index(space="l2", dim=keys.shape[1])
        graph.init_index(max_elements=len(keys), M=LINKS, ef_construction=CONSTRUCTION_EF)
        graph.add_items(encodings.decode(keys), num_threads=os.cpu_count() or 1)
        built.append(library.Index(params=graph.__getstate__()[0] | {"space": "ip"}))
    seconds = time.perf_counter() - began

    def search(head: int, rows: Float32, k: int, ef: int) -> tuple[Ids, Float32]:
        built[head].set_ef(ef)
        try:
            ids, distances = built[head].knn_query(rows, k)
        except RuntimeError:  # the walk found fewer than k keys
            return np.full((len(rows), k), -1, np.int64), np.full((len(rows), k), -np.inf, np.float32)
        return ids.astype(np.int64), 1 - distances

    def efs(k: int) -> list[int]:
        return rising(k, layer.length)

    return _searched(layer, "hnswlib per query head", seconds, search, efs, "ef")


def dense(layer: Layer, dtype: torch.dtype, fused: bool) -> Maker:
    """Torch's dense attention to everything: its fused kernel with the group's heads as query rows of their
    KV head, so that each key is read once; or two matrix products and a softmax, grouped in the same way.
    """
    keys, values = (
        torch.stack([torch.from_numpy(encodings.decode(own)).to(dtype) for own in side])
        for side in (layer.keys, layer.values)
    )
    size = keys.nbytes + values.nbytes

    def step(rows: Float32) -> Float32:
        query = torch.from_numpy(rows).to(dtype)
        if fused:
            attend = torch.nn.functional.scaled_dot_product_attention
            out = attend(query[None], keys[None], values[None], scale=layer.scaling)[0]
        else:
            weights = torch.matmul(query, keys.transpose(1, 2)).mul_(layer.scaling).softmax(-1)
            out = torch.matmul(weights, values)
        return out.float().numpy()

    name = f"torch dense, {'fused' if fused else 'matmul'}, {str(dtype).removeprefix('torch.')}"

    def at(_: int) -> Way:
        return Way(name, BASELINE, len(keys), 0.0, "", step, None, lambda rows: Traffic(size, 0))

    return at


def _searched(
    layer: Layer,
    name: str,
    seconds: float,
    search: Search,
    ladder: Callable[[int], Sequence[int]],
    parameter: str,
    read: Callable[[int, Callable[[], object]], Traffic] | None = None,
    grouped: bool = False,
) -> Maker:
    values = [encodings.decode(own) for own in layer.values]
    heads = range(len(values))

    def at(k: int) -> Way:
        k = min(k, layer.length)
        sample = Sample.of(layer, k)
        values_tried = ladder(k)

        def enough(value: int) -> bool:
            return sample.holds_enough([search(head, sample.rows[head], k, value)[0] for head in heads])

        tuned = next((v for v in values_tried[:-1] if enough(v)), values_tried[-1])

        def step(rows: Float32) -> Float32:
            out = np.empty(rows.shape, np.float32)
            for head in heads:
                asked = [rows[head]] if grouped else list(rows[head][:, None])
                place = 0
                for queries in asked:
                    ids, scores = search(head, queries, k, tuned)
                    for own, known in zip(ids, scores, strict=True):
                        weights = torch.softmax(torch.from_numpy(known) * layer.scaling, 0)
                        out[head, place] = (weights @ torch.from_numpy(values[head][own])).numpy()
                        place += 1
            return out

        def chosen(rows: Float32) -> list[Any]:
            return [search(head, rows[head], k, tuned)[0] for head in heads]

        def traffic(rows: Float32) -> Traffic | None:
            if read is None:
                return None
            own = read(rows.shape[1], lambda: chosen(rows))
            fetched = rows.shape[1] * k * values[0].shape[1] * 4 * len(values)
            return Traffic(own.in_order, own.rows + fetched)

        label = f"{parameter} {tuned:,}" if parameter else ""
        return Way(name, BASELINE, len(values), seconds, label, step, chosen, traffic)

    return at


def rising(start: int, stop: int) -> list[int]:
    """From `start` by about half each up to `stop`, which is the last."""
    values = []
    while start < stop:
        values.append(start)
        start = max(start + 1, start * 3 // 2)
    return [*values, stop]
