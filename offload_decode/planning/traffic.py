"""What one generated token moves, and the time that takes at measured bandwidths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from offload_decode.models.outline import Outline
from offload_decode.planning.request import Workload
from offload_decode.planning.sizes import active_weights_bytes, index_costs, page_bytes, pair_bytes, row_bytes
from offload_decode.types import ModelShape

if TYPE_CHECKING:
    from offload_decode.planning.bandwidth import Bandwidths


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
