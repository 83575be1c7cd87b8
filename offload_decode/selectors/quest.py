"""Quest: the pages of keys whose bounds allow the largest inner products with the query.

Quest, arXiv 2406.10774, §3.3-3.5, with two changes that real models asked for (docs/methods.md §3): bounds
are narrowed, and the first and the newest page are always attended. `quest-paper` is without them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from offload_decode.attention import pages_host
from offload_decode.attention.pages import page_scores, top_pages
from offload_decode.attention.pages_reference import PageBounds, places
from offload_decode.attention.queries import Queries
from offload_decode.common.errors import ConfigError
from offload_decode.kv.generated import GeneratedKV
from offload_decode.kv.page_bounds import stored_bounds
from offload_decode.selectors.base import Selector, SelectorOptions
from offload_decode.selectors.scores import page_token_scores
from offload_decode.types import PAGE_METADATA, PageSelection, Selection

SCORES = 1 << 24  # in memory at once: a long question is taken in parts
FEW = 4  # pages of a list: of fewer, two that are always attended would leave the query no choice
WHOLE_GENERATED = 4096  # tokens of a conversation that are attended to without choosing


@dataclass(frozen=True)
class Options(SelectorOptions):
    """`page_size`: tokens of a page. `metadata`: how bounds are kept, `fp16` or `int8`. `per_head`: a list of
    pages for each query head; else one for each KV head, by the largest score of its query heads. `corner`:
    the share of their width to which bounds are narrowed, from 0 to 1. `edges`: the first and the newest page
    are always attended, of lists of four pages or more.
    """

    dense_layers: str = "first:2"
    page_size: int = 16
    metadata: str = "fp16"
    per_head: bool = True
    corner: float = 0.25
    edges: bool = True


class Quest(Selector):
    """Score the bounds of all pages, attend to the best pages."""

    name = "quest"
    paper = "https://arxiv.org/abs/2406.10774"
    reads = "two bounds of every page: 2·N/S rows of fp16, or half of that in int8"
    holds = "these bounds on the device, built when a layer is first searched"
    options_type = Options
    options: Options
    per_row = False  # the rows of a group choose together

    def prepare(self) -> None:
        size, self.metadata = self.options.page_size, self.options.metadata
        if size < 1:
            raise ConfigError(f"a page holds at least one token: page_size={size} cannot be")
        if self.metadata not in PAGE_METADATA:
            raise ConfigError(
                f"unknown metadata '{self.metadata}'; choose one of: {', '.join(PAGE_METADATA)}"
            )
        if not 0 <= self.options.corner <= 1:
            raise ConfigError(f"corner={self.options.corner} is no share of the bounds' width: choose 0 to 1")
        self.page_size, self.per_head = min(size, self.host.length), self.options.per_head
        self._bounds: dict[int, PageBounds] = {}

    @property
    def whole_generated(self) -> float:
        return WHOLE_GENERATED

    def choose(self, layer: int, queries: Queries, k: int) -> PageSelection | Selection:
        """The best pages of each list, with room for `k` tokens."""
        return self.stored_pages(layer, self.lists(queries), k)

    def select_generated(self, layer: int, queries: Queries, generated: GeneratedKV) -> PageSelection | None:
        """Pages of the conversation, once it is so long that choosing among them pays: a step's cost stays
        bounded however much is written. Their bounds grow with it. Its last page is the one being filled,
        full or not, for the query's own token is there. Attended whole are several conversations at once, a
        question of several tokens, a page larger than what is wanted, and with a budget of everything.
        """
        own = self.budgets[layer]
        if own is None or own.largest >= self.host.length or queries.batch * queries.tokens > 1:
            return None
        wanted, before = max(own.largest, WHOLE_GENERATED), (generated.length - 1) // self.page_size
        if generated.length <= wanted or generated.length - before * self.page_size > wanted:
            return None
        bounds = generated.page_bounds(self.page_size, self.metadata).first(before)
        return self.best_pages(bounds, generated.length, self.lists(queries), wanted)

    def lists(self, queries: Queries) -> Tensor:
        """The rows `[Hkv, Q, G, D]` of each list of pages."""
        return queries.vectors.unsqueeze(2) if self.per_head else queries.by_list()

    def stored_pages(self, layer: int, query: Tensor, tokens: int) -> PageSelection:
        """`best_pages` of the store."""
        return self.best_pages(self.bounds(layer), self.host.length, query, tokens, self.options.edges)

    def best_pages(
        self, bounds: PageBounds, n_tokens: int, query: Tensor, tokens: int, edges: bool = False
    ) -> PageSelection:
        """The best of the pages of `n_tokens` tokens for `query [Hkv, Q, G, D]`, cut to exactly `tokens ≤
        n_tokens` of them; with `edges` the first page and the newest one are among them, unless these are
        few. What follows the pages of `bounds` is the page being filled: it comes first.
        """
        whole = bounds.lower.shape[1]
        rest = n_tokens - whole * self.page_size
        wanted = -(-max(0, tokens - rest) // self.page_size)
        step = max(1, SCORES // max(1, len(query) * whole))

        def best(part: Tensor) -> Tensor:
            scores = page_scores(part, bounds, self.options.corner)
            if edges and wanted >= FEW:
                scores[:, :, :1] = torch.inf
                scores[:, :, whole if rest else whole - 1 :] = torch.inf
            return top_pages(scores, wanted)

        parts = [best(part) for part in torch.split(query, step, 1)]
        pages = torch.cat(parts, dim=1)
        if rest and tokens:
            pages = pad(pages, (1, 0), value=whole)
        limit = places(torch.full((len(query),), tokens, device=query.device), rest, self.page_size)
        return PageSelection(pages, self.page_size, limit, shared=not self.per_head)

    def bounds(self, layer: int) -> PageBounds:
        """Bounds of the whole pages of a layer, on the device."""
        if layer not in self._bounds:
            stored = stored_bounds(self.host.store, layer, self.page_size, self.metadata).bounds
            self._bounds[layer] = stored.first(self.host.length // self.page_size).to(self.host.device)
        return self._bounds[layer]


@dataclass(frozen=True)
class PaperOptions(Options):
    """Those of the paper, and of its models, in which every query head has a KV head of its own."""

    corner: float = 1.0
    edges: bool = False


class PaperQuest(Quest):
    """Score the bounds of all pages, attend to the best pages, as the paper has it."""

    name = "quest-paper"
    options_type = PaperOptions


@dataclass(frozen=True)
class TopKOptions(Options):
    """`coarse`: how many times the budget's tokens the pages of the first stage hold."""

    per_head: bool = False
    coarse: int = 4


