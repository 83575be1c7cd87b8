"""What one generated token moves, and the time that takes at measured bandwidths."""

from __future__ import annotations

from dataclasses import dataclass

from offload_decode.models.outline import Outline
from offload_decode.planning.bandwidth import Bandwidths
from offload_decode.planning.request import Request
from offload_decode.planning.sizes import active_weights_bytes, page_bytes, row_bytes

# Shares of the keys that a tuned index reads; until `index` has measured the recall they are assumptions.
# IVF: a quarter of the lists on real queries (docs/methods.md §6). Graphs: what a walk at ef = N / 64 scores.
# Clusters: codes of 72 bytes beside keys of 256 (D = 128, 16 bits), for half of the cells.
_PROBED = {"clusters": 0.14, "flat": 1.0, "faiss-ivf": 0.25, "faiss-hnsw": 0.14, "hnswlib": 0.14}


@dataclass(frozen=True)
class Traffic:
    """Bytes for each generated token. `weights`: read on the device. `pages`: bounds read there. `scanned`:
    keys read one after another in host memory. `gathered`: rows fetched from all over it, the most that the
    query heads of a group can want. `attended`: rows read one after another for dense layers. `bus`: what of
    these goes to a GPU; 0 without one.
    """

    weights: int
    pages: int
    scanned: int
    gathered: int
    attended: int
    bus: int

    @property
    def host(self) -> int:
        """Bytes of the store that are read."""
        return self.scanned + self.gathered + self.attended


@dataclass(frozen=True)
class Speed:
    """Expected tokens a second, and the seconds of a token by what they are spent on."""

    tokens_per_second: float
    seconds: dict[str, float]

    @property
    def limit(self) -> str:
        """What takes longest."""
        return max(self.seconds, key=lambda name: self.seconds[name])


def traffic(outline: Outline, request: Request, on_gpu: bool) -> Traffic:
    """For one conversation, one token at a time."""
    shape, n = outline.shape, request.tokens
    key, value = row_bytes(request.kv, shape.head_dim, outline.dtype)
    scanned = gathered = attended = searched = 0
    for k in request.budgets(shape).values():
        if k is None:
            attended += shape.kv_heads * n * (key + value)
        elif request.selector == "quest":
            searched += 1
            gathered += shape.kv_heads * k * (key + value)  # a group shares its pages
        else:
            scanned += round(shape.kv_heads * n * key * _PROBED[request.index])
            gathered += shape.kv_heads * min(n, shape.group * k) * value  # the scores are known already
    return Traffic(
        weights=active_weights_bytes(outline, request.weights),
        pages=page_bytes(shape, n, request.page_size, request.metadata, searched),
        scanned=scanned,
        gathered=gathered,
        attended=attended,
        bus=gathered + attended if on_gpu else 0,
    )


def speed(moved: Traffic, measured: Bandwidths, from_disk: float = 0.0, disk: float | None = None) -> Speed:
    """The stages of a token follow one another. `from_disk`: bytes that memory does not hold, read at `disk`
    bytes a second.
    """
    seconds = {
        "model weights": moved.weights / measured.weights,
        "page bounds": moved.pages / measured.weights,
        "scanning keys": moved.scanned / measured.scan,
        "gathering rows": moved.gathered / measured.gather,
        "dense layers": moved.attended / measured.attend,
    }
    if measured.bus is not None:
        seconds["bus"] = moved.bus / measured.bus
    if from_disk and disk:
        seconds["disk"] = from_disk / disk
    return Speed(1 / sum(seconds.values()), {name: spent for name, spent in seconds.items() if spent})
