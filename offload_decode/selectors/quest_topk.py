"""Quest's pages as a coarse filter on the device, then exact scores of their keys on the host: only the
values of the k best tokens travel (docs/methods.md §3, two stages; the pages are Quest's, arXiv 2406.10774).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from offload_decode.attention.pages_host import top_pages
from offload_decode.attention.queries import Queries
from offload_decode.common.errors import ConfigError
from offload_decode.selectors import quest
from offload_decode.selectors.scores import page_token_scores
from offload_decode.types import Selection


@dataclass(frozen=True)
class Options(quest.Options):
    """`coarse`: how many times the budget's tokens the pages of the first stage hold."""

    coarse: int = 4


class QuestTopK(quest.Quest):
    """Choose pages for the group, then each query head's own k best of their tokens."""

    name = "quest+topk"
    paper = "https://arxiv.org/abs/2406.10774"
    reads = "two bounds of every page, and the keys of the pages they lead to"
    holds = "the bounds on the device, built when a layer is first searched"
    options_type = Options
    options: Options

    def prepare(self) -> None:
        super().prepare()
        self.coarse = self.options.coarse
        if self.coarse < 1:
            raise ConfigError(f"coarse={self.coarse} leaves too few tokens: it must be 1 or more")

    def choose(self, layer: int, queries: Queries, k: int) -> Selection:
        """The k best of the pages' tokens with their exact scores."""
        tokens = min(self.coarse * k, self.host.length)
        query = self.lists(queries)
        heads, _, group, _ = query.shape
        step = max(1, quest.SCORES // max(1, heads * group * tokens))
        parts = [self._best_tokens(layer, part, tokens, k) for part in torch.split(query, step, 1)]
        ids, scores = (torch.cat(side, dim=1) for side in zip(*parts, strict=True))
        if self.per_head:
            return Selection(ids.squeeze(2), scores.squeeze(2))
        return Selection(queries.by_row(ids), queries.by_row(scores))

    def _best_tokens(self, layer: int, query: Tensor, tokens: int, k: int) -> tuple[Tensor, Tensor]:
        """Ids and scores `[Hkv, Q, G, k]` for `query [Hkv, Q, G, D]`."""
        chosen = self.best_pages(self.bounds(layer), self.host.length, query, tokens)
        ids, scores = page_token_scores(query, self.host.layer_keys(layer), chosen)
        place = top_pages(scores.flatten(1, 2), k).reshape(*scores.shape[:3], -1)
        return ids.expand(scores.shape).gather(3, place), scores.gather(3, place)
