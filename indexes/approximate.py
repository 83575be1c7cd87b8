"""What approximate kinds share: tuning by measured recall, exact rescoring, the exact scan as fallback,
files.

Queries are unlike keys, so no default of `nprobe` or `ef` can be trusted: it is tuned.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from numba import njit

from offload_decode.common.errors import IndexDamaged, InvalidIndexInput
from offload_decode.common.rows import encodings, scan
from offload_decode.common.rows.arrays import Float32, Keys, check_keys, check_more, keys_digest
from offload_decode.common.rows.loops import dot_row
from offload_decode.indexes import files
from offload_decode.indexes.base import (
    FROM_KEYS,
    FROM_QUERIES,
    LOSS,
    Hits,
    RecallRecord,
    StrPath,
    VectorIndex,
    check_queries,
    check_recall_options,
)
from offload_decode.indexes.flat import NOT_FINITE, FlatIndex

_MAX_QUERIES = 1024  # half chooses, half measures: a standard error near 0.01 at worst
_LOST = 1  # of the queries to choose by: so many may lose attention
_KEY_SAMPLE = 256
_TIE = 1e-5  # relative; scores of one key from two loops differ by summation order


@dataclass(eq=False)
class Sample:
    """Queries `[Q, D]` to build and to choose a parameter by, and others to report on; `source` as in
    `RecallRecord`.
    """

    flat: FlatIndex
    source: str
    choose: Float32
    report: Float32
    _best: Hits | None = None

    @property
    def real(self) -> bool:
        """Whether these are queries, and not keys in their place."""
        return self.source == FROM_QUERIES

    def best(self, k: int) -> Hits:
        """The exact hits of the queries to choose by: building and tuning share a scan of all keys."""
        if self._best is None or self._best.ids.shape[1] < k:
            self._best = self.flat.search(self.choose, k)
        return Hits(self._best.ids[:, :k], self._best.scores[:, :k])


def sampled(flat: FlatIndex, queries: npt.NDArray[Any] | None) -> Sample:
    """Every other one of some of the queries to choose by, the others to report on. A sample of the keys
    stands in for missing queries.
    """
    if queries is not None and len(queries):
        source, rows = FROM_QUERIES, check_queries(_spread(queries, _MAX_QUERIES), flat.dim)
    else:
        source, rows = FROM_KEYS, check_queries(encodings.decode(_spread(flat.keys, _KEY_SAMPLE)), flat.dim)
    return Sample(flat, source, rows[0::2], rows[1::2] if len(rows) > 1 else rows)


def tune(
    index: ApproximateIndex, sample: Sample, k: int, target: float, fewer: Sequence[int] = ()
) -> RecallRecord | None:
    """The first value of the ladder whose recall@k reaches `target` for the queries to choose by and, unless
    that takes a scan of all keys, at which at most one real query loses attention, asked for k keys or for
    `fewer` (counts below k, for kinds that then read less); with what it finds for the others. None for an
    empty index.
    """
    flat = sample.flat
    if len(flat) == 0:
        return None
    k = min(k, len(flat))
    ladder, reached, scaling = index.ladder(k), None, flat.dim**-0.5

    def found_of(count: int, value: float) -> Quality:
        return quality(index.search_at(sample.choose, count, value), sample.best(count), scaling)

    def keeps(found: Quality) -> bool:
        return found.lost * len(sample.choose) <= _LOST

    for value in ladder:
        found = found_of(k, value)
        if reached is None and found.recall >= target:
            reached = value
        if reached is None:
            continue
        if not sample.real or value >= index.scan_from:
            break
        if keeps(found) and all(keeps(found_of(count, value)) for count in fewer if count < k):
            break
    if reached is not None and value >= index.scan_from:
        value = reached
    found = quality(index.search_at(sample.report, k, value), flat.search(sample.report, k), scaling)
    tuned = target, k, found.recall, len(sample.report), sample.source, index.parameter, value
    attention = found[1:] if sample.real else ()
    return RecallRecord(*tuned, value == ladder[-1], *attention)


class Quality(NamedTuple):
    """What a search found beside the exact one; as `RecallRecord` has it."""

    recall: float
    mass: float
    lost: float
    best: float
    low: float


def quality(hits: Hits, truth: Hits, scaling: float) -> Quality:
    """Of the true top-k `[G, k]`, whose scores times `scaling` are logits; a key that ties with the k-th, or
    with the best one, counts as found.
    """
    tolerance = _TIE * np.abs(truth.scores).max(axis=1, keepdims=True)
    top = truth.scores[:, :1]
    # Scores of one key may round differently in two loops: nothing is above the best, and no share above 1.
    found, exact = (np.exp(np.minimum(one.scores - top, 0) * scaling).sum(axis=1) for one in (hits, truth))
    mass = np.minimum(found / exact, 1)
    return Quality(
        recall=float(np.mean(hits.scores >= truth.scores[:, -1:] - tolerance)),
        mass=float(np.mean(mass)),
        lost=float(np.mean(mass < 1 - LOSS)),
        best=float(np.mean(hits.scores[:, :1] >= top - tolerance)),
        low=float(np.percentile(mass, 1)),
    )


def geometric(start: int, stop: int) -> list[int]:
    """Rising values from `start`, by about half each, below `stop`."""
    values = []
    while start < stop:
        values.append(start)
        start = max(start + 1, start * 3 // 2)
    return values


def _spread(rows: Keys, count: int) -> Keys:
    if len(rows) <= count:
        return rows
    return rows[np.linspace(0, len(rows) - 1, count).astype(np.int64)]


class ApproximateIndex(VectorIndex):
    """An index that is searched at the parameter that was tuned for recall@k.

    A search for more than the tuned k raises the parameter in proportion, `value * max(1, k / k_tuned)`,
    unless the kind adapts by itself. From `scan_from` on, and for a query whose k places the native search
    cannot fill, the exact scan answers.
    """

    exact_scores: ClassVar[bool] = True
    exhaustive: ClassVar[bool] = False
    parameter: ClassVar[str]
    suffix: ClassVar[str]
    recalls: ClassVar[tuple[str, ...]] = ("recall",)
    """The measured recalls, as attributes and in the metadata."""

    def __init__(self, keys: Keys, digest: str) -> None:
        super().__init__(keys, digest)
        self.flat = FlatIndex(keys, digest)
        self._native: Any = None
        self.bases: Mapping[
            str, os.stat_result
        ] = {}  # files that the native one shares bytes of, when written

    @classmethod
    def search_bytes(cls, n: int, k: int, heads: int, rows: int) -> int:
        """Those of the exact scan, to which any of them may come."""
        return FlatIndex.search_bytes(n, k, heads, rows)

    @classmethod
    def build(
        cls,
        keys: Keys,
        queries: npt.NDArray[Any] | None = None,
        *,
        digest: str | None = None,
        target_recall: float = 0.95,
        k: int = 64,
    ) -> Self:
        check_keys(keys)
        check_recall_options(target_recall, k)
        if queries is not None:
            check_queries(queries, encodings.dim(keys))
        index = cls(keys, keys_digest(keys) if digest is None else digest)
        sample = sampled(index.flat, queries)
        index._native = index._build_native(sample)
        index._tune(sample, k, target_recall)
        return index

    def extended(self, keys: Keys, queries: npt.NDArray[Any] | None = None, *, digest: str) -> Self:
        check_more(self.keys, keys)
        if self.recall is None:  # it has no keys
            return self.build(keys, queries, digest=digest)
        index = type(self)(keys, digest)
        sample = sampled(index.flat, queries)
        index._native = index._extend_native(self, sample)
        index._tune(sample, self.recall.k, self.recall.target)
        return index

    def _tune(self, sample: Sample, k: int, target: float) -> None:
        self.recall = tune(self, sample, k, target)

    def _search(self, queries: Float32, k: int) -> Hits:
        assert self.recall is not None, "an index with keys is tuned, or refused when it is loaded"
        growth = max(1.0, k / self.recall.k)
        hits = self.search_at(queries, k, ceil(self.recall.value * growth))
        unfilled = np.flatnonzero((hits.ids < 0).any(axis=1))
        if len(unfilled):
            exact = self.flat.search(queries[unfilled], k)
            hits.ids[unfilled], hits.scores[unfilled] = exact.ids, exact.scores
        return hits

    def scans(self, k: int) -> bool:
        return self.recall is not None and self.recall.full_scan

    def search_at(self, queries: Float32, k: int, value: float) -> Hits:
        """One search at a parameter value of the caller's choice, 1 <= k <= N; it may leave places empty."""
        if value >= self.scan_from:
            return self.flat.search(queries, k)
        return self._search_native(queries, k, value)

    @abstractmethod
    def ladder(self, k: int) -> Sequence[float]:
        """Rising parameter values to try for `k`; at the last one the search is exhaustive."""

    @property
    @abstractmethod
    def scan_from(self) -> float:
        """The smallest parameter value at which reading every key costs no more than the native search."""

    @abstractmethod
    def _build_native(self, sample: Sample) -> Any:
        """The native index over all keys, for queries like a sample's. Raises InvalidIndexInput for keys that
        are not finite.
        """

    @abstractmethod
    def _extend_native(self, earlier: Self, sample: Sample) -> Any:
        """The native index over all keys, from that of `earlier`, which stays. Raises as `_build_native`."""

    @abstractmethod
    def _search_native(self, queries: Float32, k: int, value: float) -> Hits:
        """Hits by descending score, which is exact; ids of -1 where it found fewer than k."""

    @abstractmethod
    def _write_native(self, file: str) -> None: ...

    @abstractmethod
    def _read_native(self, file: str) -> Any:
        """The native index from a file of the size and bytes that its metadata tells. Raises RuntimeError for
        another thing, and for numbers that cannot be: nothing in the file is used before it was checked.
        """

    def save(self, path: StrPath) -> None:
        records = {name: (found := getattr(self, name)) and asdict(found) for name in self.recalls}
        metadata = files.identity(self.name, self.keys, self.digest) | records
        files.save(path, metadata, self.suffix, self._write_native, lambda: self.bases)

    @classmethod
    def load(cls, path: StrPath, keys: Keys, *, digest: str | None = None) -> Self:
        check_keys(keys)
        index = cls(keys, keys_digest(keys) if digest is None else digest)
        metadata, native = files.load(path, files.identity(cls.name, keys, index.digest), cls.suffix)
        for name in cls.recalls:
            setattr(index, name, files.recall_of(path, metadata, name))
        tuned = index.recall is not None and index.recall.parameter == cls.parameter
        if tuned != (len(keys) > 0):
            raise IndexDamaged(
                f"The index at {path} does not say what it was tuned to; build the index again with "
                "`offload-decode index`."
            )
        try:
            index._native = index._read_native(str(native))
        except (OSError, RuntimeError) as error:
            raise IndexDamaged(
                f"{native} is not an index that can be read ({error}); build the index again."
            ) from error
        return index


