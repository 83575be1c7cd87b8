"""What our ways are compared with, none slowed down: their keys are float32 copies, as Faiss keeps them.

`per query head` is the top-k paper's code path (arXiv 2502.06766): one index for each KV head, one search for
each query head, the values gathered by numpy, the softmax in torch. Lists and graphs get the smallest
`nprobe` or `ef` that reaches `fidelity.ENOUGH` of the oracle's mass on the tuning queries. Their graphs link
Euclidean neighbours and are walked by inner product: graphs built by inner product found less at any `ef`.
"""

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.fidelity import Ids, Sample
from benchmarks.layers import Float32, Layer
from benchmarks.ways import BASELINE, Maker, Traffic, Way
from offload_decode.common.rows import encodings
from offload_decode.indexes import registry

faiss = registry.faiss()

LINKS, CONSTRUCTION_EF = 32, 100
LISTS = 4  # times the square root of the number of keys
TRAINING = 64  # keys a list
OFFLOADED_LAYERS = 2  # alike: while one attends, the other's keys and values are on their way

Search = Callable[[Any, Float32, int, int], tuple[Ids, Float32]]  # index, queries, k, parameter
Read = Callable[[int, Callable[[], object]], Traffic]  # rows of a head; searches once more


def flat(layer: Layer, grouped: bool = False) -> Maker:
    """Faiss' exact scan, one search for each query head; `grouped`: one for all queries of a KV head."""

    def build(keys: Float32) -> Any:
        index = faiss.IndexFlatIP(keys.shape[1])
        index.add(keys)
        return index

    def read(rows: int, _: object) -> Traffic:
        size = len(layer.keys) * layer.length * layer.steps.shape[-1] * 4
        return Traffic(size if grouped else size * rows, 0)

    name = f"faiss flat per {'KV' if grouped else 'query'} head"
    return _searched(layer, name, build, _faiss_search(lambda _: None), lambda k: [0], "", read, grouped)


