"""Dense attention to the whole prefix: what every selector is measured against."""

from __future__ import annotations

from dataclasses import dataclass

from offload_decode.attention.queries import Queries
from offload_decode.selectors.base import EVERYTHING, Selector, SelectorOptions
from offload_decode.types import Selection


@dataclass(frozen=True)
class Options(SelectorOptions):
    """The budget is everything."""

    budget: str = "100%"


class Dense(Selector):
    """Select every stored token, read block by block."""

    name = "dense"
    paper = "https://arxiv.org/abs/1706.03762"
    reads = "nothing"
    holds = "nothing"
    options_type = Options

    def choose(self, layer: int, queries: Queries, k: int) -> Selection:
        """Everything, whatever the budget says."""
        return EVERYTHING
