"""Compressed scans: every key's code is scored, and the best r·k keys are scored again exactly.

Own kernels for int8 and int4 codes with one scale a key; Faiss's for product quantisation to 4 bits (PQ fast
scan, André et al. 2015) and for RaBitQ (Gao and Long 2024), a bit a channel.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from benchmarks.candidates.interleaved_dots import GROUP, LANES, collect

Float32 = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

_SAMPLED = 2048  # scores from which the floor of a search is guessed
_TRAINING = 65_536  # keys that train a code book


class Scan(ABC):
    """Codes of `keys [N, D]`. bytes: of one key's code."""

    name: str
    bytes: float

    @abstractmethod
    def candidates(self, queries: Float32, count: int) -> Ids:
        """The `count` keys of the best estimated scores for each of `queries [G, D]`, in no order."""


def search(scan: Scan, keys: Float32, queries: Float32, k: int, rerank: float) -> Ids:
    """The exact best `k` `[G, k]` of the `rerank * k` candidates of a scan; at `rerank` 1, its own best."""
    ids = scan.candidates(queries, min(round(rerank * k), len(keys)))
    if rerank == 1:
        return ids
    scores = np.empty(ids.shape, np.float32)
    _score_ids(keys, queries, ids, scores)
    best = np.argpartition(scores, ids.shape[1] - k, axis=1)[:, -k:]
    return np.take_along_axis(ids, best, 1)


class IntegerScan(Scan):
    """A code of 8 or 4 bits for each channel, a float32 scale for each key; queries are rounded to 8 bits."""

    def __init__(self, keys: Float32, bits: int) -> None:
        length, dim = keys.shape
        self.name, self.bytes = f"int{bits}", dim * bits / 8 + 4
        self.length, self._bits = length, bits
        steps = 2 ** (bits - 1) - 1
        blocks = -(-length // LANES)
        scales = np.zeros(blocks * LANES, np.float32)
        scales[:length] = np.abs(keys).max(axis=1) / steps
        codes = np.full((blocks * LANES, dim), steps + 1, np.uint8)
        for first in range(0, length, _TRAINING):
            part = slice(first, min(first + _TRAINING, length))
            whole = np.rint(keys[part] / np.maximum(scales[part, None], np.finfo(np.float32).tiny))
            codes[part] = whole + (steps + 1)
        if bits == 4:
            pairs = codes.reshape(len(codes), dim // 8, 2, 4)
            codes = (pairs[:, :, 0] | (pairs[:, :, 1] << np.uint8(4))).reshape(len(codes), dim // 2)
        by_block = codes.reshape(blocks, LANES, -1, 4).transpose(0, 2, 1, 3)
        self._codes = np.ascontiguousarray(by_block)
        self._scales = scales.reshape(blocks, LANES)

    def candidates(self, queries: Float32, count: int) -> Ids:
        return np.concatenate(
            [self._of_group(queries[first : first + GROUP], count) for first in range(0, len(queries), GROUP)]
        )

    def _of_group(self, queries: Float32, count: int) -> Ids:
        unit = np.maximum(np.abs(queries).max(axis=1, keepdims=True), np.finfo(np.float32).tiny) / 127
        rounded = np.zeros((GROUP, queries.shape[1]), np.int8)
        rounded[: len(queries)] = np.rint(queries / unit)
        share = min(1.0, 1.3 * count / self.length + 16 / _SAMPLED)
        while True:
            floor = self._floor(rounded, share)
            capacity = min(self.length, int(2.5 * share * self.length) + LANES)
            ids, scores = np.empty((GROUP, capacity), np.int32), np.empty((GROUP, capacity), np.float32)
            found = np.zeros(GROUP, np.int64)
            collect(self._codes, self._scales, self.length, rounded, self._bits, floor, ids, scores, found)
            own = found[: len(queries)]
            if own.min() >= count and (own.max() < capacity or share == 1):
                break
            share = min(1.0, 2 * share)
        best = np.empty((len(queries), count), np.int64)
        for g, above in enumerate(own):
            least = np.partition(scores[g, :above], above - count)[above - count]
            best[g] = ids[g, :above][scores[g, :above] >= least][:count]  # in the order of the keys
        return best

    def _floor(self, rounded: npt.NDArray[np.int8], share: float) -> Float32:
        """Scores that about `share` of all keys exceed, by a sample of the blocks."""
        if share >= 1:
            return np.full(GROUP, -np.inf, np.float32)
        step = max(1, len(self._codes) * LANES // _SAMPLED)
        codes = np.ascontiguousarray(self._codes[::step])
        scales, size = np.ascontiguousarray(self._scales[::step]), len(codes) * LANES
        scores, ids = np.empty((GROUP, size), np.float32), np.empty((GROUP, size), np.int32)
        everything, found = np.full(GROUP, -np.inf, np.float32), np.zeros(GROUP, np.int64)
        collect(codes, scales, size, rounded, self._bits, everything, ids, scores, found)
        rank = int((1 - share) * scores.shape[1])
        floor: Float32 = np.partition(scores, rank, axis=1)[:, rank].copy()
        return floor


class PqScan(Scan):
    """Faiss's fast scan of 4-bit product codes, `size` bytes a key."""

    def __init__(self, keys: Float32, size: int) -> None:
        import faiss

        self.name, self.bytes = f"PQ {size} B", size
        faiss.omp_set_num_threads(1)
        self._index = faiss.IndexPQFastScan(keys.shape[1], 2 * size, 4, faiss.METRIC_INNER_PRODUCT)
        self._index.train(_sample(keys))
        self._index.add(keys)

    def candidates(self, queries: Float32, count: int) -> Ids:
        ids: Ids = self._index.search(queries, count)[1]
        return ids


class RabitqScan(Scan):
    """Faiss's RaBitQ fast scan: a bit for each randomly rotated channel, and two numbers a key."""

    def __init__(self, keys: Float32) -> None:
        import faiss

        dim = keys.shape[1]
        faiss.omp_set_num_threads(1)
        codes = faiss.IndexRaBitQFastScan(dim, faiss.METRIC_INNER_PRODUCT)
        self._index = faiss.IndexPreTransform(faiss.RandomRotationMatrix(dim, dim), codes)
        self._index.train(_sample(keys))
        self._index.add(keys)
        self.name, self.bytes = "RaBitQ", dim / 8 + 8  # bits, and two float32 numbers

    def candidates(self, queries: Float32, count: int) -> Ids:
        ids: Ids = self._index.search(queries, count)[1]
        return ids


def _sample(keys: Float32) -> Float32:
    return np.ascontiguousarray(keys[:: max(1, len(keys) // _TRAINING)])


@njit(nogil=True, cache=True, fastmath={"reassoc", "contract", "nsz"})
def _score_ids(keys: Any, queries: Any, ids: Any, scores: Any) -> None:
    for g in range(len(ids)):
        for j in range(ids.shape[1]):
            total, row = np.float32(0), keys[ids[g, j]]
            for d in range(keys.shape[1]):
                total += row[d] * queries[g, d]
            scores[g, j] = total
