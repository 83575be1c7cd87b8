"""What our ways are compared with, none slowed down: their keys are float32 copies, as Faiss keeps them.

`per query head` is the top-k paper's code path (arXiv 2502.06766): one index for each KV head, one search for
each query head, the values gathered by numpy, the softmax in torch. Lists get the smallest `nprobe` that
reaches `fidelity.ENOUGH` of the oracle's mass on the tuning queries.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.fidelity import Ids, Truth
from benchmarks.layers import Float32, Layer
from benchmarks.ways import BASELINE, Maker, Way
from offload_decode.common.rows import encodings
from offload_decode.indexes import registry

faiss = registry.faiss()

LISTS = 4  # times the square root of the number of keys
TRAINING = 64  # keys a list


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
