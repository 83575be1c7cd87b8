"""The small frozen types that the rooms hand to each other."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

PAGE_METADATA = ("fp16", "int8")
"""How the bounds of Quest's pages may be kept."""


class LayerKind(StrEnum):
    """How a layer attends: to everything (its keys are stored and searched), or to a sliding window."""

    FULL = "full"
    SLIDING = "sliding"


@dataclass(frozen=True)
class ModelShape:
    """What the store and the engine need to know of a model.

    `sliding_window` is the number of tokens a sliding layer sees, the current one included.
    """

    layers: tuple[LayerKind, ...]
    query_heads: int
    kv_heads: int
    head_dim: int
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        assert self.query_heads % self.kv_heads == 0, "query heads come in groups of one size"
        assert (LayerKind.SLIDING in self.layers) <= (self.sliding_window is not None)

    @property
    def group(self) -> int:
        """Query heads that share one KV head (G)."""
        return self.query_heads // self.kv_heads

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Indices of the layers whose keys and values are stored whole."""
        return tuple(i for i, kind in enumerate(self.layers) if kind is LayerKind.FULL)


@dataclass(frozen=True)
class Document:
    """One document of a corpus: `name` and its tokens `start:end` in the store."""

    name: str
    start: int
    end: int


class AttentionState(NamedTuple):
    """Softmax-weighted values of one part of an attention and the log-sum-exp of its scores.

    `out [..., D]`, `lse [...]` float32, natural log (docs/methods.md §1). The empty part is `(0, -inf)`.
    """

    out: Tensor
    lse: Tensor


@dataclass(frozen=True)
class Selection:
    """The stored tokens that each query row of one layer attends to.

    `ids [Hkv, R, k]` int64, unique in a row, padded with -1; None selects every token. `scores [Hkv, R, k]`
    float32 are the exact inner products q·k (not yet scaled, -inf in the padding), where the selector knows
    them: then only values need to move. `moved` is the bytes of single keys that were fetched to know them.
    """

    ids: Tensor | None
    scores: Tensor | None = None
    moved: int = 0


@dataclass(frozen=True)
class PageSelection:
    """The pages of stored tokens that each query row of one layer attends to.

    `pages [Hkv, Q, K]` int64, best first, unique in a list, padded with -1. `shared` rows, a token's whole
    GQA group or one, have a list in common: rows are `[batch, group, tokens]`, lists `[batch, tokens]` or as
    the rows. `limit [Hkv]` int64: places in a list (`page_size` to a page) that count; the rest is cut off.
    """

    pages: Tensor
    page_size: int
    limit: Tensor
    shared: bool


@dataclass
class StepStats:
    """What one forward pass of the engine cost: tokens attended to, bytes, seconds by stage.

    `bytes_moved`: of stored keys and values, read from host memory. `bus_bytes`: sent to a device and back,
    where tokens are attended to. `cache_hits`, `cache_misses`: rows that the device's cache held, and that it
    did not. `attended`: how many attentions to stored tokens were computed on the `host`, on the `device`.
    `tail_error`: where the unselected tail was sampled, the relative standard error of the attention's
    denominator as the draws state it, the mean over `tail_rows` rows.
    """

    tokens: int = 0
    rows: int = 0
    selected: int = 0
    bytes_moved: int = 0
    bus_bytes: int = 0
    cache_hits: int = 0
    cache_misses: int = 0
    search_s: float = 0.0
    gather_s: float = 0.0
    attend_s: float = 0.0
    total_s: float = 0.0
    tail_rows: int = 0
    tail_error: float = 0.0
    by_layer: dict[int, int] = field(default_factory=dict)
    attended: dict[str, int] = field(default_factory=dict)

    def add(self, other: StepStats) -> None:
        """Accumulate another pass into this one."""
        self.add_tail_error(other.tail_error, other.tail_rows)
        for name in (
            "tokens",
            "rows",
            "selected",
            "bytes_moved",
            "bus_bytes",
            "cache_hits",
            "cache_misses",
            "search_s",
            "gather_s",
            "attend_s",
            "total_s",
        ):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for layer, selected in other.by_layer.items():
            self.by_layer[layer] = self.by_layer.get(layer, 0) + selected
        for place, times in other.attended.items():
            self.attended[place] = self.attended.get(place, 0) + times

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Adds the seconds that the block takes to `stage`, such as `search_s`."""
        began = time.perf_counter()
        yield
        setattr(self, stage, getattr(self, stage) + time.perf_counter() - began)

    def add_tail_error(self, mean: float, rows: int) -> None:
        """Take the mean of further rows into `tail_error`."""
        self.tail_rows += rows
        if rows:
            self.tail_error += (mean - self.tail_error) * rows / self.tail_rows


@dataclass(frozen=True)
class Answer:
    """An answer's text, its token ids (without the end token), what it cost, and why it ended (`stop` or
    `length`).
    """

    text: str
    tokens: tuple[int, ...]
    stats: StepStats
    finish: str
