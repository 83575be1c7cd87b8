"""What a selector is: given a layer's queries, which stored tokens does each of them attend to?"""

from __future__ import annotations

import copy
import dataclasses
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Generic, Self, TypeVar

import torch

from offload_decode.attention.queries import Queries
from offload_decode.errors import ConfigError
from offload_decode.kv.host import HostKV
from offload_decode.kv.tail import TailKV
from offload_decode.pages.reference import places
from offload_decode.selection.budgets import PASS_TOKENS, Budget
from offload_decode.selection.mass import MassBudget, cut
from offload_decode.tails import registry as tails
from offload_decode.types import ModelShape, PageSelection, Selection

EVERYTHING = Selection(ids=None)
StateT = TypeVar("StateT")


@dataclass(frozen=True)
class Options:
    """Options that every selector has; see `offload_decode.selection.budgets.Budget`.

    `budget`: tokens for each query row of a layer: `1024`, `2%`, `mass=0.99`; `,` between layers, `/` between
    KV heads. `schedule`: `uniform` or `linear`. `dense_layers`: `0,1` or `first:2`.
    `tail`: an estimate of the tokens that are not selected: `off`, `clusters` or `sample`, with a size as in
    `clusters:32` (keys a cluster) and `sample:512` (tokens drawn).
    """

    budget: str = "1024"
    schedule: str = "uniform"
    dense_layers: str = ""
    tail: str = "off"


class Selector(ABC):
    """One way of choosing tokens. Subclasses set the class variables and write `choose`.

    name: the module's name, `+` for `_`. reads: what choosing reads in a step, for each layer and KV head.
    holds: memory beyond the store. per_row: a row's tokens depend on that row alone, so that a long question
    can be taken in parts. one_question: all tokens of a pass choose together, so that a batch's padding must
    not be among them. remembers: the choice depends on earlier tokens of the conversation. pass_tokens: how
    much of a question one forward pass takes; what is chosen depends on it where `pass_tokens` is
    WHOLE_QUESTION, and nowhere else.
    """

    name: ClassVar[str]
    paper: ClassVar[str]
    reads: ClassVar[str]
    holds: ClassVar[str]
    options_type: ClassVar[type[Options]] = Options
    per_row: ClassVar[bool] = True
    pass_tokens: ClassVar[int] = PASS_TOKENS
    one_question: bool = False
    remembers: bool = False

    def __init__(self, options: Options, host: HostKV, shape: ModelShape):
        self.options = options
        self.host = host
        self.shape = shape
        self.tail = tails.create(options.tail, host)  # shared by forks, as all that is built from the store
        budget = Budget(options.budget, options.schedule, options.dense_layers)
        self.layer_budgets = budget.per_layer(host.length, shape.full_layers, shape.kv_heads)
        # The most that a row of each layer may take; None is dense.
        self.budgets = {
            layer: None if own is None else own.largest for layer, own in self.layer_budgets.items()
        }
        self.mass = MassBudget(host)
        # A mass is found for all rows of a pass together, and another question's must not be among them.
        self.by_mass = any(own is not None and own.by_mass for own in self.layer_budgets.values())
        self.one_question = self.one_question or self.by_mass
        uncommon = [own for own in self.layer_budgets.values() if own and (own.by_mass or own.uneven)]
        if self.remembers and uncommon:
            raise ConfigError(
                f"selector '{self.name}' keeps equally many tokens in all heads of a layer: "
                "give it a budget like 1024, 2% or 64,128, without mass= and /"
            )

    def select(self, layer: int, queries: Queries) -> Selection | PageSelection:
        """Tokens for the rows of `queries`, as many as the budgets of the layer's heads allow."""
        budget = self.layer_budgets[layer]
        if budget is None:
            return EVERYTHING
        if budget.by_mass:
            return self.mass.select(layer, queries, budget, lambda k: self.choose(layer, queries, k))
        chosen = self.choose(layer, queries, budget.largest)
        if not budget.uneven:
            return chosen
        counts = torch.tensor([head.tokens for head in budget.heads])
        if isinstance(chosen, PageSelection):
            own = places(counts, self.host.length % chosen.page_size, chosen.page_size)
            limit = chosen.limit.minimum(own.to(chosen.limit.device))
            starts = torch.arange(chosen.pages.shape[2], device=limit.device) * chosen.page_size
            pages = chosen.pages.masked_fill(starts >= limit[:, None, None], -1)
            return dataclasses.replace(chosen, pages=pages, limit=limit)
        return chosen if chosen.ids is None else cut(chosen, counts.unsqueeze(-1))

    @abstractmethod
    def choose(self, layer: int, queries: Queries, k: int) -> Selection | PageSelection:
        """At most `k ≤ N` tokens for each row, best first: a smaller budget takes a prefix of them."""

    @property
    def whole_tail(self) -> float:
        """Tokens of a conversation up to which `select_tail` takes all of it."""
        return math.inf

    def select_tail(self, layer: int, queries: Queries, tail: TailKV) -> PageSelection | None:
        """Pages of the conversation itself for the rows of `queries`; None, as here, is all of it."""
        return None

    def report(self) -> dict[str, object]:
        """What a user may want to know of how it chose, beyond its options."""
        return {}

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
    one_question = True
    remembers = True

    def __init__(self, options: Options, host: HostKV, shape: ModelShape):
        super().__init__(options, host, shape)
        if self.tail is not None:
            raise ConfigError(
                f"selector '{self.name}' gives up what it does not keep: leave tail={options.tail} out"
            )
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