def ivf(layer: Layer) -> Maker:
    """Inverted lists, trained on Euclidean distance, `4 sqrt(N)` of them."""
    lists = max(1, min(int(LISTS * layer.length**0.5), layer.length // 40))

    def build(keys: Float32) -> Any:
        clustering = faiss.Clustering(keys.shape[1], lists)
        clustering.niter, clustering.min_points_per_centroid = 10, 1
        clustering.max_points_per_centroid = TRAINING
        nearest = faiss.IndexFlatL2(keys.shape[1])
        clustering.train(keys, nearest)
        coarse = faiss.IndexFlatIP(keys.shape[1])
        coarse.add(faiss.vector_to_array(clustering.centroids).reshape(lists, -1))
        index = faiss.IndexIVFFlat(coarse, keys.shape[1], lists, faiss.METRIC_INNER_PRODUCT)
        index.own_fields = True
        coarse.this.disown()
        index.is_trained = True
        cells = nearest.search(keys, 1)[1].ravel()
        index.add_core(len(keys), faiss.swig_ptr(keys), None, faiss.swig_ptr(cells))
        return index

    def read(rows: int, search: Callable[[], object]) -> Traffic:
        faiss.cvar.indexIVF_stats.reset()
        search()
        scored = faiss.cvar.indexIVF_stats.ndis + rows * len(layer.keys) * lists
        return Traffic(scored * layer.steps.shape[-1] * 4, 0)

    search = _faiss_search(lambda probes: faiss.SearchParametersIVF(nprobe=probes))
    return _searched(
        layer, "faiss IVF per query head", build, search, lambda k: rising(1, lists), "nprobe", read
    )


def hnsw(layer: Layer) -> Maker:
    """Faiss' graphs."""

    def build(keys: Float32) -> Any:
        graph = faiss.IndexHNSWFlat(keys.shape[1], LINKS, faiss.METRIC_L2)
        graph.hnsw.efConstruction = CONSTRUCTION_EF
        graph.add(keys)
        graph.metric_type = graph.storage.metric_type = faiss.METRIC_INNER_PRODUCT
        return faiss.deserialize_index(faiss.serialize_index(graph))  # derives the search's direction

    def read(_: int, search: Callable[[], object]) -> Traffic:
        faiss.cvar.hnsw_stats.reset()
        search()
        walked = faiss.cvar.hnsw_stats
        return Traffic(0, 4 * (walked.ndis * layer.steps.shape[-1] + walked.nhops * 2 * LINKS))

    search = _faiss_search(lambda ef: faiss.SearchParametersHNSW(efSearch=ef))
    efs = _efs(layer)
    return _searched(layer, "faiss HNSW per query head", build, search, efs, "ef", read)


def hnswlib(layer: Layer) -> Maker:
    """The graphs of HNSW's authors."""
    library = registry.hnswlib()

    def build(keys: Float32) -> Any:
        graph = library.Index(space="l2", dim=keys.shape[1])
        graph.init_index(max_elements=len(keys), M=LINKS, ef_construction=CONSTRUCTION_EF)
        graph.add_items(keys, num_threads=os.cpu_count() or 1)
        return library.Index(params=graph.__getstate__()[0] | {"space": "ip"})

    def search(index: Any, rows: Float32, k: int, ef: int) -> tuple[Ids, Float32]:
        index.set_ef(ef)
        try:
            ids, distances = index.knn_query(rows, k)
        except RuntimeError:  # the walk found fewer than k keys
            return np.full((len(rows), k), -1, np.int64), np.full((len(rows), k), -np.inf, np.float32)
        return ids.astype(np.int64), 1 - distances

    return _searched(layer, "hnswlib per query head", build, search, _efs(layer), "ef")


def dense(layer: Layer, dtype: torch.dtype, fused: bool) -> Maker:
    """Torch's dense attention to everything: its fused kernel with the group's heads as query rows of their
    KV head, so that each key is read once; or two matrix products and a softmax, grouped in the same way.
    """
    keys, values = _tensors(layer, dtype)

    def step(rows: Float32) -> Float32:
        query = torch.from_numpy(rows).to(dtype)
        if fused:
            out = scaled_dot_product_attention(query[None], keys[None], values[None], scale=layer.scaling)[0]
        else:
            weights = torch.matmul(query, keys.transpose(1, 2)).mul_(layer.scaling).softmax(-1)
            out = torch.matmul(weights, values)
        return out.float().numpy()

    name = f"torch dense, {'fused' if fused else 'matmul'}, {str(dtype).removeprefix('torch.')}"
    size = keys.nbytes + values.nbytes
    return lambda k: Way(name, BASELINE, len(keys), step, lambda rows: Traffic(size, 0))


def offloaded(layer: Layer) -> Maker:
    """transformers' own cache in host memory, where a GPU is at hand: every step moves all of it.
    `DynamicCache(offloading=True)` and torch's fused attention on the device, in float16.
    """
    from transformers import DynamicCache

    device = torch.device("cuda")
    cache = DynamicCache(offloading=True)
    keys, values = (side[None] for side in _tensors(layer, torch.float16))
    for number in range(OFFLOADED_LAYERS):
        cache.update(keys.to(device), values.to(device), number)
    last = [side[:, :, -1:].to(device) for side in (keys, values)]

    def step(rows: Float32) -> Float32:
        query = torch.from_numpy(rows).to(device, torch.float16)[None]
        for number in range(OFFLOADED_LAYERS):
            # A step adds a token to every layer, here the last one once more; judged is what was there.
            found, weighed = cache.update(*last, number)
            stored = found[:, :, : layer.length], weighed[:, :, : layer.length]
            out = scaled_dot_product_attention(query, *stored, scale=layer.scaling)
        torch.cuda.synchronize()
        return out[0].float().cpu().numpy()

    name, size = "transformers' offloaded cache, float16", keys.nbytes + values.nbytes
    traffic = Traffic(size, 0)
    return lambda k: Way(name, BASELINE, len(layer.keys), step, lambda rows: traffic, layers=OFFLOADED_LAYERS)


def rising(start: int, stop: int) -> list[int]:
    """From `start` by about half each up to `stop`, which is the last."""
    values = []
    while start < stop:
        values.append(start)
        start = max(start + 1, start * 3 // 2)
    return [*values, stop]


def _efs(layer: Layer) -> Callable[[int], list[int]]:
    return lambda k: rising(k, layer.length)


def _tensors(layer: Layer, dtype: torch.dtype) -> list[torch.Tensor]:
    """Keys and values `[Hkv, N, D]`."""
    return [
        torch.stack([torch.from_numpy(encodings.decode(rows)).to(dtype) for rows in side])
        for side in (layer.keys, layer.values)
    ]


def _faiss_search(parameters: Callable[[int], Any]) -> Search:
    def search(index: Any, rows: Float32, k: int, value: int) -> tuple[Ids, Float32]:
        scores, ids = index.search(rows, k, params=parameters(value))
        return ids, scores

    return search


def _searched(
    layer: Layer,
    name: str,
    build: Callable[[Float32], Any],
    search: Search,
    ladder: Callable[[int], Sequence[int]],
    parameter: str,
    read: Read | None = None,
    grouped: bool = False,
) -> Maker:
    """Top-k attention with an index for each KV head. `ladder`: values of the search parameter for a k, the
    last of which is taken unjudged; `read`: counts what a search reads of keys and links.
    """
    began = time.perf_counter()
    built = [build(encodings.decode(keys)) for keys in layer.keys]
    seconds = time.perf_counter() - began
    values = [encodings.decode(rows) for rows in layer.values]

    def at(k: int) -> Way:
        k = min(k, layer.length)
        sample = Sample.of(layer, k)

        def chosen(rows: Float32, value: int) -> list[Ids]:
            return [search(index, head, k, value)[0] for index, head in zip(built, rows, strict=True)]

        steps = ladder(k)
        enough = (value for value in steps[:-1] if sample.holds_enough(chosen(sample.rows, value)))
        tuned = next(enough, steps[-1])

        def step(rows: Float32) -> Float32:
            out = np.empty(rows.shape, np.float32)
            for head, index in enumerate(built):
                place = 0
                for queries in [rows[head]] if grouped else list(rows[head][:, None]):
                    ids, scores = search(index, queries, k, tuned)
                    for found, known in zip(ids, scores, strict=True):
                        weights = torch.softmax(torch.from_numpy(known) * layer.scaling, 0)
                        out[head, place] = (weights @ torch.from_numpy(values[head][found])).numpy()
                        place += 1
            return out

        def traffic(rows: Float32) -> Traffic | None:
            if read is None:
                return None
            searched = read(rows.shape[1], lambda: chosen(rows, tuned))
            fetched = rows.shape[1] * k * values[0].shape[1] * 4 * len(values)
            return Traffic(searched.in_order, searched.rows + fetched)

        label = f"{parameter} {tuned:,}" if parameter else ""
        return Way(
            name, BASELINE, len(values), step, traffic, lambda rows: chosen(rows, tuned), seconds, label
        )

    return at
