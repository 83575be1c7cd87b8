"""Graphs and inverted lists by faiss.

Hierarchical navigable small world graphs (Malkov and Yashunin, arXiv 1603.09320) link Euclidean neighbours
and are walked by inner product. A graph built by inner product ties every key to the few longest ones, and
where a head's keys share an offset its recall stays low at any `ef`.

Inverted lists are formed by k-means with Euclidean distance, which the common offset of a head's keys does
not change, and probed by inner product with their centroids. Inner-product k-means, faiss' default for this
metric, found less.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from offload_decode.common.errors import InvalidIndexInput
from offload_decode.common.rows.arrays import BFLOAT16, Float32, Keys, drawn, float32_blocks
from offload_decode.common.rows.encodings import row_size
from offload_decode.indexes import arrays
from offload_decode.indexes.approximate import ApproximateIndex, Sample, asked_for, geometric, rescored
from offload_decode.indexes.base import Costs, Hits
from offload_decode.indexes.flat import NOT_FINITE
from offload_decode.indexes.registry import Library, faiss


def code_bytes(dim: int, dtype: np.dtype[Any]) -> int:
    """Bytes of a key as faiss holds it: `dim` floats, of 16 bits where keys of `dtype` are."""
    return dim * (2 if dtype.names is None and dtype.itemsize == 2 else 4)


def scalar_quantizer(keys: Keys) -> Any:
    """faiss' 16-bit code that holds these keys without loss, or None for plain float32."""
    if keys.dtype == np.float16:
        return faiss.ScalarQuantizer.QT_fp16
    if keys.dtype == BFLOAT16:
        return getattr(faiss.ScalarQuantizer, "QT_bf16", None)  # from faiss 1.9 on
    return None


LINKS = 16
CONSTRUCTION_EF = 100
# Measured at N = 32,768, D = 128, on one thread: a walk with ef = N / 64 scores 14 % of the keys, and four of
# them take as long (1.3 ms) as one exact scan for four queries (1.4 ms).
SCAN_SHARE = 64
WALKED = 0.14
UPPER = 1 / (LINKS - 1)  # further levels of a key, on average; the ground level has twice the links of those
_GRAPH_MAGIC = 0x4B4E494C46  # "FLINK"

Int32 = npt.NDArray[np.int32]


