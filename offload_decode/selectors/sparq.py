"""SparQ: the channels in which a query is large approximate its scores.

Ribar et al. 2023, the first step: the r largest |q|. Its temperature does not change the order of the
scores, and its mean value of what is not selected is no part of a selection.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from offload_decode.attention.queries import Queries
from offload_decode.selectors.base import Selector, SelectorOptions
from offload_decode.selectors.scores import channels, top_inner_products
from offload_decode.types import Selection


@dataclass(frozen=True)
class Options(SelectorOptions):
    """`r`: channels that are scored, as a count (`16`) or as a share of the head dimension (`25%`)."""

    r: str = "25%"


class SparQ(Selector):
    """Score every key in the r channels in which |q| is largest and select the best."""

    name = "sparq"
    paper = "https://arxiv.org/abs/2312.04985"
    reads = "r of D channels of every key (stored row by row, so that all D pass through memory)"
    holds = "nothing"
    options_type = Options
    options: Options

    def prepare(self) -> None:
        self.r = channels(self.options.r, self.shape.head_dim, "r")

    def choose(self, layer: int, queries: Queries, k: int) -> Selection:
        """The k best by approximate scores; each row has channels of its own."""
        rows = queries.rows
        kept = rows.abs().topk(self.r, dim=-1).indices
        # Other channels at zero: one product for the whole group, although its rows differ in channels.
        sparse = torch.zeros_like(rows).scatter(-1, kept, rows.gather(-1, kept))
        return Selection(top_inner_products(sparse, self.host.layer_keys(layer), k).ids)
