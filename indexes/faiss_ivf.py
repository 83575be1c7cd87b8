"""Inverted lists by faiss: keys clustered by k-means, the lists nearest to the query read.

Lists are formed by Euclidean distance, which the common offset of a head's keys does not change, and probed
by inner product with their centroids. Inner-product k-means, faiss' default for this metric, found less.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from offload_decode.common.rows.arrays import Float32, Keys, drawn, float32_blocks
from offload_decode.common.rows.encodings import row_size
from offload_decode.indexes import faiss_hnsw, files, registry
from offload_decode.indexes.approximate import ApproximateIndex, asked_for, geometric, rescored
from offload_decode.indexes.base import Costs, Hits
from offload_decode.indexes.faiss_hnsw import faiss

_KEYS_PER_LIST = 40  # at least; faiss wants 39 training points a centroid
_TRAINING_KEYS_PER_LIST = 64
_ITERATIONS = 10
_READ = 0.25  # of the lists, on real queries (docs/methods.md §6)
_MAGIC = 0x5354534C46  # "FLSTS"


class FaissIVF(ApproximateIndex):
    """The keys in the `nprobe` lists that are read; at all of the lists, the exact scan."""

    name: ClassVar[str] = "faiss-ivf"
    parameter: ClassVar[str] = "nprobe"
    suffix: ClassVar[str] = ".faiss"

    def __init__(self, keys: Keys, digest: str) -> None:
        super().__init__(keys, digest)
        self.nlist = _lists(len(keys))
        """Number of lists: `4 sqrt(N)` of the keys that they were formed of, fewer where that would leave
        lists short of training keys.
        """

    @classmethod
    def costs(cls, n: int, dim: int, dtype: np.dtype[Any], k: int, rows: int = 1) -> Costs:
        code, centroids = faiss_hnsw.code_bytes(dim, dtype), 4 * dim * _lists(n)
        exact = min(n, rows * asked_for(k, n)) * row_size(dim, dtype)
        scanned = round(min(1.0, rows * _READ) * n) * code
        return Costs(n * (code + 8) + centroids, 4 * n + centroids, centroids + scanned + exact)

    @classmethod
    def need_library(cls) -> None:
        registry.faiss()

    @property
    def scan_from(self) -> int:
        return self.nlist

    def ladder(self, k: int) -> Sequence[int]:
        return [*geometric(1, self.nlist), self.nlist]

    def _build_native(self) -> Any:
        centroids = self._train()
        return self._assembled(centroids, _nearest(centroids, self.keys))

    def _extend_native(self, earlier: Self) -> Any:
        """The further keys join the lists that there are. Of four times the keys, new ones are formed."""
        if self.nlist > 2 * earlier.nlist:
            return self._build_native()
        self.nlist = earlier.nlist
        centroids, lists = earlier._lists()
        return self._assembled(
            centroids, np.concatenate([lists, _nearest(centroids, self.keys[len(lists) :])])
        )

    def _assembled(self, centroids: Float32, lists: npt.NDArray[Any]) -> Any:
        """Inverted lists around `centroids [L, D]`, key by key in those that `lists [N]` says."""
        quantizer = faiss.IndexFlatIP(self.dim)
        quantizer.add(np.ascontiguousarray(centroids))
        code = faiss_hnsw.scalar_quantizer(self.keys)
        metric = faiss.METRIC_INNER_PRODUCT
        if code is None:
            index = faiss.IndexIVFFlat(quantizer, self.dim, self.nlist, metric)
        else:
            # Residuals to the centroid would be rounded to 16 bits again; the keys themselves are not.
            index = faiss.IndexIVFScalarQuantizer(quantizer, self.dim, self.nlist, code, metric, False)
        index.train(centroids)  # the quantizer is trained already; this only sets the codes up
        for first, block in float32_blocks(self.keys):
            own = lists[first : first + len(block)].astype(np.int64)
            index.add_core(len(block), faiss.swig_ptr(block), None, faiss.swig_ptr(own))
        index.own_fields = True
        quantizer.this.disown()
        return index

    def _train(self) -> Float32:
        if len(self) == 0:
            return np.zeros((1, self.dim), np.float32)
        sample = drawn(self.keys, _TRAINING_KEYS_PER_LIST * self.nlist, np.random.default_rng(0))
        clustering = faiss.Clustering(self.dim, self.nlist)
        clustering.niter = _ITERATIONS
        clustering.min_points_per_centroid = 1
        clustering.max_points_per_centroid = _TRAINING_KEYS_PER_LIST
        clustering.train(sample, _euclidean(self.dim))
        centroids: Float32 = faiss.vector_to_array(clustering.centroids).reshape(self.nlist, self.dim)
        return centroids

    def _search_native(self, queries: Float32, k: int, value: float) -> Hits:
        options = faiss.SearchParametersIVF(nprobe=int(value))
        _, ids = self._native.search(queries, asked_for(k, len(self)), params=options)
        return rescored(self.keys, queries, ids, k)

    def _lists(self) -> tuple[Float32, npt.NDArray[np.int32]]:
        """The centroids `[L, D]`, and the list of each key `[N]`."""
        lists, inverted = np.empty(len(self), np.int32), self._native.invlists
        for number in range(self.nlist):
            if size := inverted.list_size(number):
                lists[faiss.rev_swig_ptr(inverted.get_ids(number), size)] = number
        return self._native.quantizer.reconstruct_n(0, self.nlist), lists

    def _write_native(self, file: str) -> None:
        centroids, lists = self._lists()
        files.write(file, [_MAGIC, len(self), self.dim, self.nlist], [centroids, lists])

    def _read_native(self, file: str) -> Any:
        """Faiss itself reads no file: it would trust sizes and ids. Its lists are filled from the keys."""

        def layout(numbers: Sequence[int]) -> files.Layout:
            if list(numbers[:3]) != [_MAGIC, len(self), self.dim] or not 0 < numbers[3] <= self.nlist:
                raise RuntimeError(f"it is no file of lists of {len(self)} x {self.dim}")
            return {"centroids": (np.float32, (numbers[3], self.dim)), "lists": (np.int32, (len(self),))}

        numbers, found = files.read(file, 4, layout)
        self.nlist = numbers[3]
        centroids, lists = found["centroids"], found["lists"]
        if not np.isfinite(centroids).all():
            raise RuntimeError("a centroid is not finite")
        if len(lists) and not 0 <= lists.min() <= lists.max() < self.nlist:
            raise RuntimeError("a key is in a list that there is not")
        return self._assembled(centroids, lists)

    @property
    def nbytes(self) -> int:
        return int(len(self) * (self._native.code_size + 8) + self.nlist * self.dim * 4)


def _lists(n: int) -> int:
    return max(1, min(int(4 * n**0.5), n // _KEYS_PER_LIST))


def _nearest(centroids: Float32, keys: Keys) -> npt.NDArray[np.int64]:
    """The list of each of the keys."""
    nearest = _euclidean(centroids.shape[1])
    nearest.add(centroids)
    parts = [nearest.search(block, 1)[1].ravel() for _, block in float32_blocks(keys)]
    return np.concatenate([np.empty(0, np.int64), *parts])


def _euclidean(dim: int) -> Any:
    """An exact Euclidean index, on the GPUs where faiss has them: it forms and fills the lists."""
    index = faiss.IndexFlatL2(dim)
    return faiss.index_cpu_to_all_gpus(index) if faiss.get_num_gpus() > 0 else index
