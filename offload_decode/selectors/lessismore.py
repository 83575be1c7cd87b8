"""LessIsMore / TidalDecode: a few layers score all keys, the layers between take over their tokens.

TidalDecode (Yang et al. 2024, arXiv 2410.05076): which tokens matter changes little from layer to layer.
LessIsMore (Yang et al. 2025): nor does it from head to head, so that one list of tokens serves all heads.
Here the list is ranked by the attention among the stored tokens, summed over all query heads; the recent
window of LessIsMore is the generated KV, which is always attended to.

As in TidalDecode, layers before the first selecting one are dense. A selecting layer keeps to the budget like
any other; in that paper it attends to everything, which is `-o select_layers=2,13 -o dense_layers=0,1,2,13`.
"""

import copy
from bisect import bisect_right
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from offload_decode.attention.queries import Queries
from offload_decode.attention.transfers import to_host
from offload_decode.common.errors import ConfigError
from offload_decode.selectors.base import EVERYTHING, Selector, SelectorOptions
from offload_decode.selectors.budgets import Budgets, any_by_mass
from offload_decode.selectors.scores import blocks, inner_products, top_tokens
from offload_decode.types import Selection


@dataclass(frozen=True)
class Options(SelectorOptions):
    """`select_layers`: the layers that score all keys, as indices separated by commas. By default two, as
    TidalDecode has: the first layer that is not dense, and the middle one of these, because a list agrees
    the less with a layer the farther that is.
    """

    select_layers: str = ""


class LessIsMore(Selector):
    """Score all keys on chosen layers only; the layers between reuse their list, one for all heads."""

    name = "lessismore"
    paper = "https://arxiv.org/abs/2508.07101"
    reads = "every key, twice, on the selecting layers; nothing on the others"
    holds = "k ids for every token of the forward pass"
    options_type = Options
    options: Options
    per_row = False

    def prepare(self) -> None:
        if any_by_mass(self.budgets):
            raise ConfigError(
                "selector 'lessismore' has one list for all heads and layers: "
                "give it a budget like 1024 or 2%, without mass="
            )
        self.select_layers = _select_layers(self.options.select_layers, self.budgets)
        self._ranked: tuple[int, Tensor] | None = None  # the layer it is of, and int64 [batch · tokens, k]

    def observe(self, layer: int, queries: Queries) -> None:
        """A selecting layer ranks the tokens, for itself and those that follow it."""
        if layer in self.select_layers:
            self._ranked = layer, self._rank(layer, queries)

    def choose(self, layer: int, queries: Queries, k: int) -> Selection:
        """The first k of the list of the last selecting layer; everything before the first."""
        source = self._source(layer)
        if source is None:
            return EVERYTHING
        assert self._ranked is not None, f"layer {layer} comes after layer {source}"
        ranked_on, lists = self._ranked
        assert ranked_on == source, f"layer {layer} takes over from layer {source}"
        batch, tokens = queries.batch, queries.tokens
        assert len(lists) == batch * tokens, "one forward pass has the same rows in all layers"
        heads, rows, _ = queries.vectors.shape
        shared = lists[:, :k].reshape(1, batch, 1, tokens, k).expand(-1, -1, queries.group, -1, -1)
        return Selection(shared.reshape(1, rows, k).expand(heads, -1, -1))

    def reset(self) -> None:
        self._ranked = None

    def fork(self) -> Self:
        return copy.copy(self)

    def _source(self, layer: int) -> int | None:
        place = bisect_right(self.select_layers, layer)
        return self.select_layers[place - 1] if place else None

    def _rank(self, layer: int, queries: Queries) -> Tensor:
        """Tokens by attention summed over heads, best first, `[batch · tokens, largest k]`."""
        length, rows = self.host.length, queries.vectors
        stored = self.host.layer_keys(layer)
        takers = (own for taker, own in self.budgets.items() if self._source(taker) == layer)
        k = max(own.largest if own else 0 for own in takers)

        def logits(head: int, part: slice) -> Tensor:
            return queries.logits(inner_products(rows[head], stored[head], part))

        whole = torch.full(rows.shape[:2], -torch.inf, device=rows.device)
        for part in blocks(length, rows=rows.shape[1]):
            for head, own in enumerate(whole):
                whole[head] = torch.logaddexp(own, torch.logsumexp(logits(head, part), dim=-1))

        def attention(part: slice) -> Tensor:
            of_rows = sum(torch.exp(logits(head, part) - own[:, None]) for head, own in enumerate(whole))
            assert isinstance(of_rows, Tensor)
            return of_rows.reshape(queries.batch, queries.group, queries.tokens, -1).sum(1).flatten(0, 1)

        (ids,) = to_host(top_tokens(attention, queries.batch * queries.tokens, length, k)[1])
        return ids


def _select_layers(given: str, budgets: Budgets) -> list[int]:
    if not given.strip():
        sparse = [layer for layer, own in budgets.items() if own is not None]
        return sorted({sparse[0], sparse[len(sparse) // 2]}) if sparse else []
    try:
        chosen = {int(part) for part in given.split(",")}
    except ValueError as error:
        raise ConfigError(f"select_layers '{given}' is not a list of layer numbers like 2,13") from error
    if unknown := chosen - set(budgets):
        raise ConfigError(
            f"select_layers names {sorted(unknown)}, but the searched layers are "
            f"{', '.join(map(str, budgets))}"
        )
    return sorted(chosen)
