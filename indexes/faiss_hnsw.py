"""Hierarchical navigable small world graphs (Malkov and Yashunin, arXiv 1603.09320) by faiss.

The graph links Euclidean neighbours and is walked by inner product. A graph built by inner product ties
every key to the few longest ones, and where a head's keys share an offset its recall stays low at any `ef`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from indexes import faiss_storage
from indexes.approximate import ApproximateIndex
from indexes.base import Hits
from indexes.faiss_storage import faiss
from indexes.keys import Float32, float32_blocks
from indexes.tuning import geometric

LINKS = 16
CONSTRUCTION_EF = 100
# Measured at N = 32,768, D = 128, on one thread: a walk with ef = N / 64 scores 14 % of the keys, and four of
# them take as long (1.3 ms) as one exact scan for four queries (1.4 ms).
SCAN_SHARE = 64


class FaissHNSW(ApproximateIndex):
    """Exact scores of the keys on the walk; `ef` candidates are kept, and never fewer than k."""

    name: ClassVar[str] = "faiss-hnsw"
    parameter: ClassVar[str] = "ef"
    suffix: ClassVar[str] = ".faiss"

    @property
    def scan_from(self) -> int:
        return max(1, len(self) // SCAN_SHARE)

    def ladder(self, k: int) -> Sequence[int]:
        return [*geometric(k, self.scan_from), len(self)]

    def _build_native(self) -> Any:
        code = faiss_storage.scalar_quantizer(self.keys)
        if code is None:
            graph = faiss.IndexHNSWFlat(self.dim, LINKS, faiss.METRIC_L2)
        else:
            graph = faiss.IndexHNSWSQ(self.dim, code, LINKS, faiss.METRIC_L2)
            graph.is_trained = True  # 16-bit floats have nothing to learn
            graph.storage.is_trained = True
        graph.hnsw.efConstruction = CONSTRUCTION_EF
        for _, block in float32_blocks(self.keys):
            graph.add(block)
        graph.metric_type = graph.storage.metric_type = faiss.METRIC_INNER_PRODUCT
        # Reading derives the direction of the search from the metric; in place it would keep the old one.
        return faiss.deserialize_index(faiss.serialize_index(graph))

    def _search_native(self, queries: Float32, k: int, value: float) -> Hits:
        options = faiss.SearchParametersHNSW(efSearch=max(int(value), k))
        return faiss_storage.hits(*self._native.search(queries, k, params=options))

    def _write_native(self, file: str) -> None:
        faiss_storage.write(self._native, file)

    def _read_native(self, file: str) -> Any:
        return faiss_storage.read(file, faiss.IndexHNSW, self.keys)

    @property
    def nbytes(self) -> int:
        code = faiss_storage.scalar_quantizer(self.keys)
        per_key = self.dim * (4 if code is None else 2) + 8 + 4  # code, offset, level
        return int(len(self) * per_key + 4 * self._native.hnsw.neighbors.size())