class GraphIndex(ApproximateIndex):
    """The keys on the walk; `ef` candidates are kept, and never fewer than are asked for."""

    parameter: ClassVar[str] = "ef"

    @property
    def scan_from(self) -> int:
        return max(1, len(self) // SCAN_SHARE)

    def ladder(self, k: int) -> Sequence[int]:
        return [*geometric(k, self.scan_from), len(self)]


class FaissHNSW(GraphIndex):
    """The graph by faiss."""

    name: ClassVar[str] = "faiss-hnsw"
    suffix: ClassVar[str] = ".faiss"
    library: ClassVar[Library] = faiss

    @classmethod
    def costs(cls, n: int, dim: int, dtype: np.dtype[Any], k: int, rows: int = 1) -> Costs:
        code, links = code_bytes(dim, dtype), round(n * 4 * LINKS * (2 + UPPER))
        exact = min(n, rows * asked_for(k, n)) * row_size(dim, dtype)
        walked = round(min(1.0, rows * WALKED) * n) * code
        return Costs(n * (code + 12) + links, 4 * n + links, walked + exact)

    def _build_native(self, sample: Sample) -> Any:
        return self._linked(self._empty(faiss.METRIC_L2), self.keys)

    def _extend_native(self, earlier: Self, sample: Sample) -> Any:
        """The further keys are linked into the graph."""
        graph = earlier._assembled(*_links(earlier._native), faiss.METRIC_L2)
        return self._linked(graph, self.keys[len(earlier) :])

    def _linked(self, graph: Any, keys: Keys) -> Any:
        graph.hnsw.efConstruction = CONSTRUCTION_EF
        for _, block in float32_blocks(keys):
            graph.add(block)
        return self._assembled(*_links(graph))

    def _empty(self, metric: Any) -> Any:
        code = scalar_quantizer(self.keys)
        if code is None:
            return faiss.IndexHNSWFlat(self.dim, LINKS, metric)
        graph = faiss.IndexHNSWSQ(self.dim, code, LINKS, metric)
        graph.is_trained = graph.storage.is_trained = True  # 16-bit floats have nothing to learn
        return graph

    def _assembled(self, entry: int, levels: Int32, neighbours: Int32, metric: Any = None) -> Any:
        """A graph of the keys, walked by inner product whatever made its links; see `_links`. By another
        metric it can be added to.
        """
        graph = self._empty(faiss.METRIC_INNER_PRODUCT if metric is None else metric)
        for _, block in float32_blocks(self.keys):
            graph.storage.add(block)
        graph.ntotal = len(self)
        own = graph.hnsw
        faiss.copy_array_to_vector(levels, own.levels)
        faiss.copy_array_to_vector(_offsets(levels, _room(graph)), own.offsets)
        faiss.copy_array_to_vector(neighbours, own.neighbors)
        own.entry_point, own.max_level = entry, int(levels.max(initial=0)) - 1
        return graph

    def _search_native(self, queries: Float32, k: int, value: float) -> Hits:
        asked = asked_for(k, len(self))
        options = faiss.SearchParametersHNSW(efSearch=max(int(value), asked))
        _, ids = self._native.search(queries, asked, params=options)
        return rescored(self.keys, queries, ids, k)

    def _write_native(self, file: str) -> None:
        entry, levels, neighbours = _links(self._native)
        numbers = [_GRAPH_MAGIC, len(self), self.dim, entry + 1, len(neighbours)]
        arrays.write(file, numbers, {"levels": levels, "neighbours": neighbours})

    def _read_native(self, file: str) -> Any:
        """Faiss itself reads no file: it would trust sizes and ids. The keys come from the store."""

        def layout(numbers: Sequence[int]) -> arrays.Layout:
            if list(numbers[:3]) != [_GRAPH_MAGIC, len(self), self.dim]:
                raise RuntimeError(f"it is no file of a graph of {len(self)} x {self.dim}")
            return {"levels": (np.int32, (len(self),)), "neighbours": (np.int32, (numbers[4],))}

        numbers, found = arrays.read(file, 5, layout)
        entry, (levels, neighbours) = numbers[3] - 1, found.arrays.values()
        _check_links(entry, levels, neighbours, _room(self._empty(faiss.METRIC_L2)))
        return self._assembled(entry, levels, neighbours)

    @property
    def nbytes(self) -> int:
        code = scalar_quantizer(self.keys)
        per_key = self.dim * (4 if code is None else 2) + 8 + 4  # code, offset, level
        return int(len(self) * per_key + 4 * self._native.hnsw.neighbors.size())


def _links(graph: Any) -> tuple[int, Int32, Int32]:
    """Where walks begin (-1: nowhere), levels of each key `[N]`, and links by key and level, -1 for room."""
    own = graph.hnsw
    return own.entry_point, faiss.vector_to_array(own.levels), faiss.vector_to_array(own.neighbors)


def _room(graph: Any) -> Int32:
    """Links that a key has on the levels below each, in all: it begins with 0."""
    room: Int32 = faiss.vector_to_array(graph.hnsw.cum_nneighbor_per_level)
    return room


def _offsets(levels: Int32, room: Int32) -> npt.NDArray[np.uint64]:
    """Where the links of each key begin `[N + 1]`."""
    return np.concatenate([[0], np.cumsum(room[levels], dtype=np.uint64)]).astype(np.uint64)


def _check_links(entry: int, levels: Int32, neighbours: Int32, room: Int32) -> None:
    """Raises RuntimeError unless every walk stays within the graph: links of a level are to keys on it."""
    if len(levels) == 0:
        return
    if not 1 <= levels.min() <= levels.max() < len(room):
        raise RuntimeError("a key is on a level that there is not")
    offsets = _offsets(levels, room)
    if offsets[-1] != len(neighbours):
        raise RuntimeError("its links are not those of its levels")
    if not (0 <= entry < len(levels) and levels[entry] == levels.max()):
        raise RuntimeError("it begins at a key that is not on its highest level")
    if not -1 <= neighbours.min() <= neighbours.max() < len(levels):
        raise RuntimeError("it links to a key that there is not")
    for level in range(1, int(levels.max())):
        there = np.flatnonzero(levels > level)
        places = offsets[there, None].astype(np.int64) + np.arange(room[level], room[level + 1])
        linked = neighbours[places]
        if (levels[linked[linked >= 0]] <= level).any():
            raise RuntimeError("it links to a key that is not on the level of the link")


_KEYS_PER_LIST = 40  # at least; faiss wants 39 training points a centroid
_TRAINING_KEYS_PER_LIST = 64
_ITERATIONS = 10
_READ = 0.25  # of the lists, on real queries (docs/methods.md §6)
_LISTS_MAGIC = 0x5354534C46  # "FLSTS"


class FaissIVF(ApproximateIndex):
    """The keys in the `nprobe` lists that are read; at all of the lists, the exact scan."""

    name: ClassVar[str] = "faiss-ivf"
    parameter: ClassVar[str] = "nprobe"
    suffix: ClassVar[str] = ".faiss"
    library: ClassVar[Library] = faiss

    def __init__(self, keys: Keys, digest: str) -> None:
        super().__init__(keys, digest)
        self.nlist = _lists(len(keys))
        """Number of lists: `4 sqrt(N)` of the keys that they were formed of, fewer where that would leave
        lists short of training keys.
        """

    @classmethod
    def costs(cls, n: int, dim: int, dtype: np.dtype[Any], k: int, rows: int = 1) -> Costs:
        code, centroids = code_bytes(dim, dtype), 4 * dim * _lists(n)
        exact = min(n, rows * asked_for(k, n)) * row_size(dim, dtype)
        scanned = round(min(1.0, rows * _READ) * n) * code
        return Costs(n * (code + 8) + centroids, 4 * n + centroids, centroids + scanned + exact)

    @property
    def scan_from(self) -> int:
        return self.nlist

    def ladder(self, k: int) -> Sequence[int]:
        return [*geometric(1, self.nlist), self.nlist]

    def _build_native(self, sample: Sample) -> Any:
        centroids = self._train()
        return self._assembled(centroids, _nearest(centroids, self.keys))

    def _extend_native(self, earlier: Self, sample: Sample) -> Any:
        """The further keys join the lists that there are. Of four times the keys, new ones are formed."""
        if self.nlist > 2 * earlier.nlist:
            return self._build_native(sample)
        self.nlist = earlier.nlist
        centroids, lists = earlier._lists()
        return self._assembled(
            centroids, np.concatenate([lists, _nearest(centroids, self.keys[len(lists) :])])
        )

    def _assembled(self, centroids: Float32, lists: npt.NDArray[Any]) -> Any:
        """Inverted lists around `centroids [L, D]`, key by key in those that `lists [N]` says."""
        quantizer = faiss.IndexFlatIP(self.dim)
        quantizer.add(np.ascontiguousarray(centroids))
        code = scalar_quantizer(self.keys)
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
        if not np.isfinite(np.einsum("nd,nd->n", sample, sample)).all():  # Faiss would end the process
            raise InvalidIndexInput(NOT_FINITE)
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
        found = {"centroids": centroids, "lists": lists}
        arrays.write(file, [_LISTS_MAGIC, len(self), self.dim, self.nlist], found)

    def _read_native(self, file: str) -> Any:
        """Faiss itself reads no file: it would trust sizes and ids. Its lists are filled from the keys."""

        def layout(numbers: Sequence[int]) -> arrays.Layout:
            if list(numbers[:3]) != [_LISTS_MAGIC, len(self), self.dim] or not 0 < numbers[3] <= self.nlist:
                raise RuntimeError(f"it is no file of lists of {len(self)} x {self.dim}")
            return {"centroids": (np.float32, (numbers[3], self.dim)), "lists": (np.int32, (len(self),))}

        numbers, found = arrays.read(file, 4, layout)
        self.nlist = numbers[3]
        centroids, lists = found.arrays.values()
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
    nearest = _euclidean(centroids.shape[1])
    nearest.add(centroids)
    parts = [nearest.search(block, 1)[1].ravel() for _, block in float32_blocks(keys)]
    lists = np.concatenate([np.empty(0, np.int64), *parts])
    if (lists < 0).any():
        raise InvalidIndexInput(NOT_FINITE)
    return lists


def _euclidean(dim: int) -> Any:
    """An exact Euclidean index, on the GPUs where faiss has them: it forms and fills the lists."""
    index = faiss.IndexFlatL2(dim)
    return faiss.index_cpu_to_all_gpus(index) if faiss.get_num_gpus() > 0 else index
