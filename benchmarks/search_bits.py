"""Codes of how many bits find the keys that queries attend to? python -m benchmarks.search_bits STORE

STORE has the default index, whose codes are 4 bits a channel of what keys differ from their cell's mean. Here
what keys in int8 differ from it is also coded in 3 and 2 bits. Stored queries of the last tenth of the text
score all keys by these codes; the best c·k are scored again, by the keys in int8, and the best k of them
stay. Columns have the share of the attention of the k best of all keys in int8 that was found: its mean, its
1st percentile, and how many queries lose more than a tenth; then the KB that a query reads: means and
variances of the cells, codes with a scale and an id a key in as many cells as the default index scans, and
the c·k keys. Heads of which the index reads all keys are left out. The first rows are of all heads, and have
what the k best keys in int8 hold of the attention of those that are best as the store has them.
"""

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.common import option_parser, table
from offload_decode.attention.rows import tensor_view
from offload_decode.common.rows.arrays import Float32
from offload_decode.common.rows.encodings import INT8, SCALE_BYTES, decode, encode
from offload_decode.evals.recorded_queries import SAMPLE_SHARE
from offload_decode.indexes.clusters.cells import LARGEST, Cells
from offload_decode.indexes.clusters.dot4 import BLOCK
from offload_decode.indexes.clusters.index import ClusteredIndex, share_read
from offload_decode.kv.indexes import DEFAULT, heads_of, index_path, kind_folder
from offload_decode.store.reader import KVStore

BITS = 4, 3, 2
TIMES = 1, 1.5, 2, 4  # candidates for each key that is wanted
COUNTS = 64, 256
SHARE = 0.02
LOSS = 0.1
STEPS = {3: 0.586, 2: 0.996}  # of the deviation: nearest to normal numbers (Max 1960)
BESIDE = 8  # bytes of a key's scale and id
OF_A_CELL = 12  # bytes beside its moments

Ids = npt.NDArray[np.int64]
Case = tuple[str, int]  # a way to find so many keys


def coded(rest: Float32, bits: int) -> Float32:
    """What codes of so many bits, with one scale a key, stand for: `[N, D]` as the differences given. In 4
    bits as the index has them. In fewer the channels are turned first, so that none stands out (QuaRot,
    arXiv 2404.00456), codes are odd halves of a step, as zero would waste one of few, and the scale is that
    by which a code has the right product with its own key (RaBitQ, arXiv 2405.12497).
    """
    if bits == 4:
        scale = np.abs(rest).max(1, keepdims=True) / LARGEST
        return np.rint(_over(rest, scale)) * scale
    turn = np.linalg.qr(np.random.default_rng(0).standard_normal((rest.shape[1],) * 2))[0].astype(np.float32)
    turned, most = rest @ turn, 2 ** (bits - 1) - 0.5
    step = STEPS[bits] * np.sqrt(np.square(turned).mean(1, keepdims=True))
    codes = (np.floor(_over(turned, step)) + np.float32(0.5)).clip(-most, most)
    scale = _over(np.square(turned).sum(1, keepdims=True), (codes * turned).sum(1, keepdims=True))
    return scale * codes @ turn.T


def _over(part: Float32, whole: Float32) -> Float32:
    return np.divide(part, whole, out=np.zeros_like(part), where=whole > 0)


def spread(cells: Cells, n: int) -> Float32:
    """The mean of each key's cell: `[N, D]`."""
    places = np.repeat(np.arange(len(cells.counts)), np.diff(cells.starts) * BLOCK)
    own = np.empty((n, cells.means.shape[1]), np.float32)
    real = cells.ids >= 0
    own[cells.ids[real]] = cells.means[places[real]]
    return own


def best(scores: Float32, k: int) -> Ids:
    """The places of the k largest of each row, the largest first."""
    some = np.argpartition(-scores, k - 1, 1)[:, :k]
    return np.take_along_axis(some, np.argsort(-np.take_along_axis(scores, some, 1), 1), 1)


