"""Which rows a device keeps: the bookkeeping of a cache of equal places, the least recently used given up.

All of it lies on the host: a table of open addressing (Knuth, The Art of Computer Programming, vol. 3, §6.4,
algorithm R) from rows to places, and a list of the places in the order of their last use.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

_FREE = -1


class HotRows:
    """A cache with room for `places` rows, each known by a number ≥ 0."""

    def __init__(self, places: int):
        assert 0 < places < 2**30, "places are numbered in 32 bits"
        self.places = places
        self._owner = np.full(places, _FREE, np.int64)
        self._table = np.full(1 << (2 * places - 1).bit_length(), _FREE, np.int32)
        # A ring: the entry after the last place stands before the oldest and behind the newest.
        self._older = np.arange(-1, places, dtype=np.int32)
        self._newer = np.arange(1, places + 2, dtype=np.int32)
        self._older[0], self._newer[places] = places, 0

    def take(self, rows: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Places of different rows `[n]`, n at most `places`, and which of them are new there: what such a
        place held before is given up.
        """
        assert len(rows) <= self.places, "rows of one call keep their places"
        places, new = np.empty(len(rows), np.int64), np.empty(len(rows), np.bool_)
        _take(rows, self._owner, self._table, self._older, self._newer, places, new)
        return places, new


@njit(nogil=True, cache=True)
def _take(rows: Any, owner: Any, table: Any, older: Any, newer: Any, places: Any, new: Any) -> None:
    end = len(owner)
    for j in range(len(rows)):  # those that are there first: none of them may be given up for the others
        places[j] = table[_find(rows[j], owner, table)]
        new[j] = places[j] == _FREE
        if not new[j]:
            _use(places[j], older, newer, end)
    for j in range(len(rows)):
        if new[j]:
            oldest = newer[end]
            if owner[oldest] != _FREE:
                _forget(owner[oldest], owner, table)
            owner[oldest] = _FREE
            table[_find(rows[j], owner, table)] = oldest
            owner[oldest] = rows[j]
            places[j] = oldest
            _use(oldest, older, newer, end)


@njit(nogil=True, cache=True)
def _use(place: int, older: Any, newer: Any, end: int) -> None:
    """Moves a place to the newest end of the ring."""
    newer[older[place]], older[newer[place]] = newer[place], older[place]
    last = older[end]
    newer[last], older[place], newer[place], older[end] = place, last, end, place


@njit(nogil=True, cache=True)
def _home(row: int, table: Any) -> Any:
    mixed = np.uint64(row) * np.uint64(0x9E3779B97F4A7C15)  # Fibonacci hashing
    return np.int64((mixed >> np.uint64(32)) & np.uint64(len(table) - 1))


@njit(nogil=True, cache=True)
def _find(row: int, owner: Any, table: Any) -> Any:
    """Where the table holds a row, or would."""
    at = _home(row, table)
    while table[at] != _FREE and owner[table[at]] != row:
        at = (at + 1) & (len(table) - 1)
    return at


@njit(nogil=True, cache=True)
def _forget(row: int, owner: Any, table: Any) -> None:
    """Takes a row out of the table, and closes the gap."""
    mask = len(table) - 1
    gap = _find(row, owner, table)
    at = gap
    while True:
        at = (at + 1) & mask
        if table[at] == _FREE:
            break
        home = _home(owner[table[at]], table)
        if (at - home) & mask >= (at - gap) & mask:
            table[gap] = table[at]
            gap = at
    table[gap] = _FREE
