"""The small frozen types that the rooms hand to each other."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

PAGE_METADATA = ("fp16", "int8")
"""How the bounds of Quest's pages may be kept."""


class LayerKind(StrEnum):
    """What a layer attends to, and so which keys and values are kept of it.

    FULL: every token; its keys are stored and searched. SLIDING: the last `window` tokens. CHUNKED: the
    tokens of its own chunk of `window` tokens. NONE: no keys are kept of it; it is recurrent, or no attention
    at all, or reads the keys of another layer.
    """

    FULL = "full"
    SLIDING = "sliding"
    CHUNKED = "chunked"
    NONE = "none"


@dataclass(frozen=True)
class StateShape:
    """A recurrent state of a layer after some token: a name, its shape without the batch, and its dtype.

    Names are those of the cache that holds it: `conv0` (a convolution's last inputs), `recurrent0`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class IndexShape:
    """A model's own indexer (DeepSeek-V3.2): the last `dim` numbers of a token's row are its index key, and
    `topk` is how many tokens a query attends to, stored and generated together.
    """

    dim: int
    topk: int


@dataclass(frozen=True)
class LayerShape:
    """What is kept of one layer.

    `key_dim` and `value_dim` are numbers of a head and token; `window` counts the current token too.
    `latent`: a token's values are its key row itself (MLA: compressed keys and values, then the rotary part,
    then the key of the model's own `index`, where it has one). `scaling`: what inner products of queries and
    keys are multiplied by, where that is another than 1/sqrt(`key_dim`). It changes nothing that is kept, and
    stores of earlier releases do not state it, so that shapes are equal without it.
    """

    kind: LayerKind
    kv_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    window: int | None = None
    states: tuple[StateShape, ...] = ()
    latent: bool = False
    index: IndexShape | None = None
    scaling: float | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        assert self.index is None or self.latent, "an index key stands at the end of a latent's row"
        assert self.local == (self.window is not None), "windowed layers, and no others, have a window"
        assert not self.latent or self.key_dim == self.value_dim, "the values of a latent are its keys"

    @property
    def local(self) -> bool:
        """It attends to near tokens alone: all that is kept of it is a window of keys and values."""
        return self.kind in (LayerKind.SLIDING, LayerKind.CHUNKED)


@dataclass(frozen=True)
class ModelShape:
    """What the store and the engine need to know of a model.

    Its FULL layers have one geometry; where it has none, the heads and widths are those of its first window.
    """

    layers: tuple[LayerShape, ...]
    query_heads: int

    def __post_init__(self) -> None:
        searched = {
            (own.kv_heads, own.key_dim, own.value_dim, own.latent, own.index) for own in self._searched
        }
        assert len(searched) == 1, "some layer keeps keys, and full layers are of one geometry"
        assert self.query_heads % self.kv_heads == 0, "query heads come in groups of one size"

    @classmethod
    def uniform(
        cls,
        kinds: Iterable[LayerKind],
        query_heads: int,
        kv_heads: int,
        head_dim: int,
        window: int | None = None,
    ) -> ModelShape:
        """Layers of these kinds that have the same heads, and the local ones the same window."""
        layers = (
            LayerShape(kind, kv_heads, head_dim, head_dim, None if kind is LayerKind.FULL else window)
            for kind in kinds
        )
        return cls(tuple(layers), query_heads)

    @cached_property
    def full_layers(self) -> tuple[int, ...]:
        """Indexes of the layers whose keys and values are stored whole."""
        return tuple(i for i, own in enumerate(self.layers) if own.kind is LayerKind.FULL)

    @cached_property
    def local_layers(self) -> tuple[int, ...]:
        """Indexes of the layers of which a window is kept."""
        return tuple(i for i, own in enumerate(self.layers) if own.local)

    @cached_property
    def state_layers(self) -> tuple[int, ...]:
        """Indexes of the layers that have recurrent states."""
        return tuple(i for i, own in enumerate(self.layers) if own.states)

    @property
    def kv_heads(self) -> int:
        """KV heads of a full layer."""
        return self._searched[0].kv_heads

    @property
    def head_dim(self) -> int:
        """Numbers of a key of a full layer."""
        return self._searched[0].key_dim

    @property
    def value_dim(self) -> int:
        """Numbers of a value of a full layer."""
        return self._searched[0].value_dim

    @property
    def latent(self) -> bool:
        """Whether the values of full layers are their keys."""
        return self._searched[0].latent

    @property
    def index(self) -> IndexShape | None:
        """The model's own indexer, whose keys are at the end of the rows of full layers."""
        return self._searched[0].index

    @property
    def group(self) -> int:
        """Query heads that share one KV head (G) in a full layer."""
        return self.query_heads // self.kv_heads

    @cached_property
    def _searched(self) -> tuple[LayerShape, ...]:
        full = tuple(own for own in self.layers if own.kind is LayerKind.FULL)
        return full or tuple(own for own in self.layers if own.local)[:1]


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
    """The stored tokens that each query of one layer attends to.

    `ids [Hkv, R, k]` int64, unique in a row, padded with -1; None selects every token. `scores [Hkv, R, k]`
    float32 are the exact inner products q·k (not yet scaled, -inf in the padding), where the selector knows
    them: then only values need to move. `moved` is the bytes of single keys that were fetched to know them.
    """

    ids: Tensor | None
    scores: Tensor | None = None
    moved: int = 0