def found(logits: Float32, exact: Float32, first: Ids, k: int) -> Float32:
    """The share `[R]` of the attention of the k best by `logits [R, N]` that is found, where the k best by
    `exact [R, N]` of the candidates `first [R, c]` are taken.
    """
    chosen = np.take_along_axis(first, best(np.take_along_axis(exact, first, 1), k), 1)
    weights = np.exp(logits - logits.max(1, keepdims=True))
    held = np.take_along_axis(weights, best(logits, k), 1).sum(1)
    return np.take_along_axis(weights, chosen, 1).sum(1) / held


def bytes_read(cells: Cells, n: int, bits: int, k: int, candidates: int) -> float:
    """About what a query reads of the index of a head, and of its keys."""
    dim = cells.means.shape[1]
    moments = len(cells.counts) * (8 * dim + OF_A_CELL)
    codes = share_read(n, k) * len(cells.ids) * (dim * bits / 8 + BESIDE)
    return moments + codes + candidates * (dim + SCALE_BYTES)


def of_head(
    store: KVStore, layer: int, head: int, counts: list[int]
) -> Iterator[tuple[Case, Float32, float]]:
    """Of each way to find so many keys the shares that a head's queries find, and the bytes one reads."""
    own = store.manifest
    path = index_path(kind_folder(store.path, DEFAULT), layer, head)
    index = ClusteredIndex.load(path, store.keys(layer, head), digest=store.digest(layer, head))
    keys, queries = (tensor_view(part(layer, head)).float().numpy() for part in (store.keys, store.queries))
    scale, late = np.float32(own.shape.head_dim**-0.5), (1 - SAMPLE_SHARE) * own.n_tokens
    asking = scale * queries[store.query_positions >= late]
    logits, every = asking @ keys.T, np.broadcast_to(np.arange(own.n_tokens), (len(asking), own.n_tokens))
    mean = keys.mean(0)
    near = {"int8 keys": decode(encode(keys, INT8)), "without their mean": decode(encode(keys - mean, INT8))}
    for (name, rows_of), k in product(near.items(), counts):
        read = float(own.n_tokens * (keys.shape[1] + SCALE_BYTES))
        yield (f"{name}, all", k), found(logits, asking @ rows_of.T, every, k), read
    if any(index.scans(k) for k in counts):
        return
    keys, cells = near["int8 keys"], index.cells
    means = spread(cells, own.n_tokens)
    logits = asking @ keys.T
    for bits in BITS:
        rough = asking @ (means + coded(keys - means, bits)).T
        ranked = best(rough, min(round(max(TIMES) * max(counts)), own.n_tokens))
        for k, times in product(counts, TIMES):
            first = ranked[:, : round(times * k)]
            read = bytes_read(cells, own.n_tokens, bits, k, first.shape[1])
            yield (f"{bits} bits, {times:g} k", k), found(logits, logits, first, k), read


def rows(store: KVStore, counts: list[int]) -> list[list[str]]:
    """A row of the table for each way, over all heads."""
    shares: dict[Case, list[Float32]] = {}
    read: dict[Case, list[float]] = {}
    for place in heads_of(store):
        for case, own, size in of_head(store, *place, counts):
            shares.setdefault(case, []).append(own)
            read.setdefault(case, []).append(size)
    found_rows = []
    for way in dict.fromkeys(way for way, _ in shares):
        cells = [way]
        for k in counts:
            every = np.concatenate(shares[way, k])
            lost = (every < 1 - LOSS).mean()
            cells.append(f"{every.mean():.2%}, {np.percentile(every, 1):.1%}, {lost:.2%}")
            cells.append(f"{np.mean(read[way, k]) / 1000:.0f}")
        found_rows.append(cells)
    return found_rows


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("store", type=Path)
    store = KVStore.open(parser.parse_args().store)
    counts = [COUNTS[0], round(SHARE * store.manifest.n_tokens), COUNTS[1]]
    print(f"{store.manifest.n_tokens:,} tokens, {len(heads_of(store))} KV heads")
    heads = [head for k in counts for head in (f"{k} keys", "KB")]
    print(table(["codes, candidates", *heads], rows(store, counts)))


if __name__ == "__main__":
    main()
