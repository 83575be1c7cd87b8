"""What hnswlib trusts in a file that it loads: all of it. So every number is checked before.

As `HierarchicalNSW::saveIndex` (hnswlib 0.8, hnswalg.h) writes it: a header; of each key its links on the
lowest level, its floats and its label; then, key by key, the bytes of its links on higher levels and these. A
list of links is a count, in 16 bits of 32, and room for as many links as there may be.
"""

from __future__ import annotations

import os
from math import log
from typing import Any

import numpy as np
from numba import njit

_HEADER = np.dtype(
    [
        ("first_level", "<u8"),
        ("most", "<u8"),
        ("count", "<u8"),
        ("width", "<u8"),
        ("label", "<u8"),
        ("floats", "<u8"),
        ("levels", "<i4"),
        ("entry", "<u4"),
        ("links", "<u8"),
        ("links_below", "<u8"),
        ("links_chosen", "<u8"),  # by this and what follows keys are added
        ("scale", "<f8"),
        ("construction_ef", "<u8"),
    ]
)


def check(file: str, n: int, dim: int, links: int, construction_ef: int) -> None:
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
    start = _HEADER.itemsize
    if os.path.getsize(file) < start + n * (width + 4):
        raise RuntimeError("it is too short")
    if n == 0:
        return
    raw = np.memmap(file, np.uint8, "r", offset=start)
    below = raw[: n * width].reshape(n, width)
    if (below[:, -8:].copy().view(np.uint64)[:, 0] != np.arange(n, dtype=np.uint64)).any():
        raise RuntimeError("its labels are not those of the keys")
    level, first = np.empty(n, np.int32), np.empty(n, np.int64)
    above = raw[n * width :]
    if not _find_levels(above, 4 * (links + 1), int(header["levels"][0]), level, first):
        raise RuntimeError("its levels are not those of its links")
    entry = int(header["entry"][0])
    if entry >= n or level[entry] != header["levels"][0]:
        raise RuntimeError("it begins at a key that is not on its highest level")
    if not _links_hold(below, above, links, level, first):
        raise RuntimeError("it links to a key that is not on the level of the link")


@njit(nogil=True, cache=True)
def _word(raw: Any, place: int) -> Any:
    word = np.int64(0)
    for byte in range(4):
        word |= np.int64(raw[place + byte]) << (8 * byte)
    return word


@njit(nogil=True, cache=True)
def _find_levels(above: Any, room: int, highest: int, level: Any, first: Any) -> bool:
    """The highest level of each key, and where its links on higher levels begin; whether they are all."""
    place = 0
    for key in range(len(level)):
        if place + 4 > len(above):
            return False
        size = _word(above, place)
        place += 4
        if size % room or size // room > highest or place + size > len(above):
            return False
        level[key], first[key] = size // room, place
        place += size
    return place == len(above)


@njit(nogil=True, cache=True)
def _links_hold(below: Any, above: Any, links: int, level: Any, first: Any) -> bool:
    room = 4 * (links + 1)
    for key in range(len(level)):
        if not _list_holds(below[key], 0, 2 * links, 0, level):
            return False
        for each in range(level[key]):
            if not _list_holds(above, first[key] + each * room, links, each + 1, level):
                return False
    return True


@njit(nogil=True, cache=True)
def _list_holds(raw: Any, start: int, room: int, at: int, level: Any) -> bool:
    count = _word(raw, start)  # the other 16 bits would mark the key as deleted
    if count > room:
        return False
    for link in range(count):
        key = _word(raw, start + 4 * (link + 1))
        if key >= len(level) or level[key] < at:
            return False
    return True
