"""Sorted keys: an exact search that reads the longest keys first, and stops where no shorter one can win.

An inner product is at most the product of the two lengths (Cauchy-Schwarz).
"""

from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from offload_decode.common.errors import InvalidIndexInput
from offload_decode.common.rows import encodings, threads
from offload_decode.common.rows.arrays import Float32, Keys, check_more, float32_blocks, keys_digest
from offload_decode.indexes import files
from offload_decode.indexes.base import Costs, Hits, StrPath, VectorIndex, check_recall_options

BLOCK = 1024


class SortedKeys(VectorIndex):
    """Holds the lengths of the keys and their order; ties go to the longer key."""

    name: ClassVar[str] = "sorted-keys"
    exact_scores: ClassVar[bool] = True
    exhaustive: ClassVar[bool] = True

    def __init__(self, keys: Keys, digest: str):
        super().__init__(keys, digest)
        # `float32_blocks` refuses keys that are not finite.
        lengths = [np.linalg.norm(block, axis=1) for _, block in float32_blocks(self.keys)]
        held = np.concatenate([np.zeros(0, np.float32), *lengths])
        self.order = np.argsort(-held, kind="stable")
        self.lengths = held[self.order]

    @classmethod
    def costs(cls, n: int, dim: int, dtype: np.dtype[Any], k: int, rows: int = 1) -> Costs:
        """What is read is the most that it can be: all keys, and what is held of them."""
        held = n * (8 + 4)
        return Costs(memory=held, file=0, read=held + n * encodings.row_size(dim, dtype))

    @classmethod
    def search_bytes(cls, n: int, k: int, heads: int, rows: int) -> int:
        return min(threads.THREADS, heads) * rows * (min(n, k) + min(n, BLOCK)) * (8 + 4) * 2

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
        check_recall_options(target_recall, k)
        return cls(keys, keys_digest(keys) if digest is None else digest)

    def extended(self, keys: Keys, queries: npt.NDArray[Any] | None = None, *, digest: str) -> Self:
        check_more(self.keys, keys)
        return type(self)(keys, digest)

    def _search(self, queries: Float32, k: int) -> Hits:
        best = Hits.empty(len(queries), 0)
        reach = np.linalg.norm(queries, axis=1)
        for first in range(0, len(self), BLOCK):
            full = best.ids.shape[1] == k
            # A little more than the bound, for rounding.
            if full and (reach * self.lengths[first] * 1.0001 < best.scores[:, -1]).all():
                break
            block = self.order[first : first + BLOCK]
            scores = queries @ np.asarray(encodings.decode(self.keys[block]), np.float32).T
            if not np.isfinite(scores).all():
                raise InvalidIndexInput(
                    "An inner product overflows float32; the store must be prefilled again."
                )
            best = _best(
                np.hstack([best.ids, np.broadcast_to(block, scores.shape)]),
                np.hstack([best.scores, scores]),
                k,
            )
        return best

    def save(self, path: StrPath) -> None:
        files.save(path, files.identity(self.name, self.keys, self.digest))

    @classmethod
    def load(cls, path: StrPath, keys: Keys, *, digest: str | None = None) -> Self:
        expected = keys_digest(keys) if digest is None else digest
        files.load(path, files.identity(cls.name, keys, expected))
        return cls(keys, expected)

    @property
    def nbytes(self) -> int:
        return self.order.nbytes + self.lengths.nbytes


def _best(ids: npt.NDArray[np.int64], scores: Float32, k: int) -> Hits:
    """The k largest scores of each row, in order."""
    places = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return Hits(np.take_along_axis(ids, places, axis=1), np.take_along_axis(scores, places, axis=1))
