"""The same graphs as `faiss-hnsw` by hnswlib, the reference implementation of their authors.

hnswlib keeps its own float32 copy of the keys, so 16-bit keys take twice their size again; `nbytes` says so.
"""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from offload_decode.common.rows.arrays import Float32, Keys, float32_blocks
from offload_decode.common.rows.encodings import row_size
from offload_decode.indexes import hnswlib_file, registry
from offload_decode.indexes.approximate import asked_for, rescored
from offload_decode.indexes.base import Costs, Hits
from offload_decode.indexes.faiss_hnsw import CONSTRUCTION_EF, LINKS, UPPER, WALKED, GraphIndex

hnswlib = registry.Library(registry.hnswlib)


class HnswlibIndex(GraphIndex):
    """The same graph, by hnswlib."""

    name: ClassVar[str] = "hnswlib"
    suffix: ClassVar[str] = ".hnsw"

    @classmethod
    def costs(cls, n: int, dim: int, dtype: np.dtype[Any], k: int, rows: int = 1) -> Costs:
        held = round(n * (4 * dim + 8 * LINKS + 16 + (4 * LINKS + 4) * UPPER))
        exact = min(n, rows * asked_for(k, n)) * row_size(dim, dtype)
        return Costs(held, held, round(min(1.0, rows * WALKED) * n) * 4 * dim + exact)

    @classmethod
    def need_library(cls) -> None:
        registry.hnswlib()

    def __init__(self, keys: Keys, digest: str) -> None:
        super().__init__(keys, digest)
        self._one_ef = threading.Lock()  # hnswlib's ef belongs to the index, not to the search

    def _build_native(self) -> Any:
        graph = hnswlib.Index(space="l2", dim=self.dim)
        graph.init_index(max_elements=max(1, len(self)), M=LINKS, ef_construction=CONSTRUCTION_EF)
        return self._linked(graph, 0)

    def _extend_native(self, earlier: Self) -> Any:
        """The further keys are linked into the graph."""
        graph = _walked(earlier._native, "l2")
        graph.resize_index(max(1, len(self)))
        return self._linked(graph, len(earlier))

    def _linked(self, graph: Any, begin: int) -> Any:
        """The graph with the keys from `begin` on linked into it."""
        for first, block in float32_blocks(self.keys[begin:]):
            numbers = np.arange(begin + first, begin + first + len(block))
            # One thread: several link the keys in another order each time, and no build would equal another.
            graph.add_items(block, numbers, num_threads=1)
        return _walked(graph, "ip")

    def _search_native(self, queries: Float32, k: int, value: float) -> Hits:
        asked = asked_for(k, len(self))
        with self._one_ef:
            self._native.set_ef(max(int(value), asked))
            try:
                ids, _ = self._native.knn_query(queries, asked)
            except RuntimeError:  # a walk ended with fewer keys; the caller scans for these queries
                return Hits.empty(len(queries), k)
        return rescored(self.keys, queries, ids.astype(np.int64), k)

    def _write_native(self, file: str) -> None:
        self._native.save_index(file)
        if Path(file).stat().st_size != self._native.index_file_size():  # hnswlib itself does not look
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _read_native(self, file: str) -> Any:
        hnswlib_file.check(file, len(self), self.dim, LINKS, CONSTRUCTION_EF)
        graph = hnswlib.Index(space="ip", dim=self.dim)
        graph.load_index(file)
        return graph

    @property
    def nbytes(self) -> int:
        return int(self._native.index_file_size())


def _walked(graph: Any, space: str) -> Any:
    """A copy of the graph that is walked by another metric: it links Euclidean neighbours and is searched by
    inner product, for the reason given in faiss_hnsw.
    """
    return hnswlib.Index(params=graph.__getstate__()[0] | {"space": space})
