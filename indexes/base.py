"""`VectorIndex`: maximum inner product search over the keys of one (layer, KV head)."""

from __future__ import annotations

import operator
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from offload_decode.common.errors import InvalidIndexInput
from offload_decode.common.rows import encodings, threads
from offload_decode.common.rows.arrays import KEY_DTYPES, Float32, Keys, check_keys

StrPath = str | os.PathLike[str]

SOURCES = FROM_QUERIES, FROM_KEYS = "prefill queries", "keys"
"""What a recall was measured on."""


LOSS = 0.1
"""The share of the attention to exact top-k beyond which a query counts as one that loses attention."""


@dataclass(frozen=True, eq=False)
class Hits:
    """The best keys of each query, by descending score; unused places hold id -1 and score -inf.

    ids: int64 `[G, k]`, unique within a row. scores: float32 `[G, k]`, unscaled inner products. Of a layer's
    heads together, `[H, G, k]`.
    """

    ids: npt.NDArray[np.int64]
    scores: Float32

    @classmethod
    def empty(cls, queries: int, k: int) -> Hits:
        """What an index without keys finds: padding only."""
        return cls(np.full((queries, k), -1, np.int64), np.full((queries, k), -np.inf, np.float32))


@dataclass(frozen=True)
class RecallRecord:
    """A recall that was measured against the exact scan, and the parameter it was measured at.

    measured: mean recall@k over `queries` held-out queries. source: one of SOURCES, the keys where
    no queries were stored. parameter, value: the search parameter (`nprobe`, `ef`) chosen for `target`.
    full_scan: no smaller value reached the target than the one at which every key is read.

    Beside exact top-k, of the queries: mass, low: the mean and the 1st percentile of the share of its
    attention (at a scaling of 1/sqrt(D)) that the found keys have. lost: the share of queries for which that
    is below 1 - LOSS. best: the share of queries whose best key was found. None where they were not
    measured: on keys, and by earlier versions.
    """

    target: float
    k: int
    measured: float
    queries: int
    source: str
    parameter: str
    value: float
    full_scan: bool
    mass: float | None = None
    lost: float | None = None
    best: float | None = None
    low: float | None = None


@dataclass(frozen=True)
class Costs:
    """Bytes of the index of one head. memory: held beyond the keys, and beyond its file where that is mapped,
    which it is where `memory` is 0. file: on disk. read: by a search, each byte once.
    """

    memory: int
    file: int
    read: int


