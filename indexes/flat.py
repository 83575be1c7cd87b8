"""Exact inner product search by reading every key: the reference of all other kinds."""

from collections.abc import Sequence
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
from numba import njit

from offload_decode.common.errors import InvalidIndexInput
from offload_decode.common.rows import scan, threads
from offload_decode.common.rows.arrays import (
    Float32,
    Keys,
    check_keys,
    check_more,
    float32_blocks,
    keys_digest,
)
from offload_decode.common.rows.encodings import row_size
from offload_decode.common.rows.top_k import join
from offload_decode.indexes import files
from offload_decode.indexes.base import Costs, Hits, StrPath, VectorIndex, check_heads, check_recall_options

NOT_FINITE = (
    "A score is not finite: the keys hold NaN or infinite values, or an inner product overflows float32; the "
    "store must be prefilled again."
)
_BLOCK_ROWS = 2048  # a widened block of D = 128 is 1 MiB and stays in the second-level cache
_KEYS_OF_A_PART = 1 << 16  # of a head, at least: to read fewer takes hardly longer than to share the work
_GROUP_ROWS = 256  # queries that share one pass over the keys; bounds the candidates' memory

Candidates = npt.NDArray[np.uint64]
"""As in `common.rows.scan`."""
_RUN = 64  # scores looked at together; most runs hold nothing above the threshold
_REASSOCIATE = {"reassoc", "contract", "nsz"}  # a sum may be vectorised; NaN and infinity keep their meaning


