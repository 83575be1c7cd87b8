"""Ways of a decoding step in one layer, ours and those they are compared with. A way is made ready for a `k`
and then timed by `step.py`.

Ours run through the engine's code: search, then attention where the rows lie; with the bytes that a step must
read, by counting. The baselines are not slowed down: their keys are float32 copies, as Faiss keeps them. `per
query head` is the top-k paper's code path (arXiv 2502.06766): one index for each KV head, one search for each
query head, the values gathered by numpy, the softmax in torch. Lists get the smallest `nprobe` that reaches
`layers.ENOUGH` of the oracle's mass on the tuning queries.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.layers import Array, Float32, Ids, Layer, MemoryLayer, Truth
from offload_decode.common.rows import encodings
from offload_decode.indexes import registry
from offload_decode.indexes.base import VectorIndex
from offload_decode.indexes.clusters.index import ClusteredIndex
from offload_decode.selectors.base import EVERYTHING
from offload_decode.types import Selection

faiss = registry.faiss()

OURS, BASELINE = "ours", "baseline"
INDEX_K, RECALL = 100, 0.98  # that indexes are tuned for
LISTS = 4  # times the square root of the number of keys
TRAINING = 64  # keys a list


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


def flat(layer: Layer, grouped: bool = False) -> Maker:
    """Faiss' exact scan, one search for each query head; `grouped`: one for all queries of a KV head."""

    def build(keys: Float32) -> Any:
        index = faiss.IndexFlatIP(keys.shape[1])
        index.add(keys)
        return index

    return _searched(layer, f"faiss flat per {'KV' if grouped else 'query'} head", build, grouped=grouped)


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

    return _searched(layer, "faiss IVF per query head", build, rising(1, lists))


def dense(layer: Layer, dtype: torch.dtype, fused: bool) -> Maker:
    """Torch's dense attention to everything: its fused kernel with the group's heads as queries of their
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
    return lambda k: Way(name, BASELINE, len(keys), step)


def rising(start: int, stop: int) -> list[int]:
    """From `start` by about half each up to `stop`, which is the last."""
    values = []
    while start < stop:
        values.append(start)
        start = max(start + 1, start * 3 // 2)
    return [*values, stop]


def _tensors(layer: Layer, dtype: torch.dtype) -> list[torch.Tensor]:
    """Keys and values `[Hkv, N, D]`."""
    return [
        torch.stack([torch.from_numpy(encodings.decode(rows)).to(dtype) for rows in side])
        for side in (layer.keys, layer.values)
    ]


def _searched(
    layer: Layer,
    name: str,
    build: Callable[[Float32], Any],
    probes: Sequence[int] = (),
    grouped: bool = False,
) -> Maker:
    """Top-k attention with an index for each KV head. `probes`: values of `nprobe` that are tried in turn,
    the last of which is taken unjudged.
    """
    built = [build(encodings.decode(keys)) for keys in layer.keys]
    values = [encodings.decode(rows) for rows in layer.values]

    def at(k: int) -> Way:
        k = min(k, layer.length)

        def search(index: Any, rows: Float32, probed: int | None) -> tuple[Float32, Ids]:
            parameters = None if probed is None else faiss.SearchParametersIVF(nprobe=probed)
            scores, ids = index.search(rows, k, params=parameters)
            return scores, ids

        def chosen(rows: Float32, probed: int | None) -> list[Ids]:
            return [search(index, head, probed)[1] for index, head in zip(built, rows, strict=True)]

        tuned = None
        if probes:
            sample = Truth.of_sample(layer, k)
            judged = (probed for probed in probes[:-1] if sample.judge(k, chosen(sample.rows, probed)).enough)
            tuned = next(judged, probes[-1])

        def step(rows: Float32) -> Float32:
            out = np.empty(rows.shape, np.float32)
            for head, index in enumerate(built):
                place = 0
                for queries in [rows[head]] if grouped else list(rows[head][:, None]):
                    for known, found in zip(*search(index, queries, tuned), strict=True):
                        weights = torch.softmax(torch.from_numpy(known) * layer.scaling, 0)
                        out[head, place] = (weights @ torch.from_numpy(values[head][found])).numpy()
                        place += 1
            return out

        label = f"nprobe {tuned:,}" if tuned else ""
        return Way(name, BASELINE, len(values), step, lambda rows: chosen(rows, tuned), label)

    return at
