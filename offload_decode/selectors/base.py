"""What a selector is: given a layer's queries, which stored tokens does each of them attend to?"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from offload_decode.budgets import Budget
from offload_decode.kv import HostKV
from offload_decode.types import ModelShape, Selection

EVERYTHING = Selection(ids=None)


@dataclass(frozen=True)
class Options:
    """Options that every selector has; see `offload_decode.budgets.Budget`."""

    budget: str = "1024"
    schedule: str = "uniform"
    dense_layers: str = ""


class Selector(ABC):
    """One way of choosing tokens. Subclasses set `name`, `paper` and `options_type`, and write `choose`."""

    name: ClassVar[str]
    paper: ClassVar[str]
    options_type: ClassVar[type[Options]] = Options

    def __init__(self, options: Options, host: HostKV, shape: ModelShape):
        self.options = options
        self.host = host
        self.shape = shape
        budget = Budget(options.budget, options.schedule, options.dense_layers)
        self.budgets = budget.per_layer(host.length, shape.full_layers)

    def select(self, layer: int, queries: Tensor) -> Selection:
        """Tokens for `queries [Hkv, R, D]` (float32, unscaled): the rows of a KV head are its group's
        queries.
        """
        k = self.budgets[layer]
        return EVERYTHING if k is None else self.choose(layer, queries, k)

    @abstractmethod
    def choose(self, layer: int, queries: Tensor, k: int) -> Selection:
        """At most `k ≤ N` tokens for each row."""