class FlatIndex(VectorIndex):
    """Blockwise over the keys, all queries of a group in one pass; ties go to the lower id.

    Holds nothing beyond the keys. With a `digest` given, `build` does not read them: keys that are not
    finite are then refused by the first search that meets them.
    """

    name: ClassVar[str] = "flat"
    exact_scores: ClassVar[bool] = True
    exhaustive: ClassVar[bool] = True

    @classmethod
    def costs(cls, n: int, dim: int, dtype: np.dtype[Any], k: int, rows: int = 1) -> Costs:
        return Costs(memory=0, file=0, read=n * row_size(dim, dtype))

    @classmethod
    def search_bytes(cls, n: int, k: int, heads: int, rows: int) -> int:
        # Candidates, and as many again twice while the best of them are told apart.
        kept = 3 * 8 * min(_GROUP_ROWS, rows) * min(n, 2 * (k + _BLOCK_ROWS))
        return min(threads.THREADS, heads * max(1, n // _KEYS_OF_A_PART)) * kept

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
        if digest is None:
            for _ in float32_blocks(keys):
                pass
            digest = keys_digest(keys)
        return cls(keys, digest)

    def __init__(self, keys: Keys, digest: str) -> None:
        super().__init__(keys, digest)
        self._bits, self._layout = scan.bits(keys), scan.layout(keys)

    def extended(self, keys: Keys, queries: npt.NDArray[Any] | None = None, *, digest: str) -> Self:
        """It holds nothing that could be taken over."""
        check_more(self.keys, keys)
        return type(self)(keys, digest)

    @classmethod
    def search_heads(cls, heads: Sequence[VectorIndex], queries: npt.NDArray[Any], k: int) -> Hits:
        """As `VectorIndex.search_heads`; where threads would idle, a head's keys are read in parts."""
        check_heads(heads, queries)
        parts = threads.THREADS // max(1, len(heads))
        parts = min(parts, min((len(head) for head in heads), default=0) // _KEYS_OF_A_PART)
        if parts < 2:
            return super().search_heads(heads, queries, k)
        bounds = [[len(head) * part // parts for part in range(parts + 1)] for head in heads]
        own = [
            cls(head.keys[bounds[at][part] : bounds[at][part + 1]], head.digest)
            for part in range(parts)
            for at, head in enumerate(heads)
        ]
        found = super().search_heads(own, np.concatenate([queries] * parts), k)
        shape = (parts, len(heads), *found.ids.shape[1:])
        first = np.array([ends[:-1] for ends in bounds]).T[:, :, None, None]
        counts = (found.ids >= 0).sum(axis=-1).reshape(shape[:-1])
        return joined_hits(found.ids.reshape(shape) + first, found.scores.reshape(shape), counts)

    def _search(self, queries: Float32, k: int) -> Hits:
        hits = Hits.empty(len(queries), k)
        for first in range(0, len(queries), _GROUP_ROWS):
            rows = slice(first, first + _GROUP_ROWS)
            hits.ids[rows], hits.scores[rows] = _unpack(self._best(queries[rows], k))
        return hits

    def _best(self, queries: Float32, k: int) -> Candidates:
        """The `k` best candidates `[G, k]` in order; 1 <= k <= N."""
        # Room for k candidates and as many newcomers again: each partition is paid for by what it drops.
        capacity = min(len(self), 2 * (k + _BLOCK_ROWS))
        kept = np.zeros((len(queries), capacity), np.uint64)
        counts = np.zeros(len(queries), np.int64)
        floor = np.full(len(queries), -np.inf, np.float32)
        for first in range(0, len(self), _BLOCK_ROWS):
            block = self._bits[first : first + _BLOCK_ROWS]
            if counts.max() + len(block) > capacity:
                kept[:, :k] = _largest(kept[:, : counts.max()], k)
                kept[:, k:] = 0
                floor = _unpack(kept[:, :k].min(axis=1))[1]
                counts[:] = k
            if not _scan(block, self._layout, queries, first, floor, kept, counts):
                raise InvalidIndexInput(NOT_FINITE)
        best = _largest(kept[:, : counts.max()], k)
        best.sort(axis=1)
        return best[:, ::-1]

    def save(self, path: StrPath) -> None:
        files.save(path, files.identity(self.name, self.keys, self.digest))

    @classmethod
    def load(cls, path: StrPath, keys: Keys, *, digest: str | None = None) -> Self:
        index = cls(keys, keys_digest(keys) if digest is None else digest)
        files.load(path, files.identity(cls.name, keys, index.digest))
        return index

    @property
    def nbytes(self) -> int:
        return 0


def _unpack(candidates: Candidates) -> tuple[npt.NDArray[np.int64], Float32]:
    """Ids and scores of candidates."""
    ids = (~candidates & np.uint64(0xFFFFFFFF)).astype(np.int64)
    ordered = (candidates >> np.uint64(32)).astype(np.uint32)
    bits = np.where(ordered & np.uint32(0x80000000), ordered ^ np.uint32(0x80000000), ~ordered)
    return ids, bits.view(np.float32)


def _largest(candidates: Candidates, k: int) -> Candidates:
    smaller = candidates.shape[1] - k
    return candidates if smaller == 0 else np.partition(candidates, smaller, axis=1)[:, smaller:]


def joined_hits(ids: npt.NDArray[np.int64], scores: Float32, counts: npt.NDArray[np.int64]) -> Hits:
    """P parts of each head's keys, `[P, H, R, k]` of which `counts [P, H, R]` are there, as one search."""
    if len(ids) == 1:
        return Hits(ids[0], scores[0])
    hits = Hits(np.full(ids.shape[1:], -1), np.full(ids.shape[1:], -np.inf, np.float32))
    join(ids, scores, counts, hits.ids, hits.scores)
    return hits


@njit(nogil=True, cache=True)
def _scan(
    bits: Any, layout: int, queries: Any, first_id: int, threshold: Any, kept: Any, counts: Any
) -> bool:
    """`_keep_best` of the inner products of `queries [G, D]` with a block of rows."""
    scores = np.empty((len(queries), len(bits)), np.float32)
    scan.score_rows(bits, layout, queries, scores)
    return _keep_best(scores, first_id, threshold, kept, counts)


@njit(nogil=True, cache=True, fastmath=_REASSOCIATE)
def _survey(scores: Any, threshold: Any) -> Any:
    """How many of the scores exceed `threshold`, and whether all are finite; one vectorised pass."""
    above, poison = np.int32(0), np.float32(0)
    for j in range(len(scores)):
        above += np.int32(scores[j] > threshold)
        poison += scores[j] * np.float32(0)  # NaN as soon as one score is NaN or infinite
    return above, poison == 0


@njit(nogil=True, cache=True)
def _keep_best(scores: Any, first_id: int, threshold: Any, kept: Any, counts: Any) -> bool:
    """Appends to `kept [G, capacity]` uint64, row by row at `counts [G]` int64, the scores above `threshold
    [G]`.

    `scores [G, n]` float32 belong to the ids from `first_id`. False when a score is not finite.
    """
    for g in range(len(scores)):
        for start in range(0, scores.shape[1], _RUN):
            run = scores[g, start : start + _RUN]
            above, finite = _survey(run, threshold[g])
            if not finite:
                return False
            if above == 0:
                continue
            for j in range(len(run)):
                # Ids ascend from block to block: a score equal to the threshold loses to the id that set it.
                if run[j] > threshold[g]:
                    kept[g, counts[g]] = scan.candidate(run[j], first_id + start + j)
                    counts[g] += 1
    return True