_RIGHT, _WRONG_ID, _NOT_FINITE = range(3)


def asked_for(k: int, n: int) -> int:
    """How many of `n` keys to ask a library, whose scores may be rounded, for the `k` best of them."""
    return min(n, k + k // 4 + 16)


def rescored(keys: Keys, queries: Float32, ids: npt.NDArray[np.int64], k: int) -> Hits:
    """The `k` best of the keys `ids [G, c]` (-1 for none) for each of `queries [G, D]`: by descending score,
    ties to the lower id, as the exact scan has it.

    Raises IndexDamaged for ids that are not those of keys, InvalidIndexInput for scores that are not finite.
    """
    hits = Hits.empty(len(queries), k)
    state = _rescore(scan.bits(keys), scan.layout(keys), queries, ids, hits.ids, hits.scores)
    if state == _WRONG_ID:
        raise IndexDamaged(
            "The index names keys that there are not, or one key twice: build it again with "
            "`offload-decode index`."
        )
    if state == _NOT_FINITE:
        raise InvalidIndexInput(NOT_FINITE)
    return hits


@njit(nogil=True, cache=True)
def _rescore(rows: Any, layout: int, queries: Any, ids: Any, found: Any, scores: Any) -> int:
    best = np.empty(ids.shape[1], np.uint64)
    for g in range(len(queries)):
        count = 0
        for place in range(ids.shape[1]):
            row = ids[g, place]
            if row < -1 or row >= len(rows):
                return _WRONG_ID
            if row >= 0:
                score = dot_row(queries[g], rows, layout, row)
                if not np.isfinite(score):
                    return _NOT_FINITE
                best[count] = scan.candidate(score, row)
                count += 1
        best[:count].sort()
        for place in range(1, count):
            if best[place] == best[place - 1]:
                return _WRONG_ID
        for place in range(min(found.shape[1], count)):
            scores[g, place], found[g, place] = scan.score_and_row(best[count - 1 - place])
    return _RIGHT
