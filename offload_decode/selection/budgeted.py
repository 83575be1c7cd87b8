"""A selector held to its budgets: every KV head of a layer gets as many tokens as its budget says."""

from __future__ import annotations

from dataclasses import replace

import torch

from offload_decode.attention.queries import Queries
from offload_decode.pages.reference import places
from offload_decode.selection.budgets import LayerBudget, any_by_mass
from offload_decode.selection.mass import MassBudget, cut
from offload_decode.selection.selector import EVERYTHING, Selector
from offload_decode.types import PageSelection, Selection


class Budgeted:
    """What a step asks for tokens. Forks share the budgets, and go their own way in what they remember."""

    def __init__(self, selector: Selector, mass: MassBudget | None = None):
        self.selector = selector
        self._mass = mass or MassBudget(selector.host)

    def select(self, layer: int, queries: Queries) -> Selection | PageSelection:
        """Tokens for the rows of `queries`, as many as the budgets of the layer's heads allow."""
        self.selector.observe(layer, queries)
        budget = self.selector.budgets[layer]
        if budget is None:
            return EVERYTHING
        if budget.by_mass:
            return self._mass.select(
                layer, queries, budget, lambda k: self.selector.choose(layer, queries, k)
            )
        chosen = self.selector.choose(layer, queries, budget.largest)
        return _for_each_head(chosen, budget, self.selector.host.length) if budget.uneven else chosen

    def rows_at_once(self, layer: int, most: int) -> float:
        """How many rows of a KV head may choose together, so that at most `most` tokens are chosen."""
        budget = self.selector.budgets[layer]
        if budget is None or not self.selector.per_row:
            return torch.inf
        return most // max(1, budget.largest * self.selector.shape.kv_heads)

    @property
    def one_question(self) -> bool:
        """Questions of a batch must be asked one by one: a mass is found for all rows of a pass together."""
        return self.selector.one_question or any_by_mass(self.selector.budgets)

    def fork(self) -> Budgeted:
        """For an independent continuation."""
        return Budgeted(self.selector.fork(), self._mass)


def _for_each_head(
    chosen: Selection | PageSelection, budget: LayerBudget, n_tokens: int
) -> Selection | PageSelection:
    """The first of what was chosen, as many for each head as its own count says."""
    counts = torch.tensor([head.tokens for head in budget.heads])
    if isinstance(chosen, PageSelection):
        own = places(counts, n_tokens % chosen.page_size, chosen.page_size)
        limit = chosen.limit.minimum(own.to(chosen.limit.device))
        starts = torch.arange(chosen.pages.shape[2], device=limit.device) * chosen.page_size
        pages = chosen.pages.masked_fill(starts >= limit[:, None, None], -1)
        return replace(chosen, pages=pages, limit=limit)
    return chosen if chosen.ids is None else cut(chosen, counts.unsqueeze(-1))
