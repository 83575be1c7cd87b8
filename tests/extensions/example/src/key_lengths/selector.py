"""Longest keys: those with the largest length, whatever is asked."""

from dataclasses import dataclass

import torch

from offload_decode.attention.queries import Queries
from offload_decode.common.errors import ConfigError
from offload_decode.selectors.base import Selector, SelectorOptions
from offload_decode.types import Selection


@dataclass(frozen=True)
class Options(SelectorOptions):
    """`skip`: how many of the longest keys come last: the very longest are often those of no matter."""

    skip: int = 0

    def __post_init__(self) -> None:
        if self.skip < 0:
            raise ConfigError(f"option skip {self.skip} is out of range: it must be 0 or more")


class LongestKeys(Selector):
    """Select the longest keys."""

    name = "longest-keys"
    paper = "none: an example"
    reads = "the length of every key"
    holds = "nothing"
    options_type = Options
    options: Options

    def choose(self, layer: int, queries: Queries, k: int) -> Selection:
        """The k longest after the first `skip`; those that were skipped come last."""
        lengths = [self.host.key_norms(layer, head) for head in range(self.shape.kv_heads)]
        ranked = torch.stack(lengths).argsort(dim=-1, descending=True, stable=True)
        best = ranked.roll(-self.options.skip, dims=-1)[:, None, :k]
        return Selection(best.expand(-1, queries.vectors.shape[1], -1))
