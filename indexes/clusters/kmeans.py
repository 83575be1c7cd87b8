"""K-means clusters of the keys of one (layer, KV head), for estimates over keys that no search returned.

Lloyd's algorithm within segments of consecutive keys, so that building is linear in N and reads the keys in
order. Euclidean: it estimated attention as well as clusters of unit vectors did, and needs no norms.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from offload_decode.common.errors import InvalidIndexInput
from offload_decode.common.rows import encodings
from offload_decode.common.rows.arrays import Float32, Keys, check_finite, check_keys, float32_blocks
from offload_decode.indexes.base import check_count

BLOCK = 4096  # rows that meet all centroids at once


def lloyd(rows: Float32, centroids: Float32, iterations: int) -> Float32:
    """Centroids `[C, D]` moved to the means of the `rows [n, D]` nearest to them; an empty one stays."""
    centroids = centroids.copy()
    for _ in range(iterations):
        labels, _ = nearest(rows, centroids)
        order = np.argsort(labels, kind="stable")
        sizes = np.bincount(labels, minlength=len(centroids))
        filled = sizes > 0
        first = np.concatenate([[0], sizes.cumsum()])[:-1][filled]
        centroids[filled] = np.add.reduceat(rows[order], first, axis=0) / sizes[filled, None]
    return centroids


def nearest(block: Float32, centroids: Float32) -> tuple[npt.NDArray[np.int64], Float32]:
    """The centroid c at the smallest distance from each row k, and k·c − |c|²/2: `[n]` each."""
    labels, best = np.empty(len(block), np.int64), np.empty(len(block), np.float32)
    norms = 0.5 * np.einsum("cd,cd->c", centroids, centroids)
    for first in range(0, len(block), BLOCK):
        part = slice(first, first + BLOCK)
        closeness = block[part] @ centroids.T
        closeness -= norms
        labels[part] = closeness.argmax(axis=1)
        best[part] = np.take_along_axis(closeness, labels[part, None], 1)[:, 0]
    return labels, best


SEGMENT = 16_384  # keys that are clustered among themselves: so many, up to half more or less
ITERATIONS = 1  # at the same cost, larger segments improve estimates more than further iterations
MAX_KEYS = 2**31 - 1

Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Clusters:
    """N keys in C clusters, some of which may be empty.

    sums: float32 `[C, D]`, the sum of each cluster's keys. sizes: int32 `[C]`. labels: int32 `[N]`, each
    key's cluster. members: int32 `[N]`, the keys in the order of their clusters.
    """

    sums: Float32
    sizes: Int32
    labels: Int32
    members: Int32

    def sum_of(self, rows: Keys) -> Float32:
        """The sum over each cluster of N rows (values), which belong to the keys: `[C, D]`."""
        return _sums(rows, self.labels, len(self.sizes))


def build(keys: Keys, size: int = 16) -> Clusters:
    """Clusters of `keys [N, D]` or `[N]` of encoded rows, `size` keys in each on average; at `size` 1 every
    key is a cluster.

    One segment at a time is in memory as float32. Raises InvalidIndexInput for keys that no index takes.
    """
    check_keys(keys)
    if check_count(size) < 1:
        raise InvalidIndexInput(f"A cluster must hold at least 1 key, got {size}.")
    if len(keys) > MAX_KEYS:
        raise InvalidIndexInput(f"At most {MAX_KEYS:,} keys can be clustered, got {len(keys):,}; split them.")
    labels, members = np.empty(len(keys), np.int32), np.empty(len(keys), np.int32)
    clusters = 0
    # Segments of one length, so that no remainder is left with a few clusters for all kinds of keys.
    segments = max(1, round(len(keys) / SEGMENT))
    for ends in pairwise(len(keys) * place // segments for place in range(segments + 1)):
        part = slice(*ends)
        block = encodings.decode(keys[part])
        check_finite(block)
        count = -(-len(block) // size)
        if count == len(block):
            own = np.arange(count)
        else:
            own = nearest(block, lloyd(block, _seeds(block, count), ITERATIONS))[0]
        labels[part] = own + clusters
        members[part] = np.argsort(own, kind="stable") + part.start
        clusters += count
    sizes = np.bincount(labels, minlength=clusters).astype(np.int32)
    return Clusters(_sums(keys, labels, clusters), sizes, labels, members)


def _seeds(block: Float32, count: int) -> Float32:
    """Keys to begin with: half of them evenly spaced, the others at even steps of the squared distance to
    these, so that kinds of keys that are rare get a centroid too (k-means||, Bahmani et al. 2012, made
    deterministic).
    """
    even = block[np.linspace(0, len(block) - 1, count - count // 2).astype(np.int64)]
    _, closeness = nearest(block, even)
    distance = np.maximum(np.einsum("nd,nd->n", block, block) - 2 * closeness, 0).cumsum(dtype=np.float64)
    steps = (np.arange(count // 2) + 0.5) / max(1, count // 2) * distance[-1]
    return np.concatenate([even, block[np.searchsorted(distance, steps)]])


def _sums(rows: Keys, labels: npt.NDArray[Any], count: int) -> Float32:
    total = np.zeros((count, encodings.dim(check_keys(rows))), np.float32)
    for first, block in float32_blocks(rows):
        _accumulate(block, labels[first : first + len(block)], total)
    return total


@njit(nogil=True, cache=True)
def _accumulate(block: Any, labels: Any, total: Any) -> None:
    for row in range(len(block)):
        for dim in range(block.shape[1]):
            total[labels[row], dim] += block[row, dim]
