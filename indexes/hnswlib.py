"""The same graphs as `faiss-hnsw` by hnswlib, the reference implementation of their authors.

hnswlib keeps its own float32 copy of the keys, so 16-bit keys take twice their size again; `nbytes` says so.
"""

import errno
import os
import threading
from math import log
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from numba import njit

from offload_decode.common.rows.arrays import Float32, Keys, float32_blocks
from offload_decode.common.rows.encodings import row_size
from offload_decode.indexes.approximate import Sample, asked_for, rescored
from offload_decode.indexes.base import Costs, Hits
from offload_decode.indexes.faiss import CONSTRUCTION_EF, LINKS, UPPER, WALKED, GraphIndex
from offload_decode.indexes.registry import Library, hnswlib


class HnswlibIndex(GraphIndex):
    """The same graph, by hnswlib."""

    name: ClassVar[str] = "hnswlib"
    suffix: ClassVar[str] = ".hnsw"
    library: ClassVar[Library] = hnswlib

    @classmethod
    def costs(cls, n: int, dim: int, dtype: np.dtype[Any], k: int, rows: int = 1) -> Costs:
        held = round(n * (4 * dim + 8 * LINKS + 16 + (4 * LINKS + 4) * UPPER))
        exact = min(n, rows * asked_for(k, n)) * row_size(dim, dtype)
        return Costs(held, held, round(min(1.0, rows * WALKED) * n) * 4 * dim + exact)

    def __init__(self, keys: Keys, digest: str) -> None:
        super().__init__(keys, digest)
        self._one_ef = threading.Lock()  # hnswlib's ef belongs to the index, not to the search

    def _build_native(self, sample: Sample) -> Any:
        graph = hnswlib.Index(space="l2", dim=self.dim)
        graph.init_index(max_elements=max(1, len(self)), M=LINKS, ef_construction=CONSTRUCTION_EF)
        return self._linked(graph, 0)

    def _extend_native(self, earlier: Self, sample: Sample) -> Any:
        """The further keys are linked into the graph."""
        graph = _walked(earlier._native, "l2")
        graph.resize_index(max(1, len(self)))
        return self._linked(graph, len(earlier))

    def _linked(self, graph: Any, begin: int) -> Any:
        for first, block in float32_blocks(self.keys[begin:]):
            numbers = np.arange(begin + first, begin + first + len(block))
            # One thread: several link the keys in another order each time, and no build would equal another.
            graph.add_items(block, numbers, num_threads=1)
        return _walked(graph, "ip")

    def _search_native(self, queries: Float32, k: int, value: float) -> Hits:
        asked = asked_for(k, len(self))
        with self._one_ef:
            self._native.set_ef(max(int(value), asked))
            try:
                ids, _ = self._native.knn_query(queries, asked)
            except RuntimeError:  # a walk ended with fewer keys; the caller scans for these queries
                return Hits.empty(len(queries), k)
        return rescored(self.keys, queries, ids.astype(np.int64), k)

    def _write_native(self, file: str) -> None:
        self._native.save_index(file)
        if Path(file).stat().st_size != self._native.index_file_size():  # hnswlib itself does not look
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _read_native(self, file: str) -> Any:
        _check_file(file, len(self), self.dim, LINKS, CONSTRUCTION_EF)
        graph = hnswlib.Index(space="ip", dim=self.dim)
        graph.load_index(file)
        return graph

    @property
    def nbytes(self) -> int:
        return int(self._native.index_file_size())


def _walked(graph: Any, space: str) -> Any:
    """A copy that is walked by another metric: built by Euclidean distance, searched by inner product."""
    return hnswlib.Index(params=graph.__getstate__()[0] | {"space": space})


# What hnswlib trusts in a file that it loads: all of it. So every number is checked before.
#
# As `HierarchicalNSW::saveIndex` (hnswlib 0.8, hnswalg.h) writes it: a header; of each key its links on the
# lowest level, its floats and its label; then, key by key, the bytes of its links on higher levels and these.
# A list of links is a count, in 16 bits of 32, and room for as many links as there may be.

_HEADER = np.dtype(
    [
        *((name, "<u8") for name in ("first_level", "most", "count", "width", "label", "floats")),
        *(("levels", "<i4"), ("entry", "<u4"), ("links", "<u8"), ("links_below", "<u8")),
        *(("links_chosen", "<u8"), ("scale", "<f8"), ("construction_ef", "<u8")),  # by these keys are added
    ]
)


def _check_file(file: str, n: int, dim: int, links: int, construction_ef: int) -> None:
    """Raises RuntimeError unless `file` is a graph of n keys labelled 0 to n - 1, with at most `links` links
    a key and level (twice as many on the lowest), each to a key that is on that level; and unless keys that
    are added to it will be linked as those were, by `construction_ef` candidates.
    """
    header = np.fromfile(file, _HEADER, 1)
    if len(header) == 0:
        raise RuntimeError("it is too short")
    lowest = 4 * (2 * links + 1)
    width = lowest + 4 * dim + 8
    expected = {
        "first_level": 0,
        "most": max(1, n),
        "count": n,
        "width": width,
        "label": lowest + 4 * dim,
        "floats": lowest,
        "links": links,
        "links_below": 2 * links,
        "links_chosen": links,
        "construction_ef": construction_ef,
    }
    for name, value in expected.items():
        if header[name][0] != value:
            raise RuntimeError(f"its header says {name} {header[name][0]}, not {value}")
    if header["scale"][0] != 1 / log(links):
        raise RuntimeError("keys that are added to it would be on other levels")
    start, room = _HEADER.itemsize, links + 1
    size = os.path.getsize(file)
    if size < start + n * (width + 4) or size % 4:
        raise RuntimeError("it is too short")
    if n == 0:
        return
    words = np.memmap(file, np.uint32, "r", offset=start)
    below, above = words[: n * width // 4].reshape(n, -1), words[n * width // 4 :]
    if (below[:, -2] != np.arange(n)).any() or below[:, -1].any():
        raise RuntimeError("its labels are not those of the keys")
    level, first = np.empty(n, np.int32), np.empty(n, np.int64)
    highest, entry = int(header["levels"][0]), int(header["entry"][0])
    if not _find_levels(above, room, highest, level, first):
        raise RuntimeError("its levels are not those of its links")
    if entry >= n or level[entry] != highest:
        raise RuntimeError("it begins at a key that is not on its highest level")
    lists, there = below[:, : 2 * links + 1], np.arange(n)
    for at in range(highest + 1):
        if not _lists_hold(lists, level, at):
            raise RuntimeError("it links to a key that is not on the level of the link")
        there = there[level[there] > at]
        lists = above[first[there, None] + at * room + np.arange(room)]


@njit(nogil=True, cache=True)
def _find_levels(above: Any, room: int, highest: int, level: Any, first: Any) -> bool:
    """Each key's highest level and where its links above begin; whether they are all."""
    place = 0
    for key in range(len(level)):
        if place == len(above):
            return False
        lists, rest = divmod(above[place], 4 * room)
        place += 1
        if rest or lists > highest or place + lists * room > len(above):
            return False
        level[key], first[key] = lists, place
        place += lists * room
    return place == len(above)


@njit(nogil=True, cache=True)
def _lists_hold(lists: Any, level: Any, at: int) -> bool:
    """Whether each list of links names keys of that level, no more than it has room for."""
    for own in lists:
        if own[0] >= len(own):  # the other 16 bits of the count would mark the key as deleted
            return False
        for key in own[1 : own[0] + 1]:
            if key >= len(level) or level[key] < at:
                return False
    return True
