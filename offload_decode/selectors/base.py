"""What a selector is: given a layer's queries, which stored tokens does each of them attend to?"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Generic, Self, TypeVar

from offload_decode.budgets import Budget
from offload_decode.errors import ConfigError
from offload_decode.kv import HostKV
from offload_decode.queries import Queries
from offload_decode.types import ModelShape, PageSelection, Selection

EVERYTHING = Selection(ids=None)
StateT = TypeVar("StateT")


@dataclass(frozen=True)
class Options:
    """Options that every selector has; see `offload_decode.budgets.Budget`."""

    budget: str = "1024"
    schedule: str = "uniform"
    dense_layers: str = ""


class Selector(ABC):
    """One way of choosing tokens. Subclasses set the class variables and write `choose`.

    name: the module's name, `+` for `_`. reads: what choosing reads in a step, for each layer and KV head.
    holds: memory beyond the store. per_row: a row's tokens depend on that row alone, so that a long question
    can be taken in parts. remembers: the choice depends on earlier tokens of the conversation.
    """

    name: ClassVar[str]
    paper: ClassVar[str]
    reads: ClassVar[str]
    holds: ClassVar[str]
    options_type: ClassVar[type[Options]] = Options
    per_row: ClassVar[bool] = True
    remembers: ClassVar[bool] = False

    def __init__(self, options: Options, host: HostKV, shape: ModelShape):
        self.options = options
        self.host = host
        self.shape = shape
        budget = Budget(options.budget, options.schedule, options.dense_layers)
        self.budgets = budget.per_layer(host.length, shape.full_layers)

    def select(self, layer: int, queries: Queries) -> Selection | PageSelection:
        """Tokens for the rows of `queries`, as many as the layer's budget allows."""
        k = self.budgets[layer]
        return EVERYTHING if k is None else self.choose(layer, queries, k)

    @abstractmethod
    def choose(self, layer: int, queries: Queries, k: int) -> Selection | PageSelection:
        """At most `k ≤ N` tokens for each row, best first: a smaller budget takes a prefix of them."""

    def reset(self) -> None:  # noqa: B027 (most have nothing to forget)
        """Start afresh: a new question is put to the whole store."""

    def fork(self) -> Self:
        """The same memory for an independent continuation; what is built from the store stays shared."""
        return self


class Memory(Selector, Generic[StateT]):
    """A selector that remembers a conversation: `state` maps a layer to a value that is replaced, never
    changed in place, so that forks may share it.
    """

    per_row = False
    remembers = True

    def __init__(self, options: Options, host: HostKV, shape: ModelShape):
        super().__init__(options, host, shape)
        self.state: dict[int, StateT] = {}

    def select(self, layer: int, queries: Queries) -> Selection | PageSelection:
        """As `Selector.select`; raises `ConfigError` for several conversations at once."""
        if queries.batch > 1:
            raise ConfigError(
                f"selector '{self.name}' remembers one conversation: "
                "ask one question at a time, and without beams"
            )
        return super().select(layer, queries)

    def reset(self) -> None:
        """Forget the conversation."""
        self.state = {}

    def fork(self) -> Self:
        """A selector with the same memory that goes its own way from here."""
        forked = copy.copy(self)
        forked.state = dict(self.state)
        return forked