class QuestTopK(Quest):
    """Choose pages for the group, then each query head's own k best of their tokens.

    Pages are a coarse filter on the device, then come exact scores of their keys on the host: only the values
    of the k best tokens travel (docs/methods.md §3, two stages).
    """

    name = "quest+topk"
    paper = "https://arxiv.org/abs/2406.10774"
    reads = "two bounds of every page, and the keys of the pages they lead to"
    holds = "the bounds on the device, built when a layer is first searched"
    options_type = TopKOptions
    options: TopKOptions

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
        step = max(1, SCORES // max(1, heads * group * tokens))
        parts = [self._best_tokens(layer, part, tokens, k) for part in torch.split(query, step, 1)]
        ids, scores = (torch.cat(side, dim=1) for side in zip(*parts, strict=True))
        if self.per_head:
            return Selection(ids.squeeze(2), scores.squeeze(2))
        return Selection(queries.by_query(ids), queries.by_query(scores))

    def _best_tokens(self, layer: int, query: Tensor, tokens: int, k: int) -> tuple[Tensor, Tensor]:
        """Ids and scores `[Hkv, Q, G, k]` for `query [Hkv, Q, G, D]`."""
        chosen = self.stored_pages(layer, query, tokens)
        ids, scores = page_token_scores(query, self.host.layer_keys(layer), chosen)
        place = pages_host.top_pages(scores.flatten(1, 2), k).reshape(*scores.shape[:3], -1)
        return ids.expand(scores.shape).gather(3, place), scores.gather(3, place)
