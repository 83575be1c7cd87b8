"""Summaries: the keys of a cell in groups of about eight, by the mean of their keys and of their values.

What a search leaves out is estimated from them (docs/methods.md §2). They are read in place of 16 rows, and
take about 2 · (D + 4) / 8 + 4 bytes a key.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from offload_decode.common.rows import encodings
from offload_decode.common.rows.arrays import Float32, Keys
from offload_decode.indexes.clusters.cells import KEYS_PER_CELL, Cells, lloyd, nearest
from offload_decode.indexes.clusters.dot4 import BLOCK

KEYS = 8  # of a group, on average: smaller ones estimate better, and take more
_ITERATIONS = 1
_TOGETHER = 2048  # keys of a cell that are grouped among themselves: one of equal keys may hold any number
Bytes = npt.NDArray[np.uint8]
Int32 = npt.NDArray[np.int32]


class Summaries(NamedTuple):
    """G groups of the N keys of C cells; rows are the bytes of `int8-rows`.

    keys: `[G, 4 + D]`, each group's mean key less its cell's. values: `[G, 4 + Dv]`, its mean value. cells:
    `[C, 4 + Dv]`, the mean value of each cell. first: int32 `[C + 1]`, where a cell's groups begin. sizes:
    int32 `[G]`, keys of a group. labels: int32 `[N]`, the group of each key.
    """

    keys: Bytes
    values: Bytes
    cells: Bytes
    first: Int32
    sizes: Int32
    labels: Int32


def groups_of(n: int) -> int:
    """About how many groups `n` keys have: one of each cell is half full."""
    return n // KEYS + n // (2 * KEYS_PER_CELL) + 1


def members(cells: Cells, known: int = 0) -> Iterator[npt.NDArray[np.int32]]:
    """The ids of each cell's keys, from cell `known` on."""
    for start, stop in zip(cells.starts[known:-1] * BLOCK, cells.starts[known + 1 :] * BLOCK, strict=True):
        own = cells.ids[start:stop]
        yield own[own >= 0]


def summarize(cells: Cells, keys: Keys, values: Keys, known: int = 0) -> Summaries:
    """Of the cells of `keys [N, D]` behind the first `known`, which have the first of the keys, and the
    `values [N, Dv]` that belong to them; or `[N]` of encoded rows. Raises InvalidIndexInput for values that
    are not finite.
    """
    earlier = int(cells.counts[:known].sum(dtype=np.int64))
    labels = np.empty(len(keys) - earlier, np.int32)
    keyed, valued, celled, sizes = [], [], [], []
    first = np.zeros(len(cells.counts) - known + 1, np.int32)
    for cell, ids in enumerate(members(cells, known)):
        first[cell + 1], whole = first[cell], np.zeros((1, encodings.dim(values)), np.float32)
        for part in np.array_split(ids, -(-len(ids) // _TOGETHER)):
            own, value = encodings.decode(keys[part]), encodings.decode(values[part])
            named, groups = np.unique(_groups(own), return_inverse=True)
            labels[part - earlier] = first[cell + 1] + groups
            first[cell + 1] += len(named)
            belongs = (np.arange(len(named))[:, None] == groups).astype(np.float32)
            size = belongs.sum(axis=1, keepdims=True)
            keyed.append(_encoded(belongs @ own / size - cells.means[known + cell]))
            valued.append(_encoded(belongs @ value / size))
            sizes.append(size[:, 0].astype(np.int32))
            whole += value.sum(axis=0)
        celled.append(_encoded(whole / np.float32(len(ids))))
    parts = [np.concatenate(own) for own in (keyed, valued, celled)]
    return Summaries(parts[0], parts[1], parts[2], first, np.concatenate(sizes), labels)


def _encoded(rows: Float32) -> Bytes:
    return encodings.as_raw(encodings.encode(rows, encodings.INT8))


def _groups(rows: Float32) -> npt.NDArray[np.int64]:
    """Groups of a cell's keys, by Lloyd's algorithm. Half of the first centroids are evenly spaced, the
    others at even steps of the squared distance to these, so that kinds of keys that are rare get one too
    (k-means||, Bahmani et al. 2012, made deterministic).
    """
    count = -(-len(rows) // KEYS)
    if count == 1:
        return np.zeros(len(rows), np.int64)
    even = rows[np.linspace(0, len(rows) - 1, count - count // 2).astype(np.int64)]
    _, closeness = nearest(rows, even)
    distance = np.maximum(np.einsum("nd,nd->n", rows, rows) - 2 * closeness, 0).cumsum(dtype=np.float64)
    steps = (np.arange(count // 2) + 0.5) / (count // 2) * distance[-1]
    seeds = np.concatenate([even, rows[np.searchsorted(distance, steps).clip(max=len(rows) - 1)]])
    return nearest(rows, lloyd(rows, seeds, _ITERATIONS))[0]


def joined(one: Summaries, more: Summaries) -> Summaries:
    """As `cells.joined`."""
    after = np.int32(len(one.sizes))
    moved = more._replace(first=more.first[1:] + after, labels=more.labels + after)
    return Summaries(*(np.concatenate([own, later]) for own, later in zip(one, moved, strict=True)))


def check(summaries: Summaries, cells: Cells) -> bool:
    """True; raises RuntimeError unless they can be those of checked cells: finite, and of the same keys."""
    for rows in summaries[:3]:
        scales = np.ascontiguousarray(rows[:, : encodings.SCALE_BYTES]).view(np.float32)
        if not np.isfinite(scales).all():
            raise RuntimeError("its numbers are not finite")
    _, _, _, first, sizes, labels = summaries
    if first[0] != 0 or first[-1] != len(sizes) or (np.diff(first) < 1).any():
        raise RuntimeError("its groups do not begin where others end")
    if labels.min(initial=0) < 0 or labels.max(initial=-1) >= len(sizes):
        raise RuntimeError("it names groups that there are not")
    if (np.bincount(labels, minlength=len(sizes)) != sizes).any():
        raise RuntimeError("its groups do not have as many keys as they say")
    each, ids = np.arange(len(cells.counts)), cells.ids[cells.ids >= 0]
    if (np.repeat(each, np.diff(first))[labels[ids]] != np.repeat(each, cells.counts)).any():
        raise RuntimeError("its groups have keys of other cells")
    return True
