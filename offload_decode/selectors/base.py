"""What a selector is: given a layer's queries, which stored tokens does each of them attend to?"""

import copy
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Generic, Self, TypeVar

from offload_decode.attention.queries import Queries
from offload_decode.common.errors import ConfigError
from offload_decode.kv.generated import GeneratedKV
from offload_decode.kv.host_cache import HostKV
from offload_decode.selectors.budgets import PASS_TOKENS, Budgets, ErrorBound
from offload_decode.types import AttentionState, ModelShape, PageSelection, Selection

EVERYTHING = Selection(ids=None)


@dataclass(frozen=True)
class Attended:
    """A state `[Hkv, R, …]` over the stored tokens, what was selected, how many tokens the rows attended to
    in all, the bytes of keys and values that were read, and the share of the time that the search took.
    stated: the mean over the rows of the error that is stated of their output, where one is; whole: how many
    of them attended to everything for it.
    """

    state: AttentionState
    selection: Selection
    tokens: int
    read: int
    searching: float
    stated: float | None = None
    whole: int = 0


StateT = TypeVar("StateT")


@dataclass(frozen=True)
class SelectorOptions:
    """Options that every selector has; see `offload_decode.selectors.budgets.Budget`.

    `budget`: tokens for each query of a layer: `1024`, `2%`, `mass=0.99`; `,` between layers, `/` between
    KV heads. `schedule`: `uniform` or `linear`. `dense_layers`: `0,1` or `first:2`.
    `tail`: an estimate of the tokens that are not selected: `off`, `clusters`, `auto` (clusters, where they
    are built), or `sample` with the number of tokens drawn, as in `sample:512`.
    """

    budget: str = "1024"
    schedule: str = "uniform"
    dense_layers: str = ""
    tail: str = "off"


class Selector(ABC):
    """One way of choosing tokens. Subclasses set the class variables and write `choose`.

    name: as users write it, on a line of its own, by which the registry finds the class. reads: what choosing
    reads in a step, for each layer and KV head. holds: memory beyond the store. per_row: a row's tokens
    depend on that row alone, so that a long question can be taken in parts. one_question: all tokens of a
    pass choose together, so that a batch's padding must not be among them. remembers: the choice depends on
    earlier tokens of the conversation. pass_tokens: how much of a question one forward pass takes; what is
    chosen depends on it where `pass_tokens` is WHOLE_QUESTION, and nowhere else.

    `budgets` says how many tokens each layer will ask for; `Budgeted` holds the choice to them.
    """

    name: ClassVar[str]
    paper: ClassVar[str]
    reads: ClassVar[str]
    holds: ClassVar[str]
    options_type: ClassVar[type[SelectorOptions]] = SelectorOptions
    per_row: ClassVar[bool] = True
    pass_tokens: ClassVar[int] = PASS_TOKENS
    one_question: ClassVar[bool] = False
    remembers: ClassVar[bool] = False
    bound: ErrorBound | None = None  # on the error of what rows attend to, stated by `attend`

    def __init__(self, options: SelectorOptions, host: HostKV, shape: ModelShape, budgets: Budgets):
        self.options = options
        self.host = host
        self.shape = shape
        self.budgets = budgets
        self.prepare()

    def prepare(self) -> None:  # noqa: B027 (most need nothing)
        """Check the options, and make what all questions share. Raises `ConfigError`."""

    @abstractmethod
    def choose(self, layer: int, queries: Queries, k: int) -> Selection | PageSelection:
        """At most `k ≤ N` tokens for each row, best first: a smaller budget takes a prefix of them."""

    def attend(self, layer: int, queries: Queries) -> Attended | None:
        """Choose and attend in one, for a selector that decides by what it has attended to; None, as here,
        leaves it to the step to attend to what `choose` gives.
        """
        return None

    def takes_all(self, layer: int, k: int) -> bool:
        """Whether to attend to everything in a layer, because that is faster than to choose k tokens."""
        return False

    @property
    def searched(self) -> tuple[object, ...]:
        """What beside the options decides which tokens are chosen, such as an index that is there or not."""
        return ()

    def observe(self, layer: int, queries: Queries) -> None:  # noqa: B027 (most choose without looking ahead)
        """Sees the queries of every layer before any token is chosen for it, dense layers included."""

    @property
    def whole_generated(self) -> float:
        """Tokens of a conversation up to which `select_generated` takes all of it."""
        return math.inf

    def select_generated(self, layer: int, queries: Queries, generated: GeneratedKV) -> PageSelection | None:
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

    def prepare(self) -> None:
        """Raises `ConfigError` for a tail, and for budgets that differ between the heads of a layer."""
        if self.options.tail != SelectorOptions.tail:
            raise ConfigError(
                f"selector '{self.name}' gives up what it does not keep: leave tail={self.options.tail} out"
            )
        if any(own.by_mass or own.uneven for own in self.budgets.values() if own):
            raise ConfigError(
                f"selector '{self.name}' keeps equally many tokens in all heads of a layer: "
                "give it a budget like 1024, 2% or 64,128, without mass= and /"
            )
        self.state: dict[int, StateT] = {}

    def observe(self, layer: int, queries: Queries) -> None:
        """Raises `ConfigError` for several conversations at once."""
        if queries.batch > 1:
            raise ConfigError(
                f"selector '{self.name}' remembers one conversation: "
                "ask one question at a time, and without beams"
            )

    def reset(self) -> None:
        self.state = {}

    def fork(self) -> Self:
        forked = copy.copy(self)
        forked.state = dict(self.state)
        return forked
