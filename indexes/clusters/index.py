"""The default kind: a compressed scan, pruned by clusters.

Keys lie in cells of about 256, each as its difference from the cell's mean, in 4 bits a channel. A search
predicts the score that the best keys of a query reach, scans the cells that may hold one of them, and scores
a quarter more keys than it was asked for exactly, from the keys themselves. At D = 128 the index takes 79
bytes a key beyond the store, and its summaries 39.
"""

from collections.abc import Sequence
from math import ceil, log
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from offload_decode.common.errors import IndexDamaged, InvalidIndexInput
from offload_decode.common.rows import scan, team, threads
from offload_decode.common.rows.arrays import Float32, Keys
from offload_decode.common.rows.encodings import SCALE_BYTES, row_size
from offload_decode.indexes import arrays, verified
from offload_decode.indexes.approximate import ApproximateIndex, Sample, tune
from offload_decode.indexes.arrays import Mapped
from offload_decode.indexes.base import (
    Costs,
    Hits,
    RecallRecord,
    VectorIndex,
    check_count,
    check_heads,
    check_queries,
)
from offload_decode.indexes.clusters.cells import KEYS_PER_CELL, SEGMENT, Cells, Wanted, build, check, joined
from offload_decode.indexes.clusters.dot4 import BLOCK, GROUP, QUERIES, WORD
from offload_decode.indexes.clusters.estimate import Given, estimate_layer, rows_of_a_task
from offload_decode.indexes.clusters.scan import STEP_BYTES
from offload_decode.indexes.clusters.search import (
    UNPREDICTED,
    Best,
    Heads,
    candidates_for,
    predict,
    search_layer,
)
from offload_decode.indexes.clusters.summaries import Summaries, groups_of, summarize
from offload_decode.indexes.clusters.summaries import check as check_summaries
from offload_decode.indexes.clusters.summaries import joined as join_summaries
from offload_decode.indexes.flat import NOT_FINITE, FlatIndex, joined_hits

# Fewer than 3.5 find as much for the stored queries that they are tuned on, but not for those of answers.
_LADDER = (3.5, 4.0, 5.0, 6.0, 8.0)
_WANTED = 100  # keys of each query, of which some may be cells of their own
# The fewer keys are wanted, the higher is the threshold: a group of keys unlike the rest of their cell is
# then skipped, though it is found among 100. Cells formed before a text was appended hold such groups.
_FEWER = (8, 32)
_MANY = 1024  # keys, for which the deviations are tuned too
_NEARLY_ALL = 64.0
_EXACT = 1000.0
_UNBOUNDED = 1e6  # no key is so many deviations from the mean of a cell that it changes
_ROWS = 64  # of one head, searched together: they share what they scan
_CELLS_OF_A_PART = 1024  # of a head, at least: to search fewer takes hardly longer than to share the work
_CANDIDATES = 1 << 22  # of these rows, in memory at once
_MAGIC = 0x534C4C4543  # "CELLS"
OTHER_MEANS = (
    "The means of the clusters are not those of keys and values: build the index again with "
    "`offload-decode index`."
)
_ARRAYS = (*Cells._fields, "keys", "values", "of_cells", "first", "sizes", "labels")
_CHECKED = "cells, check 2"  # counted up when `cells.check` asks for more


