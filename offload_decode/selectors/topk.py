"""Top-k decoding: the k stored keys with the largest inner product, for every query head.

Synk et al. 2025, Algorithm 1, but that the parts are merged as docs/methods.md §1 says.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Self

import torch

from offload_decode.attention.queries import Queries
from offload_decode.errors import ConfigError
from offload_decode.kernels.rows import numpy_view
from offload_decode.kv.head_indexes import HeadIndexes
from offload_decode.kv.host import HostKV
from offload_decode.selection.budgets import Budgets, any_by_mass
from offload_decode.selection.selector import Selector, SelectorOptions
from offload_decode.selection.speculation import Speculation
from offload_decode.types import ModelShape, Selection


@dataclass(frozen=True)
class Options(SelectorOptions):
    """`index`: the kind of vector index that is searched; `auto` is the clusters where they are built, else
    flat. `speculate`: a step takes over what was found for the previous token's query, in KV heads where the
    cosine of both is at least `similarity`.
    """

    index: str = "auto"
    speculate: bool = False
    similarity: float = 0.9


class TopK(Selector):
    """Search one index per (layer, KV head) with the group's queries as one batch."""

    name = "topk"
    paper = "https://arxiv.org/abs/2502.06766"
    reads = "codes of the clusters that may matter, all keys (flat), or what the index probes"
    holds = "the index (clusters: mapped); nothing with flat"
    options_type = Options

    def __init__(self, options: Options, host: HostKV, shape: ModelShape, budgets: Budgets):
        super().__init__(options, host, shape, budgets)
        self.indexes = HeadIndexes(host.store, options.index)
        self.speculation: Speculation | None = None
        if not -1 <= options.similarity <= 1:
            raise ConfigError(f"similarity={options.similarity} cannot be: a cosine lies between -1 and 1")
        if options.speculate:
            self._speculate(options.similarity)

    def _speculate(self, similarity: float) -> None:
        if any_by_mass(self.budgets):
            raise ConfigError(
                "speculate=true takes over a fixed number of tokens: "
                "give a budget like 1024 or 2%, without mass="
            )
        self.speculation = Speculation(self.indexes.search, similarity)
        # A batch is searched without speculation, and would not answer as each question alone.
        self.remembers = self.one_question = True

    def report(self) -> dict[str, object]:
        """The index that is searched, and how many heads could take over, and were corrected."""
        counts = self.speculation.counts if self.speculation else {}
        return {
            "index": self.indexes.describe(),
            **{name: counts[name] for name in ("heads", "corrected") if counts},
        }

    def choose(self, layer: int, queries: Queries, k: int) -> Selection:
        """The index's k best; with their scores where the index knows them exactly."""
        rows = numpy_view(queries.on_host())
        # One row can also be what is left of a long question that is taken in parts.
        a_step = queries.batch * queries.tokens == 1 and queries.group == self.shape.group
        if self.speculation is not None and a_step:
            ids, scores = self.speculation.step(layer, rows, k)
        else:
            self.reset()
            hits = self.indexes.search(layer, range(len(rows)), rows, k)
            ids, scores = hits.ids, hits.scores
        known = scores is not None and self.indexes.get(layer, 0).exact_scores
        return Selection(torch.from_numpy(ids), torch.from_numpy(scores) if known else None)

    def reset(self) -> None:
        """Take nothing over from an earlier question."""
        if self.speculation is not None:
            self.speculation.forget()

    def fork(self) -> Self:
        """A selector that goes on from the same search ahead; the same one where there is none."""
        if self.speculation is None:
            return self
        forked = copy.copy(self)
        forked.speculation = self.speculation.fork()
        return forked
