"""StreamingLLM: attention sinks and a recent window, whatever is asked.

Xiao et al. 2023; positions stay those of the prefill, because the keys are stored after RoPE.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from offload_decode.attention.queries import Queries
from offload_decode.common.errors import ConfigError
from offload_decode.selectors.base import Selector, SelectorOptions
from offload_decode.types import Selection


@dataclass(frozen=True)
class Options(SelectorOptions):
    """`sinks`: how many of the first tokens are kept."""

    sinks: int = 4

    def __post_init__(self) -> None:
        if self.sinks < 0:
            raise ConfigError(f"option sinks {self.sinks} is out of range: it must be 0 or more")


class Streaming(Selector):
    """Select the first tokens and the most recent ones."""

    name = "streaming"
    paper = "https://arxiv.org/abs/2309.17453"
    reads = "nothing"
    holds = "nothing"
    options_type = Options
    options: Options

    def choose(self, layer: int, queries: Queries, k: int) -> Selection:
        """The sinks, then the last tokens, the latest first; the same for every row."""
        sinks = min(self.options.sinks, k)
        latest = self.host.length - 1 - torch.arange(k - sinks)
        ids = torch.cat([torch.arange(sinks), latest])
        return Selection(ids.expand(*queries.rows.shape[:2], k))
