"""Lloyd's algorithm, Euclidean: it estimated attention as well as clusters of unit vectors did, and needs no
norms.
"""

import numpy as np
import numpy.typing as npt

from offload_decode.common.rows.arrays import Float32

BLOCK = 4096  # rows that meet all centroids at once
MAX_KEYS = 2**31 - 1


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
