"""A selector held to its budgets: every KV head of a layer gets as many tokens as its budget says.

A budget `mass=0.99` asks for the smallest k that holds a share of the attention: exact scores at the top, an
estimate of the rest (docs/methods.md §2, beyond the top-k paper).

A selection is asked for 256 tokens a row, then for at least four times as many, until every row holds
its share, and each row is cut to the smallest prefix that does. What the tokens outside a selection
weigh is estimated from a fixed uniform sample of m stored keys: the mean weight of the sampled tokens
that were not selected, times the number of tokens that were not. With N ≤ m the estimate is exact.
Otherwise, for the k best of N tokens that hold the share s, the draw of the sample moves the estimated
share by a standard deviation of at most sqrt(N / (k·m) · s·(1-s)), because no other token weighs more
than the k-th, at most s/k of the whole. That worst case is a rest of a few tokens as heavy as the k-th,
which a small sample misses. Tokens that are not the k best leave a rest without such a bound.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from offload_decode.attention.pages_reference import places
from offload_decode.attention.queries import Queries
from offload_decode.kv.host_cache import HostKV
from offload_decode.selectors.base import EVERYTHING, Selector
from offload_decode.selectors.budgets import SELECTED_IDS, LayerBudget, any_by_mass
from offload_decode.selectors.scores import page_token_scores
from offload_decode.types import PageSelection, Selection

FIRST, GROWTH = 256, 4
SLACK = 1.25  # on what a row is estimated to lack: asking again costs more than asking for too many
SAMPLE = 1024
GATHERED = 1 << 22  # numbers of the keys that are scored at a time
Chosen = Selection | PageSelection


class Rest(NamedTuple):
    """The tokens outside a selection, `others [Hkv, R]` of them, as a sample shows them: `logits
    [Hkv, R, m]`, -inf where the sampled token is selected.
    """

    logits: Tensor
    others: Tensor

    def each(self) -> Tensor:
        """How many of the others each sampled token stands for, `[Hkv, R]`; inf where none was sampled."""
        return torch.where(self.others == 0, 0.0, self.others / self.logits.isfinite().sum(-1))

    def log_sum(self) -> Tensor:
        """Log of the estimated sum of exp(logit), `[Hkv, R]`: -inf for none, +inf if none was sampled."""
        each = self.each()
        total = torch.logsumexp(self.logits, -1) + each.log()
        return torch.where(each.isinf(), torch.inf, torch.where(each == 0, -torch.inf, total))

    def needed(self, whole: Tensor, share: Tensor) -> Tensor:
        """How many of the others, the heaviest first, hold about `share` of exp(`whole`): all `[Hkv, R]`."""
        each = self.each()
        weights = torch.exp(self.logits - whole.unsqueeze(-1)).sort(-1, descending=True).values
        held = weights.double().cumsum(-1) * each.unsqueeze(-1)
        return (((held < share.unsqueeze(-1)).sum(-1) + 1) * each).minimum(self.others)


class MassBudget:
    """Selections by share of the attention; a layer's sample is drawn once and kept on the device."""

    def __init__(self, host: HostKV, sample: int = SAMPLE):
        self.host = host
        self.size = min(sample, host.length)
        self._samples: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def select(
        self, layer: int, queries: Queries, budget: LayerBudget, choose: Callable[[int], Chosen]
    ) -> Selection:
        """The smallest prefixes of what `choose(k)` gives that hold each head's mass; all of it if none does.

        Everything, once the rows together take (by estimate) half of all tokens or more, or more than may be
        held at once: reading in order costs no more than picking out half.
        """
        device, n_tokens, rows = self.host.device, self.host.length, queries.vectors.shape[:2].numel()
        wanted = [head.mass for head in budget.heads]
        share = torch.tensor(wanted, dtype=torch.float64, device=device).unsqueeze(-1)
        most = min(n_tokens, SELECTED_IDS // rows + 1)
        k, moved = min(FIRST, most), 0
        while True:
            tokens = scored(self.host, layer, queries, choose(k))
            if tokens.ids is None:
                return tokens
            scores = tokens.scores
            assert scores is not None
            moved += tokens.moved
            rest = self.rest(layer, queries, tokens.ids)
            logits = queries.logits(scores).masked_fill(scores.isneginf(), -torch.inf)
            whole = torch.logaddexp(torch.logsumexp(logits, -1), rest.log_sum())
            held = torch.exp(logits - whole.unsqueeze(-1)).double().cumsum(-1)
            kept = ((held < share.unsqueeze(-1)).sum(-1) + 1).clamp(max=k)
            short = (held[..., -1] < share) & (k < n_tokens)
            lacking = rest.needed(whole, share - held[..., -1]) * short
            taken = kept.minimum(n_tokens - rest.others) + lacking
            if 2 * taken.sum() >= rows * n_tokens or (k == most and short.any()):
                return Selection(ids=None)
            if not short.any():
                return replace(cut(Selection(tokens.ids, scores), kept), moved=moved)
            k = min(max(GROWTH * k, k + int(SLACK * lacking.max())), most)

    def rest(self, layer: int, queries: Queries, ids: Tensor) -> Rest:
        """What is known of the tokens that are not among `ids [Hkv, R, k]` (padded with -1)."""
        logits = []
        for head, own in enumerate(ids.to(self.host.device)):
            sampled, keys = self.sample(layer, head)
            place = torch.searchsorted(sampled, own.contiguous()).clamp(max=self.size - 1)
            place = torch.where(sampled[place] == own, place, self.size)
            selected = torch.zeros(len(own), self.size + 1, dtype=torch.bool, device=own.device)
            selected = selected.scatter_(1, place, True)[:, : self.size]
            every = queries.logits(queries.vectors[head] @ keys.T)
            logits.append(every.masked_fill(selected, -torch.inf))
        others = self.host.length - (ids >= 0).sum(-1)
        return Rest(torch.stack(logits), others.to(self.host.device))

    def sample(self, layer: int, head: int) -> tuple[Tensor, Tensor]:
        """Ids `[m]` int64, ascending, and keys `[m, D]` float32 of one head; the same in every process."""
        if (layer, head) not in self._samples:
            drawn = np.random.default_rng((layer, head)).choice(self.host.length, self.size, replace=False)
            ids = torch.from_numpy(np.sort(drawn))
            keys = self.host.keys(layer, head).read(ids, self.host.device)
            self._samples[layer, head] = ids.to(self.host.device), keys
        return self._samples[layer, head]


def cut(selection: Selection, kept: Tensor) -> Selection:
    """The first `kept [Hkv, R]` or `[Hkv, 1]` places of each row."""
    assert selection.ids is not None
    places = torch.arange(selection.ids.shape[2], device=kept.device)
    beyond = (places >= kept.unsqueeze(-1)).to(selection.ids.device)
    ids = selection.ids.masked_fill(beyond, -1)
    scores = selection.scores
    if scores is not None:
        scores = scores.masked_fill(beyond.to(scores.device), -torch.inf)
    return replace(selection, ids=ids, scores=scores)


def scored(host: HostKV, layer: int, queries: Queries, chosen: Chosen) -> Selection:
    """A selection as tokens of each row (pages: in their order) with their inner products on the device."""
    if isinstance(chosen, Selection):
        return chosen if chosen.ids is None else exact_scores(host, layer, queries, chosen)
    query = queries.by_list() if chosen.shared else queries.vectors.unsqueeze(2)
    ids, scores = page_token_scores(query, host.layer_keys(layer), chosen)
    # A ragged page leaves padding between tokens: places are counted later, so it goes to the end.
    order = (ids < 0).int().argsort(dim=-1, stable=True)
    ids, scores = ids.gather(-1, order), scores.gather(-1, order.expand_as(scores))
    if chosen.shared:
        return Selection(queries.by_query(ids), queries.by_query(scores).to(host.device))
    return Selection(ids.squeeze(2), scores.squeeze(2).to(host.device))


def exact_scores(host: HostKV, layer: int, queries: Queries, tokens: Selection) -> Selection:
    """Selected tokens with their inner products q·k, -inf in the padding: the selection's own where it has
    them, otherwise from the stored keys, few of them in float32 at a time.
    """
    if tokens.scores is not None:
        return replace(tokens, scores=tokens.scores.to(host.device))
    assert tokens.ids is not None
    scores, moved = torch.empty(tokens.ids.shape, device=host.device), 0
    per_row = tokens.ids.shape[2]
    for head, ids in enumerate(tokens.ids.flatten(1)):
        keys = host.keys(layer, head)
        moved += len(ids) * keys.row_bytes
        step = max(1, GATHERED // keys.dim)
        for start in range(0, len(ids), step):
            own = ids[start : start + step].clamp(min=0)
            row = torch.arange(start, start + len(own), device=host.device) // per_row
            products = keys.read(own, host.device) * queries.vectors[head, row]
            scores[head].view(-1)[start : start + len(own)] = products.sum(-1)
    return Selection(tokens.ids, scores.masked_fill((tokens.ids < 0).to(host.device), -torch.inf), moved)


class Budgeted:
    """A selector as a step asks it for tokens. Forks share the budgets, not what they remember."""

    def __init__(self, selector: Selector, mass: MassBudget | None = None):
        self.selector = selector
        self._mass = mass or MassBudget(selector.host)
        # Whether there is anything to fork, and anybody to see the queries.
        self.forks = type(selector).fork is not Selector.fork
        self._observes = type(selector).observe is not Selector.observe

    def select(self, layer: int, queries: Queries) -> Selection | PageSelection:
        """Tokens for the rows of `queries`, as many as the budgets of the layer's heads allow."""
        if self._observes:
            self.selector.observe(layer, queries)
        budget = self.selector.budgets[layer]
        if budget is None:
            return EVERYTHING
        if budget.by_mass:
            return self._mass.select(
                layer, queries, budget, lambda k: self.selector.choose(layer, queries, k)
            )
        if self.selector.takes_all(layer, budget.largest):
            return EVERYTHING
        chosen = self.selector.choose(layer, queries, budget.largest)
        return _for_each_head(chosen, budget, self.selector.host.length) if budget.uneven else chosen

    def queries_at_once(self, layer: int, most: int) -> float:
        """How many queries of a KV head may choose together, so that at most `most` tokens are chosen."""
        budget = self.selector.budgets[layer]
        if budget is None or not self.selector.per_row:
            return torch.inf
        return most // max(1, budget.largest * len(budget.heads))

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
    counts = torch.tensor([head.tokens for head in budget.heads])
    if isinstance(chosen, PageSelection):
        own = places(counts, n_tokens % chosen.page_size, chosen.page_size)
        limit = chosen.limit.minimum(own.to(chosen.limit.device))
        starts = torch.arange(chosen.pages.shape[2], device=limit.device) * chosen.page_size
        pages = chosen.pages.masked_fill(starts >= limit[:, None, None], -1)
        return replace(chosen, pages=pages, limit=limit)
    return chosen if chosen.ids is None else cut(chosen, counts.unsqueeze(-1))
