"""What the kinds that approximate share: tuning, completion by the exact scan, files."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import asdict
from math import ceil
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from offload_decode.indexes import files
from offload_decode.indexes.base import Hits, RecallRecord, StrPath, VectorIndex, check_recall_options
from offload_decode.indexes.errors import IndexDamaged
from offload_decode.indexes.flat import FlatIndex
from offload_decode.indexes.keys import Float32, Keys, check_keys, check_more, check_queries, keys_digest
from offload_decode.indexes.rows import encodings
from offload_decode.indexes.tuning import tune


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
    quickly_built: ClassVar[int] = 4096

    def __init__(self, keys: Keys, digest: str) -> None:
        super().__init__(keys, digest)
        self.flat = FlatIndex(keys, digest)
        self._native: Any = None

    @classmethod
    def made_up(cls, keys: Keys, k: int) -> Self:
        """Of the first `quickly_built` keys: a library knows no quicker way than to build one."""
        return super().made_up(keys[: cls.quickly_built], k)

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
        index._native = index._build_native()
        index._tune(queries, k, target_recall)
        return index

    def extended(self, keys: Keys, queries: npt.NDArray[Any] | None = None, *, digest: str) -> Self:
        check_more(self.keys, keys)
        if self.recall is None:  # it has no keys
            return self.build(keys, queries, digest=digest)
        index = type(self)(keys, digest)
        index._native = index._extend_native(self)
        index._tune(queries, self.recall.k, self.recall.target)
        return index

    def _tune(self, queries: npt.NDArray[Any] | None, k: int, target: float) -> None:
        self.recall = tune(self, self.flat, queries, k, target)

    def _search(self, queries: Float32, k: int) -> Hits:
        assert self.recall is not None, "an index with keys is tuned, or refused when it is loaded"
        growth = max(1.0, k / self.recall.k)
        hits = self.search_at(queries, k, ceil(self.recall.value * growth))
        unfilled = np.flatnonzero((hits.ids < 0).any(axis=1))
        if len(unfilled):
            exact = self.flat.search(queries[unfilled], k)
            hits.ids[unfilled], hits.scores[unfilled] = exact.ids, exact.scores
        return hits

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
    def _build_native(self) -> Any:
        """The native index over all keys. Raises InvalidIndexInput for keys that are not finite."""

    @abstractmethod
    def _extend_native(self, earlier: Self) -> Any:
        """The native index over all keys, made of that of `earlier`, which is of the first of them and stays
        as it is. Raises as `_build_native`.
        """

    @abstractmethod
    def _search_native(self, queries: Float32, k: int, value: float) -> Hits:
        """The hits of the native search by descending score, which is exact; ids of -1 where it found fewer
        than k.
        """

    @abstractmethod
    def _write_native(self, file: str) -> None: ...

    @abstractmethod
    def _read_native(self, file: str) -> Any:
        """The native index from a file of the size and bytes that its metadata tells. Raises RuntimeError for
        another thing, and for numbers that cannot be: nothing in the file is used before it was checked.
        """

    def save(self, path: StrPath) -> None:
        records = {
            name: None if record is None else asdict(record) for name, record in self._records().items()
        }
        metadata = files.identity(self.name, self.keys, self.digest) | records
        files.save(path, metadata, self.suffix, self._write_native)

    def _records(self) -> dict[str, RecallRecord | None]:
        """What was measured, by the names that the metadata has for it."""
        return {"recall": self.recall}

    @classmethod
    def load(cls, path: StrPath, keys: Keys, *, digest: str | None = None) -> Self:
        check_keys(keys)
        index = cls(keys, keys_digest(keys) if digest is None else digest)
        metadata, native = files.load(path, files.identity(cls.name, keys, index.digest), cls.suffix)
        index.recall = files.recall_of(path, metadata)
        tuned = index.recall is not None and index.recall.parameter == cls.parameter
        if tuned != (len(keys) > 0):
            raise IndexDamaged(
                f"The index at {path} does not say what it was tuned to; build the index again with "
                "`offload-decode index`."
            )
        index._take_records(path, metadata)
        index._native = index._checked(native)
        return index

    def _take_records(self, path: StrPath, metadata: dict[str, Any]) -> None:
        """What `_records` has beside the recall, from metadata."""

    def _checked(self, native: Path | None) -> Any:
        try:
            return self._read_native(str(native))
        except (OSError, RuntimeError) as error:
            raise IndexDamaged(
                f"{native} is not an index that can be read ({error}); build the index again."
            ) from error