@dataclass(frozen=True)
class PageSelection:
    """The pages of stored tokens that each query of one layer attends to.

    `pages [Hkv, Q, K]` int64, best first, unique in a list, padded with -1. `shared` rows, a token's whole
    GQA group or one, have a list in common: rows are `[batch, group, tokens]`, lists `[batch, tokens]` or as
    the rows. `limit [Hkv]` int64: places in a list (`page_size` to a page) that count; the rest is cut off.
    """

    pages: Tensor
    page_size: int
    limit: Tensor
    shared: bool


COUNTS = ("rows", "selected", "whole_rows", "bytes_moved", "bus_bytes", "cache_hits", "cache_misses")
SECONDS = ("search_s", "gather_s", "attend_s")
"""Fields of `StepStats` that add up."""


@dataclass
class StepStats:
    """What one forward pass of the engine cost: tokens attended to, bytes, seconds by stage.

    `bytes_moved`: of stored keys and values, read from host memory. `bus_bytes`: sent to a device and back,
    where tokens are attended to. `cache_hits`, `cache_misses`: rows that the device's cache held, and that it
    did not. `attended`: how many attentions to stored tokens were computed on the `host`, on the `device`.
    `tail_error`: where the unselected tail was sampled, the relative standard error of the attention's
    denominator as the draws state it, the mean over `tail_rows` rows; of an error bound the error of the
    output that is stated of each row, and `whole_rows` of these attended to everything.
    """

    tokens: int = 0
    rows: int = 0
    selected: int = 0
    whole_rows: int = 0
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
        for name in ("tokens", *COUNTS, *SECONDS, "total_s"):
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

    def take(self, seconds: float, searching: float, read: int) -> None:
        """Take in attention on the host that read so many bytes, a share of whose time went to the search."""
        self.search_s += seconds * searching
        self.attend_s += seconds * (1 - searching)
        self.bytes_moved += read
        self.attended["host"] = self.attended.get("host", 0) + 1

    def add_tail_error(self, mean: float, rows: int) -> None:
        """Take the mean of further rows into `tail_error`."""
        self.tail_rows += rows
        if rows:
            self.tail_error += (mean - self.tail_error) * rows / self.tail_rows


@dataclass(frozen=True)
class CitedSpan:
    """A passage that was attended to: tokens `start:end` of the store, their text, and their share of the
    attention that fell on documents (0 to 1).
    """

    start: int
    end: int
    text: str
    share: float


@dataclass(frozen=True)
class CitedDocument:
    """A document with its share of the attention that fell on documents, and its passages, most attended
    first.
    """

    name: str
    share: float
    spans: tuple[CitedSpan, ...]


@dataclass(frozen=True)
class Passage:
    """A passage that a question attends to: tokens `start:end` of the store, their document's name and text.

    `score`: its share of the attention that the question pays to the store, 0 to 1, the mean of all heads and
    tokens. Most heads look elsewhere or spread theirs thinly: a good passage has about a hundredth.
    """

    document: str
    start: int
    end: int
    text: str
    score: float


@dataclass(frozen=True)
class Checked:
    """How far an answer agrees with attention to every stored token: of so many `tokens`, in the places of
    how many the `same` one is the likeliest, and the mean absolute `difference` of the log-probabilities of
    the answer's own tokens (natural logarithm).
    """

    tokens: int
    same: int
    difference: float


@dataclass(frozen=True)
class Answer:
    """An answer's text, its token ids (without the end token), what it cost, and why it ended (`stop` or
    `length`). `citations`: the documents that it attended to, most attended first, where they were asked for.
    `grounded`: how likely it stands in the text, 0 to 1 (docs/methods.md §9); None without a stored text.
    `checked`: how far a second pass agrees with it, where that was asked for (§10).
    """

    text: str
    tokens: tuple[int, ...]
    stats: StepStats
    finish: str
    citations: tuple[CitedDocument, ...] | None = None
    grounded: float | None = None
    checked: Checked | None = None
