"""The default kind: a compressed scan, pruned by clusters.

Keys lie in cells of about 256, cell by cell, each as what is left of it beside the cell's mean, in 4 bits a
channel. A query predicts the score that its best keys reach, scans the cells that may hold one of them, and
scores a quarter more than it was asked for exactly, from the keys themselves. At D = 128 that is 72 bytes a
key beyond the store.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, log
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from offload_decode.common.errors import IndexDamaged, InvalidIndexInput
from offload_decode.common.rows import scan
from offload_decode.common.rows import threads as pool
from offload_decode.common.rows.addresses import Share
from offload_decode.common.rows.arrays import Float32, Keys, check_count, check_queries
from offload_decode.common.rows.encodings import row_size
from offload_decode.indexes import files, verified
from offload_decode.indexes import files as arrays
from offload_decode.indexes.approximate import ApproximateIndex, tune
from offload_decode.indexes.base import (
    Costs,
    Hits,
    RecallRecord,
    StrPath,
    VectorIndex,
    check_heads,
)
from offload_decode.indexes.clusters.cells import KEYS_PER_CELL, Cells, build, check, joined
from offload_decode.indexes.clusters.dot4 import BLOCK, GROUP, QUERIES, WORD
from offload_decode.indexes.clusters.scan import STEP_BYTES
from offload_decode.indexes.clusters.search import (
    NOTHING,
    Best,
    Heads,
    candidates_for,
    predicted,
    search_layer,
)
from offload_decode.indexes.flat import NOT_FINITE, FlatIndex, joined_hits

_LADDER = (2.5, 2.75, 3.0, 3.25, 3.5, 4.0, 5.0, 6.0, 8.0)
_MANY = 1024  # keys, for which the deviations are tuned too
_OF_MANY = "recall_of_many"
_NEARLY_ALL = 64.0
_EXACT = 1000.0
_ROWS = 64  # of one head, searched together: they share what they scan
_CELLS_OF_A_PART = 1024  # of a head, at least: to search fewer takes hardly longer than to share the work
_CANDIDATES = 1 << 22  # of these rows, in memory at once
_MAGIC = 0x534C4C4543  # "CELLS"
_CHECKED = "cells, check 1"  # counted up when `cells.check` asks for more


class ClusteredIndex(ApproximateIndex):
    """Skips cells whose bound, `deviations` standard deviations above their mean, stays below the floor."""

    name: ClassVar[str] = "clusters"
    parameter: ClassVar[str] = "deviations"
    suffix: ClassVar[str] = ".cells"

    def __init__(self, keys: Keys, digest: str) -> None:
        super().__init__(keys, digest)
        self.recall_of_many: RecallRecord | None = None

    @classmethod
    def costs(cls, n: int, dim: int, dtype: np.dtype[Any], k: int, rows: int = 1) -> Costs:
        cells = max(1, n // KEYS_PER_CELL)
        # Codes, a scale and an id for each key and for half a block of padding in each cell.
        coded = (n + BLOCK // 2 * cells) * (-(-dim // GROUP) * WORD // BLOCK + 8)
        moments = 8 * dim * cells
        if not _sparse(n, k):
            return Costs(0, coded + moments + 12 * cells, n * row_size(dim, dtype))
        exact = min(n, rows * candidates_for(k)) * row_size(dim, dtype)
        return Costs(0, coded + moments + 12 * cells, moments + round(share_read(n, k) * coded) + exact)

    @classmethod
    def search_bytes(cls, n: int, k: int, heads: int, rows: int) -> int:
        if not _sparse(n, k):
            return super().search_bytes(n, k, heads, rows)
        # A score and an id for each candidate, of which there is room for twice as many, and a thread's to
        # sort; for each cell two floats and a flag, of four rows at least, and what a thread counts there;
        # half of the floats again where threads share what is predicted.
        cells = -(-n // KEYS_PER_CELL)
        own = min(_rows_of_a_task(k), rows)
        of_rows = own * (16 * candidates_for(k) + cells) + 12 * cells * (own + -own % QUERIES)
        return pool.THREADS * (STEP_BYTES + 32 * candidates_for(k) + 16 * cells + of_rows)

    @property
    def scan_from(self) -> float:
        return _EXACT

    def ladder(self, k: int) -> Sequence[float]:
        return [*_LADDER, _NEARLY_ALL, _EXACT]

    def _search(self, queries: Float32, k: int) -> Hits:
        return self.search_at(queries, k, self.reach(k))

    def reach(self, k: int) -> float:
        """The deviations at which k keys are searched for: as tuned for few and for many, and between the two
        along the logarithm of k. Where the floor is lower, a cell that is left out holds fewer of the best.
        """
        assert self.recall is not None, "an index with keys was tuned"
        few, many = self.recall, self.recall_of_many
        if many is None or many.k <= few.k or k <= few.k or many.value >= few.value:
            return few.value  # a stranger's file may say anything of many
        share = min(1.0, log(k / few.k) / log(many.k / few.k))
        return few.value + share * (many.value - few.value)

    def _tune(self, queries: npt.NDArray[Any] | None, k: int, target: float) -> None:
        super()._tune(queries, k, target)
        if k < _MANY and self._prunes(_MANY):
            self.recall_of_many = tune(self, self.flat, queries, _MANY, target)

    def _records(self) -> dict[str, RecallRecord | None]:
        return super()._records() | {_OF_MANY: self.recall_of_many}

    def _take_records(self, path: StrPath, metadata: dict[str, Any]) -> None:
        self.recall_of_many = files.recall_of(path, metadata, _OF_MANY)

    def _search_native(self, queries: Float32, k: int, value: float) -> Hits:
        if not self._sparse(k):
            return self.flat.search(queries, k)
        # A copy, so that tuning and asking are of one kind to the compiler.
        hits = _searched([self], np.array(queries[None]), k, [value])
        return Hits(hits.ids[0], hits.scores[0])

    @classmethod
    def search_heads(cls, heads: Sequence[VectorIndex], queries: npt.NDArray[Any], k: int) -> Hits:
        """As `VectorIndex.search_heads`: one compiled call for each thread, whatever the number of heads."""
        check_heads(heads, queries)
        own = [head for head in heads if isinstance(head, ClusteredIndex)]
        if len({(head.keys.dtype, head.dim) for head in own}) != 1 or len(own) != len(heads):
            raise InvalidIndexInput(
                "Heads that are searched together must be of one kind, with keys of one kind."
            )
        rows = queries.shape[1]
        checked = check_queries(queries.reshape(-1, queries.shape[-1]), own[0].dim).reshape(queries.shape)
        pruned = np.array([head._prunes(check_count(k)) for head in own]) & (rows > 0)
        if pruned.all():
            return _pruned(own, checked, k)
        hits = Hits(np.empty((len(own), rows, k), np.int64), np.empty((len(own), rows, k), np.float32))
        for some, search in ((pruned, _pruned), (~pruned, _scanned)):
            if some.any():
                part = search([own[head] for head in np.flatnonzero(some)], checked[some], k)
                hits.ids[some], hits.scores[some] = part.ids, part.scores
        return hits

    def _prunes(self, k: int) -> bool:
        """Whether cells are looked at, and not simply every key: that costs no more where k is large."""
        tuned = self.recall is not None and self.recall.value < _EXACT
        return tuned and k > 0 and self._sparse(k)

    def _sparse(self, k: int) -> bool:
        return _sparse(len(self), k)

    def _build_native(self) -> Any:
        return _Searchable(build(self.keys), self.keys)

    def _extend_native(self, earlier: Self) -> Any:
        """The further keys form cells of their own."""
        return _Searchable(joined(earlier.cells, build(self.keys[len(earlier) :])), self.keys)

    def _write_native(self, file: str) -> None:
        parts = self.cells
        numbers = [_MAGIC, len(self), self.dim, len(parts.counts), len(parts.ids) // BLOCK]
        arrays.write(file, numbers, parts)

    def _read_native(self, file: str) -> Any:
        def layout(numbers: Sequence[int]) -> arrays.Layout:
            magic, n, dim, count, blocks = numbers
            if (magic, n, dim) != (_MAGIC, len(self), self.dim):
                raise RuntimeError(f"it is no file of cells of {len(self)} x {self.dim}")
            return {
                "starts": (np.int64, (count + 1,)),
                "counts": (np.int32, (count,)),
                "means": (np.float32, (count, dim)),
                "variances": (np.float32, (count, dim)),
                "codes": (np.uint8, (blocks * -(-dim // GROUP) * WORD,)),
                "scales": (np.float32, (blocks * BLOCK,)),
                "ids": (np.int32, (blocks * BLOCK,)),
            }

        _, parts = arrays.read(file, 5, layout)
        cells = Cells(**parts)

        def sound() -> bool:
            check(cells, len(self))
            return True

        verified.holds(Path(file), f"{_CHECKED} of {len(self)} keys", sound)
        return _Searchable(cells, self.keys, arrays.Mapped.of(file))

    @property
    def cells(self) -> Cells:
        """What is scanned."""
        own: Cells = self._native.cells
        return own

    @property
    def nbytes(self) -> int:
        return self.cells.nbytes


class _Searchable:
    """Cells with what `search_layer` takes: the addresses of arrays that live as long as this does."""

    def __init__(self, own: Cells, keys: Any, mapped: arrays.Mapped | None = None):
        self.cells = Cells(*map(np.ascontiguousarray, own))
        self.mapped = mapped
        self.keys = scan.bits(keys)
        self.layout = scan.layout(keys)
        self.parts = (*self.cells, self.keys)  # addresses are of whole arrays
        self.addresses = [part.ctypes.data for part in self.parts]
        self.sizes = [len(own.counts), len(own.ids) // BLOCK, len(self.keys)]


def _sparse(n: int, k: int) -> bool:
    """Whether fewer than n keys are scored exactly for the k best. So long cells are looked at: even where
    none can be left out, a floor that is predicted keeps most keys out of the candidates.
    """
    return candidates_for(k) < n


def share_read(n: int, k: int) -> float:
    """The share of its codes that a query row reads, about: fitted to long-tailed keys, of which it was 0.06
    for 64 and 0.18 for 1,024 of 131,072, 0.58 for 1,024 of 16,384 and 0.03 of four million.
    """
    return float(min(1.0, 2.25 * np.sqrt(k / n)))


def _rows_of_a_task(k: int) -> int:
    return max(1, min(_ROWS, _CANDIDATES // (2 * candidates_for(k))))


def _pruned(heads: Sequence[ClusteredIndex], queries: Float32, k: int) -> Hits:
    return _searched(heads, queries, k, [head.reach(k) for head in heads])


def _scanned(heads: Sequence[ClusteredIndex], queries: Float32, k: int) -> Hits:
    return FlatIndex.search_heads([head.flat for head in heads], queries, k)


def _searched(heads: Sequence[ClusteredIndex], queries: Float32, k: int, deviations: Sequence[float]) -> Hits:
    """The k best of every head's keys for its `queries [H, R, D]`: ids and scores `[H, R, k]`. Where there
    are threads that heads and rows leave without work, a head's cells are searched in parts.
    """
    count, rows, _ = queries.shape
    natives = [head._native for head in heads]
    for native in natives:
        if native.mapped is not None and native.mapped.shrank:
            raise IndexDamaged(
                f"{native.mapped.file} is shorter than it was when it was opened; build the index again with "
                "`offload-decode index`."
            )
    keys = natives[0].keys
    together = Heads(
        parts=np.array([native.addresses for native in natives]),
        sizes=np.array([native.sizes for native in natives]),
        deviations=np.array(deviations, np.float32),
        like=np.empty((0, keys.shape[1]), keys.dtype),  # of one kind to the compiler, mapped or not
        layout=natives[0].layout,
    )
    per_task = min(_rows_of_a_task(k), max(QUERIES, ceil(count * rows / pool.THREADS)))
    tasks = count * -(-rows // per_task)
    parts = max(1, min(pool.THREADS // tasks, int(together.sizes[:, 0].min()) // _CELLS_OF_A_PART))
    best = _in_parts(together, queries, k, per_task, parts)
    if parts > 1 and (best.seen.sum(axis=0) < candidates_for(k)).any():
        # What was predicted is not there: a floor is looked for in all of a head's cells.
        best = _in_parts(together, queries, k, per_task, 1)
    hits = joined_hits(best.ids, best.scores, np.minimum(best.seen, k))
    if not np.isfinite(hits.scores).all():
        raise InvalidIndexInput(NOT_FINITE)
    return hits


def _in_parts(heads: Heads, queries: Float32, k: int, per_task: int, parts: int) -> Best:
    """What is found in each part of the heads' cells, `[parts, H, R, k]`, on all threads."""
    count, rows, _ = queries.shape
    shape = (parts, count, rows)
    ids, scores = np.full((*shape, k), -1, np.int64), np.full((*shape, k), np.nan, np.float32)
    best = Best(ids, scores, np.zeros(shape, np.int64))
    threads = min(pool.THREADS, parts * count * -(-rows // per_task))
    told = predicted(heads, queries, k, threads) if parts > 1 else NOTHING

    def search(first: int) -> None:
        search_layer(heads, queries, k, Share(per_task, first, threads), told, best)

    pool.run(search, range(threads))
    return best
