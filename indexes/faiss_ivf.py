"""Inverted lists by faiss: keys clustered by k-means, the lists nearest to the query read.

Lists are formed by Euclidean distance, which the common offset of a head's keys does not change, and probed
by inner product with their centroids. Inner-product k-means, faiss' default for this metric, found less.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from indexes import faiss_storage
from indexes.approximate import ApproximateIndex
from indexes.base import Hits
from indexes.faiss_storage import faiss
from indexes.keys import Float32, check_finite, float32_blocks
from indexes.rows import encodings
from indexes.tuning import geometric

_KEYS_PER_LIST = 40  # at least; faiss wants 39 training points a centroid
_TRAINING_KEYS_PER_LIST = 64
_ITERATIONS = 10


class FaissIVF(ApproximateIndex):
    """Exact scores of the keys in the `nprobe` lists that are read; at all of them, the exact scan."""

    name: ClassVar[str] = "faiss-ivf"
    parameter: ClassVar[str] = "nprobe"
    suffix: ClassVar[str] = ".faiss"

    @property
    def nlist(self) -> int:
        """Number of lists: `4 sqrt(N)`, fewer where that would leave lists short of training keys."""
        n = len(self)
        return max(1, min(int(4 * n**0.5), n // _KEYS_PER_LIST))

    @property
    def scan_from(self) -> int:
        return self.nlist

    def ladder(self, k: int) -> Sequence[int]:
        return [*geometric(1, self.nlist), self.nlist]

    def _build_native(self) -> Any:
        centroids = self._train()
        quantizer = faiss.IndexFlatIP(self.dim)
        quantizer.add(centroids)
        code = faiss_storage.scalar_quantizer(self.keys)
        metric = faiss.METRIC_INNER_PRODUCT
        if code is None:
            index = faiss.IndexIVFFlat(quantizer, self.dim, self.nlist, metric)
        else:
            # Residuals to the centroid would be rounded to 16 bits again; the keys themselves are not.
            index = faiss.IndexIVFScalarQuantizer(quantizer, self.dim, self.nlist, code, metric, False)
        index.train(centroids)  # the quantizer is trained already; this only sets the codes up
        nearest = _euclidean(self.dim)
        nearest.add(centroids)
        for _, block in float32_blocks(self.keys):
            lists = nearest.search(block, 1)[1].ravel()
            index.add_core(len(block), faiss.swig_ptr(block), None, faiss.swig_ptr(lists))
        index.own_fields = True
        quantizer.this.disown()
        return index

    def _train(self) -> Float32:
        if len(self) == 0:
            return np.zeros((1, self.dim), np.float32)
        count = min(len(self), _TRAINING_KEYS_PER_LIST * self.nlist)
        # Random and not strided: rotary keys repeat with the position's period.
        rows = np.sort(np.random.default_rng(0).choice(len(self), count, replace=False))
        sample = encodings.decode(self.keys[rows])
        check_finite(sample)
        clustering = faiss.Clustering(self.dim, self.nlist)
        clustering.niter = _ITERATIONS
        clustering.min_points_per_centroid = 1
        clustering.max_points_per_centroid = _TRAINING_KEYS_PER_LIST
        clustering.train(sample, _euclidean(self.dim))
        centroids: Float32 = faiss.vector_to_array(clustering.centroids).reshape(self.nlist, self.dim)
        return centroids

    def _search_native(self, queries: Float32, k: int, value: float) -> Hits:
        options = faiss.SearchParametersIVF(nprobe=int(value))
        return faiss_storage.hits(*self._native.search(queries, k, params=options))

    def _write_native(self, file: str) -> None:
        faiss_storage.write(self._native, file)

    def _read_native(self, file: str) -> Any:
        return faiss_storage.read(file, faiss.IndexIVF, self.keys)

    @property
    def nbytes(self) -> int:
        return int(len(self) * (self._native.code_size + 8) + self.nlist * self.dim * 4)


def _euclidean(dim: int) -> Any:
    """An exact Euclidean index, on the GPUs where faiss has them: it forms and fills the lists."""
    index = faiss.IndexFlatL2(dim)
    return faiss.index_cpu_to_all_gpus(index) if faiss.get_num_gpus() > 0 else index