class VectorIndex(ABC):
    """Built once over `keys [N, D]` (float16, bfloat16 or float32) or `[N]` (encoded rows, which stand for
    what they decode to), then searched by inner product. C-contiguous, never modified or copied whole to
    float32 by this class.

    suffix: of the file that the kind saves beside its metadata, empty for none. library: what imports
    the kind's, or raises MissingBackend.
    exact_scores: the scores are float32 inner products with the stored keys, not quantized estimates.
    exhaustive: a search returns the true top-k. recall: what was measured at `build`, None where exhaustive.
    """

    name: ClassVar[str]
    suffix: ClassVar[str] = ""
    library: ClassVar[Callable[[], object] | None] = None
    exact_scores: ClassVar[bool]
    exhaustive: ClassVar[bool]

    def __init__(self, keys: Keys, digest: str) -> None:
        self.keys = check_keys(keys)
        self.dim = encodings.dim(keys)
        self.digest = digest
        self.recall: RecallRecord | None = None

    def __len__(self) -> int:
        return len(self.keys)

    def scans(self, k: int) -> bool:
        """Whether a search for `k` keys reads every key, as far as is known before."""
        return self.exhaustive

    @classmethod
    @abstractmethod
    def costs(cls, n: int, dim: int, dtype: np.dtype[Any], k: int, rows: int = 1) -> Costs:
        """What an index of `n` keys `[dim]` of `dtype` (floats, or records of encoded rows) takes, and what a
        search for the `k` best of each of `rows` queries reads: by arithmetic, without the kind's library.
        Where a recall decides what is read, it is what recalls of 0.95 to 0.98 took.
        """

    @classmethod
    @abstractmethod
    def search_bytes(cls, n: int, k: int, heads: int, rows: int) -> int:
        """Bytes beside the hits that a search of `heads` heads for `rows` queries each holds, all threads."""

    @classmethod
    @abstractmethod
    def build(
        cls,
        keys: Keys,
        queries: npt.NDArray[Any] | None = None,
        *,
        digest: str | None = None,
        target_recall: float = 0.95,
        k: int = 64,
    ) -> Self:
        """An index over `keys`, its search parameter chosen so that recall@k on `queries` (sampled prefill
        queries `[M, D]`) reaches `target_recall`. `digest` names the keys; without it their bytes are hashed.

        Raises InvalidIndexInput for wrong shapes, dtypes, options or values that are not finite.
        """

    @abstractmethod
    def extended(self, keys: Keys, queries: npt.NDArray[Any] | None = None, *, digest: str) -> Self:
        """An index over `keys`, the first of which are this one's: what it learned of them is taken over, and
        the further ones are added. Its search parameter is chosen anew on `queries`, for the same target and
        k. This index stays as it is.

        Raises as `build`.
        """

    def summarize(self, values: Keys) -> None:  # noqa: B027 (most do not)
        """Keep what the attention to keys that are not found is estimated by: the kinds that can, of the
        `values [N, Dv]` of their keys, or `[N]` of encoded rows. Raises InvalidIndexInput.
        """

    def share(self, earlier: Self, stays: bool) -> None:  # noqa: B027 (most do not)
        """Be saved without what it begins with as an `earlier` index does that was loaded, but with links to
        that one's files: the kinds that can, of this one `extended` from it. Unless the earlier one `stays`,
        those that it has links to alone.
        """

    @property
    def summarized(self) -> bool:
        """Whether it was; True of kinds that cannot."""
        return True

    @property
    def least_tuned(self) -> float:
        """The smallest value that it would be tuned to now: earlier versions had smaller ones."""
        return 0.0

    def search(self, queries: npt.NDArray[Any], k: int) -> Hits:
        """The `k` best keys for each of `queries [G, D]`; padded where `k` exceeds the number of keys."""
        queries, k = check_queries(queries, self.dim), check_count(k)
        found = min(k, len(self))
        if found == 0 or len(queries) == 0:
            return Hits.empty(len(queries), k)
        hits = self._search(queries, found)
        if found == k:
            return hits
        padded = Hits.empty(len(queries), k)
        padded.ids[:, :found], padded.scores[:, :found] = hits.ids, hits.scores
        return padded

    @classmethod
    def search_heads(cls, heads: Sequence[VectorIndex], queries: npt.NDArray[Any], k: int) -> Hits:
        """`search` in each of a layer's H heads for its `queries [H, R, D]`, on all threads: `[H, R, k]`."""
        check_heads(heads, queries)
        found = [Hits.empty(len(own), k) for own in queries]

        def search(head: int) -> None:
            found[head] = heads[head].search(queries[head], k)

        threads.run(search, range(len(heads)))
        return Hits(np.stack([hits.ids for hits in found]), np.stack([hits.scores for hits in found]))

    @abstractmethod
    def _search(self, queries: Float32, k: int) -> Hits:
        """`search` for checked queries, at least one, and 1 <= k <= N: every place is filled."""

    @abstractmethod
    def save(self, path: StrPath) -> None:
        """Writes `<path>.json`, and beside it what the kind's library needs. Replaces an older save."""

    @classmethod
    @abstractmethod
    def load(cls, path: StrPath, keys: Keys, *, digest: str | None = None) -> Self:
        """The index saved at `path`, over the same `keys`.

        Raises IndexNotFound, IndexMismatch for other keys or another kind or format, IndexDamaged.
        """

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of memory held beyond the keys themselves."""


def check_heads(heads: Sequence[VectorIndex], queries: npt.NDArray[Any]) -> None:
    """Raises InvalidIndexInput unless `queries [H, R, D]` has rows for each of the heads."""
    if np.ndim(queries) != 3 or len(heads) != len(queries):
        raise InvalidIndexInput(
            f"Queries must be of shape [{len(heads)}, R, D], R for each head, got {np.shape(queries)}."
        )


def check_recall_options(target_recall: float, k: int) -> None:
    """The options of `build`: 0 < target_recall <= 1 and k >= 1."""
    if not 0 < target_recall <= 1:
        raise InvalidIndexInput(f"target_recall must be above 0 and at most 1, got {target_recall}.")
    if check_count(k) < 1:
        raise InvalidIndexInput("k must be 1 or more to measure a recall.")


def check_queries(queries: npt.NDArray[Any], dim: int) -> Float32:
    """`queries [G, D]` as contiguous float32 (16-bit floats are widened), all of them finite."""
    if not isinstance(queries, np.ndarray) or queries.ndim != 2 or queries.shape[1] != dim:
        shape = getattr(queries, "shape", type(queries).__name__)
        raise InvalidIndexInput(f"Queries must be a numpy array of shape [G, {dim}], got {shape}.")
    if queries.dtype not in KEY_DTYPES:
        raise InvalidIndexInput(f"Queries are {queries.dtype}; convert them to float32.")
    wide = np.ascontiguousarray(queries, dtype=np.float32)
    if not np.isfinite(wide).all():
        raise InvalidIndexInput("Queries hold NaN or infinite values; only finite ones can be searched.")
    return wide


def check_count(k: int) -> int:
    """`k` as a plain integer of at least 0."""
    try:
        count = operator.index(k)
    except TypeError:
        raise InvalidIndexInput(f"k must be a whole number, got {k!r}.") from None
    if count < 0:
        raise InvalidIndexInput(f"k must be 0 or more, got {count}.")
    return count