class ClusteredIndex(ApproximateIndex):
    """Skips cells whose bound, `deviations` above their mean, is below the score threshold."""

    name: ClassVar[str] = "clusters"
    parameter: ClassVar[str] = "deviations"
    suffix: ClassVar[str] = ".cells"
    recalls: ClassVar[tuple[str, ...]] = ("recall", "recall_of_many")

    def __init__(self, keys: Keys, digest: str) -> None:
        super().__init__(keys, digest)
        self.recall_of_many: RecallRecord | None = None
        self._shared: tuple[Mapped | None, bool] = None, False

    @classmethod
    def costs(cls, n: int, dim: int, dtype: np.dtype[Any], k: int, rows: int = 1) -> Costs:
        own = _Bytes.of(n, dim)
        if not _sparse(n, k):
            return Costs(0, sum(own), n * row_size(dim, dtype) + own.groups)
        exact = min(n, rows * candidates_for(k)) * row_size(dim, dtype)
        return Costs(0, sum(own), own.moments + round(share_read(n, k) * (own.codes + own.groups)) + exact)

    @classmethod
    def untuned_bytes(cls, n: int, dim: int) -> int:
        """Memory that one takes which is `untuned`: its summaries, and its cells where these lie in no
        temporary files.
        """
        own = _Bytes.of(n, dim)
        summaries = own.groups + own.labels
        return sum(own) if n <= SEGMENT else summaries

    @classmethod
    def search_bytes(cls, n: int, k: int, heads: int, rows: int) -> int:
        if not _sparse(n, k):
            return super().search_bytes(n, k, heads, rows)
        # Room for twice as many candidates (a score and an id), and as many to sort in; for each cell two
        # floats and a flag, of four rows at least, and a thread's counts; half of the floats again where
        # threads share the predictions.
        cells = -(-n // KEYS_PER_CELL)
        own = min(_rows_of_a_task(k), rows)
        of_rows = own * (16 * candidates_for(k) + cells) + 12 * cells * (own + -own % QUERIES)
        searching = STEP_BYTES + 32 * candidates_for(k) + 16 * cells + of_rows
        groups = groups_of(n)
        estimating = (4 * min(rows + QUERIES, rows_of_a_task(groups)) + 12) * groups
        return threads.THREADS * max(searching, estimating)

    @property
    def scan_from(self) -> float:
        return _EXACT

    @property
    def least_tuned(self) -> float:
        return _LADDER[0]

    def ladder(self, k: int) -> Sequence[float]:
        return [*_LADDER, _NEARLY_ALL, _EXACT]

    def _search(self, queries: Float32, k: int) -> Hits:
        return self.search_at(queries, k, self.deviations_for(k))

    def deviations_for(self, k: int) -> float:
        """The deviations to search for k keys: as tuned for few and for many, and between the two along the
        logarithm of k. The lower the threshold, the fewer of the best keys a skipped cell holds.
        """
        assert self.recall is not None, "an index with keys was tuned"
        few, many = self.recall, self.recall_of_many
        if many is None or many.k <= few.k or k <= few.k or many.value >= few.value:
            return few.value  # a file of unknown origin may hold any values
        share = min(1.0, log(k / few.k) / log(many.k / few.k))
        return few.value + share * (many.value - few.value)

    def _tune(self, sample: Sample, k: int, target: float) -> None:
        self.recall = tune(self, sample, k, target, _FEWER)
        if k < _MANY and not self.scans(_MANY):
            self.recall_of_many = tune(self, sample, _MANY, target)

    def _search_native(self, queries: Float32, k: int, value: float) -> Hits:
        if not _sparse(len(self), k):
            return self.flat.search(queries, k)
        # A copy, so that numba compiles one signature for tuning and searching.
        hits = _searched([self], np.array(queries[None]), k, [value])
        return Hits(hits.ids[0], hits.scores[0])

    @classmethod
    def at_once(cls, heads: Sequence[Self], rows: int, k: int) -> Heads | None:
        """What `search_task` takes to search each head in one part, with `per_task` rows a task, where an
        estimate may follow; None for rows that share more apart, and where heads are searched in another way.
        """
        if not rows or any(head.scans(k) for head in heads):
            return None
        own = _together(heads, np.array([head.deviations_for(k) for head in heads], np.float32))
        together = min(_rows_of_a_task(k), rows_of_a_task(int(own.sizes[:, 3].max())))
        if rows > together:
            return None
        tasks = len(heads) * -(-rows // cls.per_task(len(heads), rows))
        return own if _parts(own, tasks) == 1 else None

    @staticmethod
    def per_task(heads: int, rows: int) -> int:
        """Rows of a head that a task has, where each of so many heads is searched in one part."""
        return min(rows, max(QUERIES, ceil(heads * rows / threads.THREADS)))

    @classmethod
    def search_heads(
        cls, heads: Sequence[VectorIndex], queries: npt.NDArray[Any], k: int, every_cell: bool = False
    ) -> Hits:
        """As `VectorIndex.search_heads`, in one compiled call for each thread. every_cell: none is left out,
        so that no key of a high score is overlooked, wherever it lies.
        """
        check_heads(heads, queries)
        own = [head for head in heads if isinstance(head, ClusteredIndex)]
        if len({(head.keys.dtype, head.dim) for head in own}) != 1 or len(own) != len(heads):
            raise InvalidIndexInput(
                "Heads that are searched together must be of one kind, with keys of one kind."
            )
        rows = queries.shape[1]
        checked = check_queries(queries.reshape(-1, queries.shape[-1]), own[0].dim).reshape(queries.shape)
        pruned = np.array([not head.scans(check_count(k)) for head in own]) & (rows > 0)
        deviations = [_UNBOUNDED] * int(pruned.sum()) if every_cell else None
        if pruned.all():
            return _searched(own, checked, k, deviations)
        hits = Hits(np.empty((len(own), rows, k), np.int64), np.empty((len(own), rows, k), np.float32))
        for some in (pruned, ~pruned):
            if not some.any():
                continue
            part_of = [head for head, taken in zip(own, some, strict=True) if taken]
            if some is pruned:
                part = _searched(part_of, checked[some], k, deviations)
            else:
                part = FlatIndex.search_heads([head.flat for head in part_of], checked[some], k)
            hits.ids[some], hits.scores[some] = part.ids, part.scores
        return hits

    def scans(self, k: int) -> bool:
        pruned = self.recall is not None and self.recall.value < _EXACT
        return not (pruned and k > 0 and _sparse(len(self), k))

    def _build_native(self, sample: Sample) -> Any:
        return _Searchable(build(self.keys, self._wanted(0, sample)), self.keys)

    def _extend_native(self, earlier: Self, sample: Sample) -> Any:
        """The further keys form cells of their own."""
        n = len(earlier)
        more = build(self.keys[n:], self._wanted(n, sample))
        return _Searchable(joined(earlier.cells, more), self.keys, summaries=earlier._native.summaries)

    @classmethod
    def untuned(cls, keys: Keys, values: Keys) -> Self:
        """Clusters to estimate by, and not to search: they are not tuned. Raises as `build`."""
        index = cls(keys, "")
        index._native = _Searchable(build(keys), keys)
        index.summarize(values)
        return index

    def summarize(self, values: Keys) -> None:
        """Of an extended index, the summaries of the earlier keys are taken over."""
        if len(values) != len(self):
            raise InvalidIndexInput(f"{len(self):,} keys need as many values, not {len(values):,}.")
        if not len(self) or self.summarized:
            return
        earlier = self._native.summaries
        known = 0 if earlier is None else len(earlier.cells)
        later = summarize(self.cells, self.keys, values, known)
        whole = later if earlier is None else join_summaries(earlier, later)
        self._native = _Searchable(self.cells, self.keys, self._native.mapped, whole)

    def share(self, earlier: Self, stays: bool) -> None:
        self._shared = earlier._native and earlier._native.mapped, stays

    @property
    def summaries(self) -> Summaries:
        """What estimates read; there are some of a `summarized` index alone."""
        own: Summaries = self._native.summaries
        return own

    def means_of(self, value_dim: int) -> bool:
        """Whether the summaries are of values so wide."""
        return int(self.summaries.cells.shape[1]) == value_dim + SCALE_BYTES

    @property
    def summarized(self) -> bool:
        summaries = self._native.summaries if len(self) else None
        return summaries is not None and len(summaries.labels) == len(self)

    @classmethod
    def estimate(
        cls,
        heads: Sequence[Self],
        queries: Float32,
        ids: npt.NDArray[np.int64],
        scores: Float32 | None,
        value_dim: int,
        scaling: float,
        softcap: float | None = None,
    ) -> tuple[Float32, Float32]:
        """The attention to all keys that are not selected, estimated from the summaries of a layer's heads:
        `out [H, R, Dv]`, and `lse [H, R]`, -inf where nothing is left. All heads must be `summarized`.

        queries: float32 `[H, R, D]`. ids `[H, R, k]`, unique in a row, -1 where there is none; their inner
        products with the queries, -inf there, or None. value_dim: Dv, of the values. scaling, softcap: make
        logits of inner products. Raises InvalidIndexInput for queries that are not finite, shapes that do not
        fit and ids that are out of range, IndexDamaged for means of other values.
        """
        check_heads(heads, queries)
        rows = queries.shape[1]
        known = np.empty((*ids.shape[:2], 0), np.float32) if scores is None else scores
        check_queries(queries.reshape(-1, queries.shape[2]), heads[0].dim)
        fits = known.shape[:2] == ids.shape[:2] == queries.shape[:2] and known.shape[2] in (0, ids.shape[2])
        if not (fits and all(head.summarized and head.dim == heads[0].dim for head in heads)):
            raise InvalidIndexInput("An estimate needs summarized heads, and ids for each of their queries.")
        if not all(head.means_of(value_dim) for head in heads):
            raise IndexDamaged(OTHER_MEANS)
        own = _together(heads, np.zeros(len(heads), np.float32))
        given = Given(queries, ids, known, np.float32(scaling), np.float32(softcap or 0))
        out = np.zeros((len(heads), rows, value_dim), np.float32)
        lse = np.full(out.shape[:2], -np.inf, np.float32)
        most = rows_of_a_task(int(own.sizes[:, 3].max()))
        per_task = max(1, min(most, ceil(len(heads) * rows / threads.THREADS)))
        wrong = np.zeros(1, np.int64)
        if rows:
            estimate_layer(team.cells(), own, given, per_task, out, lse, wrong)
        if wrong[0]:
            raise InvalidIndexInput(f"An id is not of the {len(heads[0]):,} keys that there are.")
        if not (np.isfinite(out).all() and (lse < np.inf).all()):
            raise IndexDamaged(OTHER_MEANS)
        return out, lse

    def _wanted(self, first: int, sample: Sample) -> Wanted | None:
        """The best of all keys for each query, of which those from `first` on are to be put into cells."""
        if not sample.real or not len(self):
            return None
        best = sample.best(min(_WANTED, len(self)))
        return Wanted(sample.choose, np.maximum(best.ids - first, -1), best.scores)

    def _write_native(self, file: str) -> None:
        parts = self.cells
        numbers = [_MAGIC, len(self), self.dim, len(parts.counts), len(parts.ids) // BLOCK]
        summaries = self._native.summaries if self.summarized else ()
        if summaries:
            numbers += [len(summaries.sizes), summaries.cells.shape[1] - SCALE_BYTES]
        found = dict(zip(_ARRAYS, (*parts, *summaries), strict=False))
        self.bases = arrays.write(file, numbers, found, *self._shared)

    def _read_native(self, file: str) -> Any:
        def layout(numbers: Sequence[int]) -> arrays.Layout:
            magic, n, dim, count, blocks, groups, value_dim = numbers
            if (magic, n, dim) != (_MAGIC, len(self), self.dim):
                raise RuntimeError(f"it is no file of cells of {len(self)} x {self.dim}")
            summaries = {
                "keys": (np.uint8, (groups, SCALE_BYTES + dim)),
                "values": (np.uint8, (groups, SCALE_BYTES + value_dim)),
                "of_cells": (np.uint8, (count, SCALE_BYTES + value_dim)),
                "first": (np.int32, (count + 1,)),
                "sizes": (np.int32, (groups,)),
                "labels": (np.int32, (n,)),
            }
            return {
                "starts": (np.int64, (count + 1,)),
                "counts": (np.int32, (count,)),
                "means": (np.float32, (count, dim)),
                "variances": (np.float32, (count, dim)),
                "codes": (np.uint8, (blocks * -(-dim // GROUP) * WORD,)),
                "scales": (np.float32, (blocks * BLOCK,)),
                "ids": (np.int32, (blocks * BLOCK,)),
                **(summaries if groups else {}),  # files of earlier versions have none
            }

        _, mapped = arrays.read(file, 7, layout)
        parts = dict(mapped.arrays)
        cells = Cells(**{name: parts.pop(name) for name in Cells._fields})
        summaries = Summaries(*parts.values()) if parts else None

        def checked() -> bool:
            return check(cells, len(self)) and (summaries is None or check_summaries(summaries, cells))

        verified.holds(Path(file), f"{_CHECKED} of {len(self)} keys", checked)
        return _Searchable(cells, self.keys, mapped, summaries)

    @property
    def cells(self) -> Cells:
        """What is scanned."""
        own: Cells = self._native.cells
        return own

    @property
    def nbytes(self) -> int:
        summaries: tuple[npt.NDArray[Any], ...] = self._native.summaries or ()
        return self.cells.nbytes + sum(part.nbytes for part in summaries)


class _Bytes(NamedTuple):
    """What an index takes: codes of the keys with their scales and ids, means and variances of the cells, how
    many keys each has; keys and values of the groups, and which group a key is of with the cells' values.
    """

    codes: int
    moments: int
    counts: int
    groups: int
    labels: int

    @classmethod
    def of(cls, n: int, dim: int) -> Self:
        """Of `n` keys, with values as wide."""
        cells = max(1, n // KEYS_PER_CELL)
        padded = n + BLOCK // 2 * cells  # half a block in each cell
        codes = padded * (-(-dim // GROUP) * WORD // BLOCK + 8)
        groups = groups_of(n) * (2 * (dim + SCALE_BYTES) + 4)
        return cls(codes, 8 * dim * cells, 12 * cells, groups, 4 * n + (dim + 8) * cells)


class _Searchable:
    """Cells, and summaries of all or some of them, as compiled functions take them: by addresses of arrays
    that live as long as this object.
    """

    def __init__(
        self, own: Cells, keys: Any, mapped: Mapped | None = None, summaries: Summaries | None = None
    ):
        self.cells = Cells(*map(np.ascontiguousarray, own))
        self.summaries = summaries
        self.mapped = mapped
        self.keys = scan.bits(keys)
        self.layout = scan.layout(keys)
        self.parts = (*self.cells, self.keys)  # addresses are of whole arrays
        addresses = [part.ctypes.data for part in (*self.parts, *(summaries or ()))]
        self.addresses = np.array(addresses + [0] * (14 - len(addresses)))
        groups = len(summaries.sizes) if summaries else 0
        self.sizes = np.array([len(own.counts), len(own.ids) // BLOCK, len(self.keys), groups])


def _sparse(n: int, k: int) -> bool:
    """Whether fewer than n keys are scored exactly for the k best: a threshold keeps most of them out."""
    return candidates_for(k) < n


def share_read(n: int, k: int) -> float:
    """About the share of the codes that a query reads: fitted to the answers of a real model (Qwen2.5 0.5B),
    of which it was 0.87 for 64 and 0.99 for 1,024 of 16,384 keys, and 0.77 and 0.97 of 30,720. Of long-tailed
    keys that are made up it is less: 0.17 and 0.47 of 131,072.
    """
    return float(1 - np.exp(-11.4 * np.cbrt(k / n)))


def _rows_of_a_task(k: int) -> int:
    return max(1, min(_ROWS, _CANDIDATES // (2 * candidates_for(k))))


def _searched(
    heads: Sequence[ClusteredIndex], queries: Float32, k: int, deviations: Sequence[float] | None = None
) -> Hits:
    """The k best of every head's keys for its `queries [H, R, D]`: ids and scores `[H, R, k]`. Where threads
    would idle, a head's cells are searched in parts. Without `deviations`, at those tuned for k.
    """
    if deviations is None:
        deviations = [head.deviations_for(k) for head in heads]
    count, rows, _ = queries.shape
    together = _together(heads, np.array(deviations, np.float32))
    per_task = min(_rows_of_a_task(k), max(QUERIES, ceil(count * rows / threads.THREADS)))
    tasks = count * -(-rows // per_task)
    parts = _parts(together, tasks)
    best = _in_parts(together, queries, k, per_task, parts)
    if parts > 1 and (best.seen.sum(axis=0) < candidates_for(k)).any():
        # The predicted threshold found too few keys: find one in all of a head's cells.
        best = _in_parts(together, queries, k, per_task, 1)
    hits = joined_hits(best.ids, best.scores, np.minimum(best.seen, k))
    if not np.isfinite(hits.scores).all():
        raise InvalidIndexInput(NOT_FINITE)
    return hits


def _parts(heads: Heads, tasks: int) -> int:
    """Parts of the cells of a head, where threads would idle with so many tasks."""
    return max(1, min(threads.THREADS // tasks, int(heads.sizes[:, 0].min()) // _CELLS_OF_A_PART))


def _together(heads: Sequence[ClusteredIndex], deviations: Float32) -> Heads:
    natives = [head._native for head in heads]
    for native in natives:
        if native.mapped is not None and (file := native.mapped.shrunk):
            raise IndexDamaged(
                f"{file} is shorter than it was when it was opened; build the index again with "
                "`offload-decode index`."
            )
    return Heads(
        parts=np.stack([native.addresses for native in natives]),
        sizes=np.stack([native.sizes for native in natives]),
        deviations=deviations,
        row_bytes=natives[0].keys.shape[1],
        layout=natives[0].layout,
    )


def _in_parts(heads: Heads, queries: Float32, k: int, per_task: int, parts: int) -> Best:
    count, rows, _ = queries.shape
    shape = (parts, count, rows)
    ids, scores = np.full((*shape, k), -1, np.int64), np.full((*shape, k), np.nan, np.float32)
    best = Best(ids, scores, np.zeros(shape, np.int64))
    workers = min(threads.THREADS, parts * count * -(-rows // per_task))
    predicted = predict(heads, queries, k, workers) if parts > 1 else UNPREDICTED
    search_layer(team.cells(), heads, queries, k, per_task, predicted, best)
    return best
