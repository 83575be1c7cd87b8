"""Stored rows on a device: copied through pinned staging on a separate stream, and kept in an LRU cache."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba import njit
from torch import Tensor

from offload_decode.attention.rows import Rows, gather_rows, run
from offload_decode.attention.transfers import Staging, to_device
from offload_decode.common.errors import ConfigError
from offload_decode.types import StepStats

_FREE = -1


class HotRows:
    """The host-side bookkeeping of a least-recently-used cache of `places` rows, each known by a number ≥ 0.

    A table of open addressing (Knuth, The Art of Computer Programming, vol. 3, §6.4, algorithm R) maps rows
    to places; a ring orders the places by their last use.
    """

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
        """Places of different rows `[n]`, n at most `places`, and which are new, in place of others."""
        assert len(rows) <= self.places, "rows of one call keep their places"
        places, new = np.empty(len(rows), np.int64), np.empty(len(rows), np.bool_)
        _take(rows, self._owner, self._table, self._older, self._newer, places, new)
        return places, new


@njit(nogil=True, cache=True)
def _take(rows: Any, owner: Any, table: Any, older: Any, newer: Any, places: Any, new: Any) -> None:
    end = len(owner)
    for j in range(len(rows)):  # hits first: none of them may be evicted for the others
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


Int64 = npt.NDArray[np.int64]


class DeviceRows:
    """Copies rows to a device as they are stored, and decodes them to floats there.

    `cache_bytes` of the device hold rows of `row_bytes` or less each, the least recently used of a KV head
    evicted; 0 is no cache. Rows, not pages: of 16 neighbouring tokens the queries of a step chose 1.2 on
    average in real text, so that a cache of pages moved more than none.
    """

    def __init__(self, device: torch.device, cache_bytes: int = 0, row_bytes: int = 1, heads: int = 1):
        self.device = device
        self._hot: list[HotRows] = []
        if cache_bytes:
            # A share for each KV head, so that threads look up the rows of several heads at once.
            share = cache_bytes // (heads * row_bytes)
            if share == 0:
                raise ConfigError(
                    f"a device cache of {cache_bytes} bytes holds no row of {row_bytes} bytes for each of "
                    f"{heads} KV heads: give more, or none"
                )
            self._hot = [HotRows(share) for _ in range(heads)]
            self._kept = torch.empty(heads * share, row_bytes, dtype=torch.uint8, device=device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._staging = [Staging(pinned=self._stream is not None) for _ in range(2)]

    def fetch(
        self,
        part: int,
        stored: Sequence[Rows],
        tokens: Sequence[Int64],
        stats: StepStats,
        staged: bool = False,
    ) -> Tensor:
        """The rows `tokens[h]` (different ones) of every KV head's stored rows, one head behind the other:
        floats `[n, D]`.

        `part` tells what rows these are, such as the values of a layer: a number of its own for each.
        `staged`: plain rows stay in pinned memory, where the device reads them itself; `read` is to be called
        when it was told to, before a third fetch.
        """
        if staged:
            return self._gathered(stored, tokens, stats)[0].view(stored[0].raw.dtype)
        counts = [len(own) for own in tokens]
        if any(count > hot.places for count, hot in zip(counts, self._hot, strict=False)):
            stats.cache_misses += sum(counts)
            raw = self._copied(stored, tokens, stats)
        elif self._hot:
            raw = self._kept_rows(part, stored, tokens, stats)
        else:
            raw = self._copied(stored, tokens, stats)
        rows = raw if stored[0].encoded else raw.view(stored[0].raw.dtype)
        return stored[0].floats(rows)

    def read(self) -> None:
        """Record that the device's current stream reads the staged rows."""
        if self._stream is not None:
            done = torch.cuda.current_stream(self.device).record_event()
            for staging in self._staging:
                staging.sent = done

    def _gathered(
        self, stored: Sequence[Rows], tokens: Sequence[Int64], stats: StepStats
    ) -> tuple[Tensor, Staging]:
        """The rows' own bytes `[n, row_bytes]` in pinned memory, of two the one used earlier."""
        self._staging.reverse()
        staging = self._staging[-1]
        rows = staging.room(sum(len(own) for own in tokens), stored[0].row_bytes)
        gather_rows(stored, tokens, rows)
        stats.bytes_moved += rows.numel()
        stats.bus_bytes += rows.numel() if self._stream is not None else 0
        return rows, staging

    def _kept_rows(
        self, part: int, stored: Sequence[Rows], tokens: Sequence[Int64], stats: StepStats
    ) -> Tensor:
        """The rows' own bytes on the device, `[n, row_bytes]`, after what was missing there came."""
        taken: dict[int, tuple[Int64, npt.NDArray[np.bool_]]] = {}

        def take(head: int, _: slice) -> None:
            taken[head] = self._hot[head].take(part * len(stored[head]) + tokens[head])

        try:
            run(take, len(stored), 1)
            new = [taken[head][1] for head in range(len(stored))]
            missing = [own[fresh] for own, fresh in zip(tokens, new, strict=True)]
            held = np.concatenate([taken[h][0] + h * hot.places for h, hot in enumerate(self._hot)])
            if absent := sum(map(len, missing)):
                raw = self._copied(stored, missing, stats)
                fresh = to_device(torch.from_numpy(held[np.concatenate(new)]), self.device)
                self._kept[:, : raw.shape[1]].index_copy_(0, fresh, raw)
        except BaseException:
            self._hot = [HotRows(hot.places) for hot in self._hot]  # they name rows never copied
            raise
        stats.cache_misses += absent
        stats.cache_hits += len(held) - absent
        places = to_device(torch.from_numpy(held), self.device)
        return self._kept[:, : stored[0].row_bytes].index_select(0, places)

    def _copied(self, stored: Sequence[Rows], tokens: Sequence[Int64], stats: StepStats) -> Tensor:
        """The rows' own bytes on the device, `[n, row_bytes]`."""
        rows, staging = self._gathered(stored, tokens, stats)
        if self._stream is None:
            return rows.clone()
        with torch.cuda.stream(self._stream):
            raw = rows.to(self.device, non_blocking=True)
            staging.sent = self._stream.record_event()
        current = torch.cuda.current_stream(self.device)
        current.wait_event(staging.sent)
        raw.record_stream(current)  # its memory is not given to the next copy before this stream is done
        return raw
