"""What a prefill method is: it chooses the earlier tokens that a chunk attends to, besides itself."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor

from offload_decode.attention.queries import Queries
from offload_decode.attention.rows import Rows
from offload_decode.common.errors import ConfigError
from offload_decode.selectors.budgets import Budget
from offload_decode.types import ModelShape


@dataclass(frozen=True)
class Options:
    """Options of every method. `chunk`: tokens in one forward pass, which attend to each other causally (B_CP
    in QuoKA).
    """

    chunk: int = 512

    def __post_init__(self) -> None:
        if self.chunk < 1:
            raise ConfigError(f"option chunk {self.chunk} is out of range: it must be at least 1")


@dataclass(frozen=True)
class SparseOptions(Options):
    """`budget`: earlier tokens that each KV head keeps for a chunk, `2048`, or a share of those so far,
    `25%`; one for all layers, or one for each with full attention, separated by commas (B_SA in QuoKA).
    """

    budget: str = "25%"


class Earlier(Protocol):
    """The earlier tokens of the layers with full attention."""

    @property
    def length(self) -> int:
        """Their number, N."""

    def keys(self, layer: int, head: int) -> Rows:
        """The N keys of one KV head, as they are stored."""

    def key_norms(self, layer: int, head: int) -> Tensor:
        """Lengths of the keys, float32 `[N]` on the host."""


class Method(ABC):
    """One way of choosing tokens for a chunk. Subclasses set the class variables and write `select`."""

    name: ClassVar[str]
    paper: ClassVar[str]
    options_type: ClassVar[type[Options]] = Options
    chunk_shapes: ClassVar[bool] = True
    """Whether the choice depends on the size of a chunk. Where it does not, a GPU takes as many tokens as fit
    by default.
    """

    def __init__(self, options: Options, shape: ModelShape):
        self.options = options
        self.shape = shape

    @abstractmethod
    def select(self, layer: int, queries: Queries, earlier: Earlier) -> Tensor | None:
        """Ids int64 `[Hkv, k]` of earlier tokens, unique in a row, in any order; None is all of them."""


class Dense(Method):
    """Attend to everything; what the others are measured against."""

    name = "dense"
    paper = "none: exact attention"
    chunk_shapes = False

    def select(self, layer: int, queries: Queries, earlier: Earlier) -> None:
        """All tokens."""


class Sparse(Method):
    """A method with a budget; subclasses write `choose`, which is called only where something is left out."""

    options_type = SparseOptions
    options: SparseOptions

    def __init__(self, options: SparseOptions, shape: ModelShape):
        super().__init__(options, shape)
        if options.budget.count("mass=") or "/" in options.budget:
            raise ConfigError(
                f"budget '{options.budget}' cannot be used by a prefill: give a count like 2048 or a share "
                "like 25%, for all layers or one for each, separated by commas"
            )
        self._budget(1)  # fail before the first chunk

    def select(self, layer: int, queries: Queries, earlier: Earlier) -> Tensor | None:
        k = self._budget(earlier.length)[layer]
        return None if k >= earlier.length else self.choose(layer, queries, earlier, k)

    @abstractmethod
    def choose(self, layer: int, queries: Queries, earlier: Earlier, k: int) -> Tensor:
        """Ids int64 `[Hkv, k]` for the chunk's `queries`, `0 <= k < N`."""

    def _budget(self, length: int) -> dict[int, int]:
        layers = Budget(self.options.budget).per_layer(length, self.shape.full_layers, self.shape.kv_heads)
        return {layer: length if own is None else own.largest for layer, own in layers.items()}
