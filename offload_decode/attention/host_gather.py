"""Gather stored rows for a device on the host: the different tokens that queries name, and their rows in one
block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba import njit
from torch import Tensor

from offload_decode.attention.rows import Rows, run

Int64 = npt.NDArray[np.int64]


def unite(ids: Tensor, n_tokens: int) -> tuple[list[Int64], Tensor]:
    """The different tokens that the rows of each KV head name, ascending, and their places among those of all
    heads, one head behind the other.

    `ids [Hkv, R, k]` int64 on a CPU, -1 where there is none. The places have the shape of `ids`, and -1 where
    these have it.
    """
    named = ids.contiguous().numpy()
    heads, rows, k = named.shape
    union = np.empty((heads, min(rows * k, n_tokens)), np.int64)
    places, counts = np.empty_like(named), np.zeros(heads, np.int64)

    def collect(head: int, _: slice) -> None:
        counts[head] = _unite(named[head], n_tokens, union[head], places[head])

    run(collect, heads, 1)
    if (counts < 0).any():
        raise IndexError(f"an id is not of the {n_tokens:,} rows that there are")
    before = (counts.cumsum() - counts)[:, None, None]
    places = np.where(places < 0, -1, places + before)
    return [own[:count] for own, count in zip(union, counts.tolist(), strict=True)], torch.from_numpy(places)


def gather_rows(stored: Sequence[Rows], tokens: Sequence[Int64], out: Tensor) -> None:
    """The rows `tokens[h]` of every KV head's stored rows, head by head, to `out [n, row_bytes]` uint8."""
    target: npt.NDArray[Any] = out.numpy().view(stored[0].bits.dtype)
    ends = np.cumsum([len(own) for own in tokens])

    def copy(head: int, part: slice) -> None:
        own = tokens[head][part]
        first = ends[head] - len(tokens[head]) + part.start
        _gather(stored[head].bits, own, target[first : first + len(own)])

    run(copy, len(tokens), max(map(len, tokens), default=0))


@njit(nogil=True, cache=True)
def _unite(ids: Any, n_tokens: int, union: Any, places: Any) -> int:
    """A bit a token, and how many bits are set before each word: so a token's place is found without a sort.
    Returns how many there are, -1 for an id that is out of range.
    """
    words = np.zeros(n_tokens // 64 + 1, np.uint64)
    for r in range(len(ids)):
        for j in range(ids.shape[1]):
            if ids[r, j] >= n_tokens:
                return -1
            if ids[r, j] >= 0:
                words[ids[r, j] >> 6] |= np.uint64(1) << np.uint64(ids[r, j] & 63)
    before = np.empty(len(words), np.int64)
    count = 0
    for word in range(len(words)):
        before[word] = count
        rest = words[word]
        while rest:
            lowest = rest & (~rest + np.uint64(1))
            union[count] = word * 64 + _ones(lowest - np.uint64(1))
            count += 1
            rest ^= lowest
    for r in range(len(ids)):
        for j in range(ids.shape[1]):
            token = ids[r, j]
            if token < 0:
                places[r, j] = -1
            else:
                lower = (np.uint64(1) << np.uint64(token & 63)) - np.uint64(1)
                places[r, j] = before[token >> 6] + _ones(words[token >> 6] & lower)
    return count


@njit(nogil=True, cache=True)
def _ones(word: Any) -> Any:
    """Set bits of a uint64 (Hacker's Delight, §5-1)."""
    word -= (word >> np.uint64(1)) & np.uint64(0x5555555555555555)
    word = (word & np.uint64(0x3333333333333333)) + ((word >> np.uint64(2)) & np.uint64(0x3333333333333333))
    word = (word + (word >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return np.int64((word * np.uint64(0x0101010101010101)) >> np.uint64(56))


@njit(nogil=True, cache=True)
def _gather(bits: Any, tokens: Any, out: Any) -> None:
    for j in range(len(tokens)):
        token = tokens[j]  # outside the loop, which becomes a copy of words; ascending, it needs no prefetch
        for d in range(out.shape[1]):
            out[j, d] = bits[token, d]
