"""Stored rows on a device: copied there through pinned staging on a stream of their own; those used last stay
in a cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from offload_decode.attention.transfers import Staging, to_device
from offload_decode.errors import ConfigError
from offload_decode.kernels.host_gather import gather_rows
from offload_decode.kernels.parts import run
from offload_decode.kernels.rows import Rows
from offload_decode.kv.hot_rows import HotRows
from offload_decode.types import StepStats

Int64 = npt.NDArray[np.int64]


class DeviceRows:
    """Brings rows to a device as they are stored, and makes floats of them there.

    `cache_bytes` of the device hold rows of `row_bytes` or less each, the least recently used of a KV head
    given up; 0 is no cache. Rows, not pages: of 16 neighbouring tokens the queries of a step chose 1.2 on
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
            return self._gathered(self._next(), stored, tokens, stats).view(stored[0].raw.dtype)
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
        """What reads the rows that were staged was given to the device's current stream."""
        if self._stream is not None:
            done = torch.cuda.current_stream(self.device).record_event()
            for staging in self._staging:
                staging.sent = done

    def _next(self) -> Staging:
        self._staging.reverse()
        return self._staging[-1]

    def _gathered(
        self, staging: Staging, stored: Sequence[Rows], tokens: Sequence[Int64], stats: StepStats
    ) -> Tensor:
        """The rows' own bytes in pinned memory, `[n, row_bytes]`."""
        rows = staging.room(sum(len(own) for own in tokens), stored[0].row_bytes)
        gather_rows(stored, tokens, rows)
        stats.bytes_moved += rows.numel()
        stats.bus_bytes += rows.numel() if self._stream is not None else 0
        return rows

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
            places = np.concatenate([taken[h][0] + h * hot.places for h, hot in enumerate(self._hot)])
            absent = sum(map(len, missing))
            if absent:
                raw = self._copied(stored, missing, stats)
                self._kept[:, : raw.shape[1]].index_copy_(0, self._numbers(places[np.concatenate(new)]), raw)
        except BaseException:
            self._hot = [HotRows(hot.places) for hot in self._hot]  # they would name rows that never came
            raise
        stats.cache_misses += absent
        stats.cache_hits += len(places) - absent
        return self._kept[:, : stored[0].row_bytes].index_select(0, self._numbers(places))

    def _numbers(self, places: Int64) -> Tensor:
        return to_device(torch.from_numpy(places), self.device)

    def _copied(self, stored: Sequence[Rows], tokens: Sequence[Int64], stats: StepStats) -> Tensor:
        """The rows' own bytes on the device, `[n, row_bytes]`."""
        staging = self._next()
        rows = self._gathered(staging, stored, tokens, stats)
        if self._stream is None:
            return rows.clone()
        with torch.cuda.stream(self._stream):
            raw = rows.to(self.device, non_blocking=True)
            staging.sent = self._stream.record_event()
        current = torch.cuda.current_stream(self.device)
        current.wait_event(staging.sent)
        raw.record_stream(current)  # its memory is not given to the next copy before this stream is done
        return raw
