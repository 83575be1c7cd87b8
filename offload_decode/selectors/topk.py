"""Top-k decoding: the k stored keys with the largest inner product, for every query head.

Synk et al. 2025 (arXiv 2502.06766), Algorithm 1, but that the parts are merged as docs/methods.md §1 says.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from offload_decode.attention.queries import Queries
from offload_decode.attention.rows import numpy_view
from offload_decode.kv.indexes import HeadIndexes
from offload_decode.selectors.base import Selector, SelectorOptions
from offload_decode.selectors.scores import top_inner_products
from offload_decode.types import Selection


class Oracle(Selector):
    """Score every key exactly and select the best.

    The ceiling of every selector, without an index.
    """

    name = "oracle"
    paper = "https://arxiv.org/abs/2502.06766"
    reads = "every key"
    holds = "nothing"

    def choose(self, layer: int, queries: Queries, k: int) -> Selection:
        """The k keys of largest inner product, with their scores."""
        return top_inner_products(queries.rows, self.host.layer_keys(layer), k)


@dataclass(frozen=True)
class Options(SelectorOptions):
    """`index`: the kind of index; `auto` is the clusters where they are built, else flat."""

    index: str = "auto"


class TopK(Selector):
    """Search one index per (layer, KV head) with the group's queries as one batch."""

    name = "topk"
    paper = "https://arxiv.org/abs/2502.06766"
    reads = "codes of the clusters that may matter, all keys (flat), or what the index probes"
    holds = "the index (clusters: mapped); nothing with flat"
    options_type = Options
    options: Options

    def prepare(self) -> None:
        self.indexes = HeadIndexes(self.host.store, self.options.index)

    def report(self) -> dict[str, object]:
        return {"index": self.indexes.describe()}

    def choose(self, layer: int, queries: Queries, k: int) -> Selection:
        """The index's k best; with their scores where the index knows them exactly."""
        hits = self.indexes.search(layer, numpy_view(queries.on_host()), k)
        scores = torch.from_numpy(hits.scores) if self.indexes.exact_scores else None
        return Selection(torch.from_numpy(hits.ids), scores)
