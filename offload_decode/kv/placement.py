"""Where attention to stored tokens is computed: host, device, or device from pinned memory, as measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch

from offload_decode.common.errors import ConfigError
from offload_decode.types import PageSelection, Selection

HOST, DEVICE, PINNED = "host", "device", "pinned"


@dataclass(frozen=True)
class Request:
    """Requests that are measured once: what is selected, with scores or not; rows a KV head and tokens or
    pages a row, both rounded up to a power of two.
    """

    kind: str
    rows: int
    chosen: int
    scored: bool

    @classmethod
    def of(cls, rows: int, selection: Selection | PageSelection) -> Request:
        """The request of `rows` queries for a selection."""
        if isinstance(selection, PageSelection):
            return cls("pages", _round(rows), _round(selection.pages.shape[2]), False)
        if selection.ids is None:
            return cls("all", _round(rows), 0, False)
        return cls("tokens", _round(rows), _round(selection.ids.shape[2]), selection.scores is not None)


class Placement:
    """`host`, `device`, `pinned`, or `auto`: the fastest for each kind of request, by timing its first;
    `host` where the device is the host.
    """

    def __init__(self, attend: str, device: torch.device):
        if attend not in ("auto", HOST, DEVICE, PINNED):
            raise ConfigError(f"attend={attend} is unknown; choose one of: auto, {HOST}, {DEVICE}, {PINNED}")
        # "auto" is measured.
        self.attend = HOST if attend == "auto" and device.type == "cpu" else attend
        self.device = device
        self.seconds: dict[Request, dict[str, float]] = {}

    def measure(self, request: Request, places: Sequence[str], attempt: Callable[[str], object]) -> None:
        """Times `attempt(place)`, which serves the request there: the fastest of three after one untimed."""
        seconds = {}
        for place in places:
            attempt(place)
            seconds[place] = min(self._timed(place, attempt) for _ in range(3))
        self.seconds[request] = seconds

    def best(self, request: Request) -> str:
        """Where a request that was measured is served fastest."""
        measured = self.seconds[request]
        return min(measured, key=measured.__getitem__)

    def report(self) -> dict[str, object]:
        """What was asked for, and every measurement in seconds, for people and JSON."""
        return {
            "attend": self.attend,
            "measured": [{**asdict(request), **own} for request, own in self.seconds.items()],
        }

    def _timed(self, place: str, attempt: Callable[[str], object]) -> float:
        wait = partial(torch.cuda.synchronize, self.device) if self.device.type == "cuda" else int
        wait()
        began = time.perf_counter()
        attempt(place)
        wait()
        return time.perf_counter() - began


def check_placement(attend: str, cache_bytes: int, device: torch.device) -> None:
    """Raises `ConfigError` for a placement that is unknown, or wants a device where there is none."""
    Placement(attend, device)
    if cache_bytes < 0:
        raise ConfigError(f"a device cache of {cache_bytes} bytes cannot be: give 0 for none")
    if device.type == "cpu" and (attend in (DEVICE, PINNED) or cache_bytes):
        asked = "a device cache" if cache_bytes else f"attend={attend}"
        raise ConfigError(f"{asked} needs a device beside the host: use device cuda, or leave it out")
    if attend in (HOST, PINNED) and cache_bytes:
        raise ConfigError(
            f"attend={attend} copies nothing that a device cache could keep: leave one of them out"
        )


def _round(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


# How a prefill uses a GPU and the disk: the job keeps to these numbers, and `plan` counts with them.

BLOCK_TOKENS = 1 << 15
"""Earlier tokens of a block: so many that merging it costs little beside attending."""
AHEAD = 2
"""Blocks in flight on a GPU: one is attended to while another is copied."""
RESERVE = 16
"""One part in so many of a GPU's memory stays free, for fragmentation of torch's pool."""
QUEUED = 4
"""Maximum queued writes, each at most the keys and values of a layer's chunk."""
