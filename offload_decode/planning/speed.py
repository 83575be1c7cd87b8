"""What this machine moves a second, measured on the spot in about a second by the functions that run: in a
layer of made-up keys and values, more than caches hold but no more than the request has.

The stages of a token take turns, as they do in a token: what one of them reads pushes out of the caches what
another one read before.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from offload_decode.attention.host_dense import attend_all
from offload_decode.attention.host_tokens import attend_tokens
from offload_decode.attention.pages import attend_pages, page_scores, top_pages
from offload_decode.attention.pages_reference import SCALE_PAGES, PageBounds
from offload_decode.attention.rows import Rows, numpy_view
from offload_decode.common.rows import encodings
from offload_decode.hf.compat import DTYPES
from offload_decode.hf.linear_bf16 import read_in_place
from offload_decode.indexes import registry
from offload_decode.indexes.files import aligned
from offload_decode.kv.page_bounds import bounds_bytes
from offload_decode.models.size_estimate import Outline
from offload_decode.planning.sizes import (
    Workload,
    active_weights_bytes,
    index_costs,
    page_bytes,
    pair_bytes,
    row_bytes,
)
from offload_decode.store.format import stored_types
from offload_decode.types import ModelShape

if TYPE_CHECKING:
    pass


# What one generated token moves, and the time that takes at measured bandwidths.

CALLS = 150
"""Calls of torch that a token makes in a layer, whatever they move: 130 to 200 were counted of a Llama."""


@dataclass(frozen=True)
class Traffic:
    """Bytes for each generated token. `weights`: read on the device. `pages`: bounds read there. `scanned`:
    what a search of the indexes reads in host memory. `gathered`: rows fetched from all over it, the most
    that the query heads of a group can want. `attended`: rows read one after another for dense layers.
    `bus`: what of these goes to a GPU; 0 without one. And `calls`, which are no bytes: those of torch.
    """

    weights: int
    pages: int
    scanned: int
    gathered: int
    attended: int
    bus: int
    calls: int

    @property
    def host(self) -> int:
        """Bytes of the store that are read."""
        return self.scanned + self.gathered + self.attended


class LayerTraffic(NamedTuple):
    """What one layer adds to the `Traffic` of those names."""

    pages: int = 0
    scanned: int = 0
    gathered: int = 0
    attended: int = 0


@dataclass(frozen=True)
class Speed:
    """Expected tokens a second, and the seconds of a token by what they are spent on."""

    tokens_per_second: float
    seconds: dict[str, float]

    @property
    def limit(self) -> str:
        """What takes longest."""
        return max(self.seconds, key=lambda name: self.seconds[name])


def traffic(outline: Outline, request: Workload, on_gpu: bool) -> Traffic:
    """For one conversation, one token at a time."""
    layers = [
        layer_traffic(outline.shape, outline.dtype, request, request.tokens, k)
        for k in request.budgets(outline.shape).values()
    ]
    whole = LayerTraffic(*(sum(parts) for parts in zip(*layers, strict=True)))
    return Traffic(
        weights=active_weights_bytes(outline, request.weights, on_gpu),
        bus=whole.gathered + whole.attended if on_gpu else 0,
        calls=CALLS * len(outline.shape.layers),
        **whole._asdict(),
    )


def layer_traffic(shape: ModelShape, dtype: str, request: Workload, n: int, k: int | None) -> LayerTraffic:
    """For a layer of `n` tokens of which each query row chooses `k`; None is all of them."""
    pair, (_, value) = pair_bytes(shape, request.kv, dtype), row_bytes(shape, request.kv, dtype)
    if k is None:
        return LayerTraffic(attended=shape.kv_heads * n * pair)
    if request.selector == "quest":
        pages = page_bytes(shape, n, request.page_size, request.metadata, 1)
        return LayerTraffic(pages=pages, gathered=shape.kv_heads * min(n, k) * pair)
    # A group shares Quest's pages, and here what is scanned. The scores of what is found are known already.
    searched = index_costs(request.index, shape, n, request.kv, dtype, k, shape.group).read
    return LayerTraffic(scanned=searched, gathered=shape.kv_heads * min(n, shape.group * k) * value)


def speed(moved: Traffic, measured: Bandwidths, from_disk: float = 0.0, disk: float | None = None) -> Speed:
    """The stages of a token follow one another. `from_disk`: bytes that memory does not hold, read at `disk`
    bytes a second.
    """
    stages = (
        ("model weights", moved.weights, measured.weights),
        ("page bounds", moved.pages, measured.pages),
        ("searching keys", moved.scanned, measured.search),
        ("chosen rows", moved.gathered, measured.rows),
        ("dense layers", moved.attended, measured.dense),
        ("bus", moved.bus, measured.bus),
        ("calls", moved.calls, measured.calls),
    )
    seconds = {name: size / rate for name, size, rate in stages if size and rate}
    if from_disk and disk:
        seconds["disk"] = from_disk / disk
    return Speed(1 / sum(seconds.values()), seconds)


COPIED = 1 << 27  # bytes: beyond the caches of a core
_DISK_BYTES = 64 << 20
_SECONDS = 0.1  # a measurement is repeated for so long, for each stage, and the median counts
_LEAST = 5  # times it is repeated at least
_STEPS = 4  # of other queries each, so that chosen rows are not in the caches
_PATTERN = 4096  # rows that are repeated


@dataclass(frozen=True)
class Bandwidths:
    """Bytes a second, as `planning.traffic` counts them; None for what the request does not do. `weights`: a
    model's weights in one token's forward pass, and `pages`: bounds of pages that are scored, on the device.
    `search`: what a search of the request's index reads. `rows`: chosen tokens or pages, attended to on the
    host. `dense`: keys and values attended to whole. `bus`: pinned memory to the GPU. And `calls`: how many
    of torch, that move next to nothing, are made in a second.
    """

    weights: float
    pages: float | None = None
    search: float | None = None
    rows: float | None = None
    dense: float | None = None
    bus: float | None = None
    calls: float | None = None


class _Stage(NamedTuple):
    """What moves so many bytes, or makes so many calls, and the device that is at it."""

    bytes: int
    work: Callable[[], object]
    device: torch.device | None = None


@lru_cache(maxsize=8)
def measure(
    shape: ModelShape, dtype: str, request: Workload, device: str, weights: int = COPIED
) -> Bandwidths:
    """Measured with keys of the model's shape, stored, searched and attended to as the request says.
    `weights`: bytes of those that a token reads.
    """
    budgets, on = set(request.budgets(shape).values()), torch.device(device)
    bus = bus_rate(on) if on.type == "cuda" else None
    with torch.inference_mode():
        layer = _Layer(shape, dtype, request, on)
        stages = {"weights": _weights(dtype, on, min(weights, COPIED)), "calls": _calls(on)}
        if None in budgets:
            stages["dense"] = layer.dense()
        if chosen := [k for k in budgets if k is not None]:
            k = min(max(chosen), layer.n)
            stages |= layer.pages(k) if request.selector == "quest" else layer.tokens(k)
        took = _in_turns(list(stages.values()))
    rates = {name: stages[name].bytes / seconds for name, seconds in zip(stages, took, strict=True)}
    return Bandwidths(bus=bus, **rates)


def _in_turns(stages: Sequence[_Stage]) -> list[float]:
    """How long each takes, in the median of many turns: the best of many is of what the caches kept, or of a
    moment when nobody else used the memory.
    """
    for stage in stages:
        _timed(stage)  # what is compiled at first is not counted
    turns, until = list[list[float]](), time.perf_counter() + _SECONDS * len(stages)
    while len(turns) < _LEAST or time.perf_counter() < until:
        turns.append([_timed(stage) for stage in stages])
    return [median(taken) for taken in zip(*turns, strict=True)]


class _Layer:
    """The keys and values of one layer: `n` rows in each KV head, and queries of a token `[Hkv, G, D]`, on
    the host; bounds of pages lie on the device.
    """

    def __init__(self, shape: ModelShape, dtype: str, request: Workload, device: torch.device):
        self.shape, self.dtype, self.request, self.device = shape, dtype, request, device
        pair = pair_bytes(shape, request.kv, dtype)
        self.n = max(1, min(request.tokens, COPIED // pair // shape.kv_heads))
        stored = stored_types(request.kv, dtype, shape)
        self.keys = self._heads(stored["keys"], shape.head_dim)
        self.values = self.keys if shape.latent else self._heads(stored["values"], shape.value_dim)
        queries = torch.randn(_STEPS, shape.kv_heads, shape.group, shape.head_dim, generator=_generator())
        self.queries = list(queries)

    def _heads(self, stored: str, dim: int) -> list[npt.NDArray[Any]]:
        count = self.shape.kv_heads * self.n
        some = torch.randn(min(count, _PATTERN), dim, generator=_generator())
        plain = numpy_view(some.to(DTYPES[self.dtype]))
        pattern = plain if stored == self.dtype else encodings.encode(plain, stored)
        times = -(-count // len(pattern))
        rows = aligned(np.broadcast_to(pattern, (times, *pattern.shape)))  # as a store's are
        return np.split(rows.reshape(-1, *pattern.shape[1:])[:count], self.shape.kv_heads)

    def tokens(self, k: int) -> dict[str, _Stage]:
        """The search of the request's index, and attention to the k tokens of each row that it finds."""
        kind = registry.get(self.request.index)
        built = [kind.made_up(keys, k) for keys in self.keys]
        n = len(built[0])
        queries = cycle([query.numpy() for query in self.queries])
        found = [kind.search_heads(built, query.numpy(), min(k, n)) for query in self.queries]
        ids = [torch.from_numpy(hits.ids) for hits in found]
        scores = [torch.from_numpy(hits.scores) if kind.exact_scores else None for hits in found]
        keys, values = self._rows()
        steps = cycle(zip(self.queries, ids, scores, strict=True))

        def attend() -> None:
            query, own, known = next(steps)
            attend_tokens(query, keys, values, own, known, 1.0)

        moved = layer_traffic(self.shape, self.dtype, self.request, n, min(k, n))
        return {
            "search": _Stage(moved.scanned, lambda: kind.search_heads(built, next(queries), min(k, n))),
            "rows": _Stage(moved.gathered, attend),
        }

    def pages(self, k: int) -> dict[str, _Stage]:
        """The bounds of all pages, scored, and attention to pages of k tokens."""
        size = min(self.request.page_size, self.n)
        count, wanted = max(1, self.n // size), max(1, k // size)
        bounds, taken = self._bounds()
        steps = cycle([query.unsqueeze(1) for query in self.queries])
        asking = cycle([query.unsqueeze(1).to(self.device) for query in self.queries])
        keys, values = self._rows()
        heads = self.shape.kv_heads
        drawn = torch.rand(_STEPS, heads, 1, count, generator=_generator()).argsort(dim=-1)[..., :wanted]
        limit = torch.full((heads,), min(wanted, count) * size)
        places = cycle(drawn)
        moved = layer_traffic(self.shape, self.dtype, self.request, self.n, int(limit[0])).gathered
        return {
            "pages": _Stage(taken, lambda: top_pages(page_scores(next(asking), bounds), wanted), self.device),
            "rows": _Stage(
                moved, lambda: attend_pages(next(steps), keys, values, next(places), size, limit, 1.0)
            ),
        }

    def _bounds(self) -> tuple[PageBounds, int]:
        """Bounds of as many pages as make `COPIED` of them, or as the request has, and their bytes."""
        shape, request = self.shape, self.request
        block = bounds_bytes(shape.kv_heads, SCALE_PAGES, shape.head_dim, request.metadata)
        pages = max(1, min(request.tokens // request.page_size, COPIED * SCALE_PAGES // block))
        some = torch.randint(1, 127, (shape.kv_heads, pages, shape.head_dim), generator=_generator())
        upper = some.to(torch.int8 if request.metadata == "int8" else torch.float16)
        scale = torch.ones(shape.kv_heads, -(-pages // SCALE_PAGES), shape.head_dim)
        bounds = PageBounds(-upper, upper, scale if request.metadata == "int8" else None)
        return bounds.to(self.device), bounds_bytes(shape.kv_heads, pages, shape.head_dim, request.metadata)

    def dense(self) -> _Stage:
        """Attention to all rows of every KV head."""
        keys, values = self._rows()
        queries = cycle(self.queries)
        moved = layer_traffic(self.shape, self.dtype, self.request, self.n, None)
        return _Stage(moved.attended, lambda: attend_all(next(queries), keys, values, 1.0))

    def _rows(self) -> tuple[list[Rows], list[Rows]]:
        return [Rows(own) for own in self.keys], [Rows(own) for own in self.values]


def measure_disk(folder: Path) -> float | None:
    """Bytes a second read from the disk of `folder`; None where that cannot be measured."""
    if not hasattr(os, "posix_fadvise") or not os.access(folder, os.W_OK):
        return None
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(os.urandom(1 << 20) * (_DISK_BYTES >> 20))
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            began = time.perf_counter()
            while file.read(1 << 20):
                pass
            return _DISK_BYTES / (time.perf_counter() - began)
    except OSError:  # a full disk: its speed is not what stands in the way
        return None


def _weights(dtype: str, device: torch.device, size: int) -> _Stage:
    width, kind = 2048, DTYPES[dtype]
    rows = max(1, size // width // kind.itemsize)
    layer = torch.nn.Linear(width, rows, bias=False, device="meta", dtype=kind).to_empty(device=device)
    read_in_place(layer)
    layer.weight.zero_()
    row = torch.zeros(1, width, dtype=kind, device=device)
    return _Stage(layer.weight.nbytes, lambda: layer(row), device)


def _calls(device: torch.device) -> _Stage:
    """Of a few kinds on a token's states, as many as a layer makes."""
    states = torch.zeros(32, 64, device=device)

    def work() -> None:
        for _ in range(CALLS // 5):
            torch.cat([(states * states).to(torch.bfloat16), states.transpose(0, 1).reshape(32, 64)])

    return _Stage(CALLS, work, device)


def bus_rate(device: torch.device) -> float:
    """Bytes a second from pinned memory to a card."""
    host = torch.empty(COPIED, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(COPIED, dtype=torch.uint8, device=device)
    return COPIED / seconds(lambda: target.copy_(host, non_blocking=True), device)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def seconds(move: Callable[[], object], device: torch.device | None = None) -> float:
    """How long a call takes that takes no turns with others."""
    return _in_turns([_Stage(0, move, device)])[0]


def _timed(stage: _Stage) -> float:
    """Seconds of a call, on a card with all that it gave it to do."""
    began = time.perf_counter()
    stage.work()
    if stage.device is not None and stage.device.type == "cuda":
        torch.cuda.synchronize(stage.device)
    return time.perf_counter() - began
