"""The model's own indexer: the tokens that a model with native sparse attention was trained to attend to."""

from dataclasses import dataclass

import torch
from torch import Tensor

from offload_decode.attention.index_queries import IndexQueries
from offload_decode.attention.queries import Queries
from offload_decode.common.errors import ConfigError, UnsupportedModel
from offload_decode.selectors.base import EVERYTHING, Selector, SelectorOptions
from offload_decode.selectors.budgets import any_by_mass
from offload_decode.selectors.scores import blocks, top_scores
from offload_decode.types import PageSelection, Selection


@dataclass(frozen=True)
class Options(SelectorOptions):
    """The model says how many tokens a query attends to, stored and generated ones together. A `budget`
    bounds the stored ones among them: 100% leaves all.
    """

    budget: str = "100%"


class Own(Selector):
    """Score every token by the model's own indexer and attend to the best, as the model does itself.

    DeepSeek-V3.2 (arXiv 2512.02556, section 2.1), GLM-5 and their relatives: all heads of a token share the
    choice, and layers may share another's. What is attended to of the conversation is chosen with it.
    """

    name = "own"
    paper = "https://arxiv.org/abs/2512.02556"
    reads = "the index key of every token (128 numbers in DeepSeek-V3.2)"
    holds = "these on the device, from a layer's first use on"
    options_type = Options
    options: Options
    per_row = False

    def prepare(self) -> None:
        """Raises `ConfigError` for a model without an indexer, and for options that do not go with one."""
        if self.shape.index is None:
            raise ConfigError(
                "selector 'own' needs a model with an indexer of its own, such as DeepSeek-V3.2 or GLM-5: "
                "choose another, such as topk"
            )
        if self.options.tail != SelectorOptions.tail:
            raise ConfigError(
                f"selector 'own' attends as the model was trained to: leave tail={self.options.tail} out"
            )
        if any_by_mass(self.budgets):
            raise ConfigError("selector 'own' attends to as many tokens as the model says: leave mass= out")
        self.topk, self._dim = self.shape.index.topk, self.shape.index.dim
        self._keys: dict[int, Tensor] = {}

    def choose(self, layer: int, queries: Queries, k: int) -> Selection | PageSelection:
        """Single tokens, as pages of one, that all heads of a query share. Leaves in `queries.index` which of
        the generated tokens are attended to. Raises `UnsupportedModel` where the indexer was not seen.
        """
        index = queries.index
        if index is None:
            raise UnsupportedModel(
                "selector 'own' did not see what this model's indexer asks: choose another, such as topk"
            )
        whole = self.host.length + index.generated.shape[2]
        if whole <= self.topk and k == self.host.length:
            return EVERYTHING
        if index.ids is None:
            self._choose(index, min(self.topk, whole))
        assert index.ids is not None
        return PageSelection(
            index.ids[None, :, :k], 1, torch.tensor([k], device=index.ids.device), shared=True
        )

    def _choose(self, index: IndexQueries, count: int) -> None:
        """The `count` best of all tokens for each query."""
        keys, queries = self._index_keys(index.layer), index.vectors.shape[:2]
        best, ids = top_scores(lambda part: index.scores(keys[None, part]), queries, self.host.length, count)
        every = torch.cat([best, index.generated.to(best.device)], dim=-1)
        least = every.topk(min(count, every.shape[-1])).values[..., -1]
        index.ids = ids.masked_fill(best < least.unsqueeze(-1), -1).flatten(0, 1)
        index.least = least

    def _index_keys(self, layer: int) -> Tensor:
        """Index keys `[N, dim]` of a layer, as they are stored."""
        if layer not in self._keys:
            rows = self.host.keys(layer, 0)
            kept = torch.empty(len(rows), self._dim, dtype=rows.dtype, device=self.host.device)
            for part in blocks(len(rows)):
                kept[part] = rows.read(part, self.host.device, rows.dtype)[:, rows.dim - self._dim :]
            self._keys[layer] = kept
        return self._keys[layer]
