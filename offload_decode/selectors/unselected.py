"""The unselected tokens: an estimate of the attention to the stored tokens that a query did not select.

A step attends exactly to the selected tokens; the estimate is the state of all others, so that every token
counts once (docs/methods.md §1). It is computed on the host, where keys and values lie.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import isqrt
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from offload_decode.attention.pages_reference import page_tokens
from offload_decode.attention.queries import Queries, empty_state, softmax
from offload_decode.common.errors import ConfigError
from offload_decode.indexes.clusters.kmeans import Clusters, build
from offload_decode.kv.host_cache import SCORES, HostKV
from offload_decode.types import PageSelection, Selection

HOST = torch.device("cpu")


class Estimate(NamedTuple):
    """The state of the unselected tokens: `out [..., D]`, `lse [...]`, empty where there are none.

    deviation: `[...]`, the natural log of the standard error of `exp(lse)`; None where it is not known.
    """

    out: Tensor
    lse: Tensor
    deviation: Tensor | None = None


@dataclass(frozen=True)
class Selected:
    """What r rows of one KV head selected: `ids [r, k]` int64, padded with -1; their q·k, or None."""

    ids: Tensor
    scores: Tensor | None

    @property
    def padding(self) -> Tensor:
        """True `[r, k]` where an id is padding."""
        return self.ids < 0


class Tail(ABC):
    """One way of estimating. `size` is the number after the colon in `-o tail=name:size`; `states_error`
    says whether estimates come with their deviation.
    """

    default_size: ClassVar[int]
    least_size: ClassVar[int] = 1
    largest_size: ClassVar[int] = 1 << 16
    states_error: ClassVar[bool] = False
    cluster_size: ClassVar[int | None] = None  # keys of a cluster, on average; None: as many as the size

    def __init__(self, host: HostKV, size: int):
        self.host = host
        self.size = size
        self._clusters: dict[tuple[int, int], Clusters] = {}
        self._derived: dict[tuple[int, int], Tensor] = {}  # what a kind makes of the clusters

    def clusters(self, layer: int, head: int) -> Clusters:
        """The clusters of one KV head's keys, built when first asked for and kept."""
        if (layer, head) not in self._clusters:
            self._clusters[layer, head] = build(
                self.host.keys(layer, head).array, self.cluster_size or self.size
            )
        return self._clusters[layer, head]

    def estimate(self, layer: int, queries: Queries, selection: Selection | PageSelection) -> Estimate:
        """The state of what `selection`, which is not everything, leaves out, for each row `[Hkv, R]`."""
        rows = queries.vectors.cpu()
        state = empty_state(rows, self.host.values(layer, 0).dim)
        deviation = torch.full_like(state.lse, -torch.inf) if self.states_error else None
        lists, list_of_row = selected_lists(selection, queries, self.host.length)
        scores = selection.scores if isinstance(selection, Selection) else None
        for head in range(rows.shape[0]):
            for part in self._parts(layer, head, rows.shape[1], lists.shape[2]):
                own = None if scores is None else scores[head, part].cpu()
                selected = Selected(lists[head, list_of_row[part]], own)
                estimate = self.estimate_rows(layer, head, queries, rows[head, part], selected)
                state.out[head, part], state.lse[head, part] = estimate.out, estimate.lse
                if deviation is not None and estimate.deviation is not None:
                    deviation[head, part] = estimate.deviation
        device = queries.vectors.device
        deviation = None if deviation is None else deviation.to(device)
        return Estimate(state.out.to(device), state.lse.to(device), deviation)

    def _parts(self, layer: int, head: int, rows: int, k: int) -> list[slice]:
        # A row meets every cluster, and the tokens that the part's rows selected.
        step = max(1, min(SCORES // self.width(layer, head), isqrt(SCORES // max(1, k))))
        return [slice(start, start + step) for start in range(0, rows, step)]

    @abstractmethod
    def width(self, layer: int, head: int) -> int:
        """Numbers in memory for each row."""

    @abstractmethod
    def estimate_rows(
        self, layer: int, head: int, queries: Queries, rows: Tensor, selected: Selected
    ) -> Estimate:
        """The estimate for `rows [r, D]` of one KV head."""


def selected_lists(
    selection: Selection | PageSelection, queries: Queries, n_tokens: int
) -> tuple[Tensor, Tensor]:
    """Lists of selected tokens `[Hkv, Q, k]` int64, padded with -1, and the list of each row `[R]` int64."""
    each = torch.arange(queries.vectors.shape[1])
    if isinstance(selection, Selection):
        assert selection.ids is not None, "everything is selected: there is no tail"
        return selection.ids.cpu(), each
    lists = page_tokens(selection.pages, selection.page_size, n_tokens, selection.limit).cpu()
    if not selection.shared:
        return lists, each
    sequence, token = each // (queries.group * queries.tokens), each % queries.tokens
    return lists, sequence * queries.tokens + token


class ClusterEstimate(Tail):
    """`clusters:16`: clusters of 16 keys on average, each standing for its unselected tokens at their mean.

    Selected tokens are taken out of their cluster's size, key sum and value sum (docs/methods.md §2). By
    Jensen's inequality the estimated denominator is too small; a second-order correction by the keys'
    variance mends that, but worsened the output, so there is none.
    """

    default_size = 16

    def width(self, layer: int, head: int) -> int:
        """A handful of numbers for each cluster."""
        return len(self.clusters(layer, head).sizes)

    def estimate_rows(
        self, layer: int, head: int, queries: Queries, rows: Tensor, selected: Selected
    ) -> Estimate:
        """Attention to what is left of the clusters."""
        clusters = self.clusters(layer, head)
        union, place = torch.unique(selected.ids.clamp(min=0), return_inverse=True)
        scores = selected.scores
        if scores is None:
            scores = (rows @ self.host.keys(layer, head).read(union, HOST).T).gather(1, place)
        owner = torch.from_numpy(clusters.labels)[selected.ids.clamp(min=0)].long()

        left = torch.from_numpy(clusters.sizes).float().expand(len(rows), -1)
        left = left.scatter_add(1, owner, selected.padding.float() - 1)
        score_sums = rows @ torch.from_numpy(clusters.sums).T
        score_sums.scatter_add_(1, owner, -scores.masked_fill(selected.padding, 0))
        logits = queries.logits(score_sums / left.clamp(min=1)) + left.log()
        weights, lse = softmax(logits)
        weights /= left.clamp(min=1)

        taken = torch.zeros(len(rows), len(union))
        taken.scatter_add_(1, place, weights.gather(1, owner).masked_fill(selected.padding, 0))
        values = self.host.values(layer, head).read(union, HOST)
        if (layer, head) not in self._derived:
            every = clusters.sum_of(self.host.values(layer, head).array)
            self._derived[layer, head] = torch.from_numpy(every)
        return Estimate(weights @ self._derived[layer, head] - taken @ values, lse)


UNIFORM = 0.1  # the share of draws that ignore the query


class SampleEstimate(Tail):
    """`sample:256`: 256 draws for each row: an unbiased estimate by importance sampling that states its
    error.

    A token is drawn through its cluster (docs/methods.md §2). A cluster's probability is its estimated share
    of the attention, mixed with its share of the tokens so that no weight is unbounded; the tokens of a
    cluster are equally likely, and selected tokens are never drawn. With weights 1 / (m · p) the denominator
    and the numerator of the attention are unbiased. Draws are stratified, one from each m-th of the
    probability, so that a cluster is drawn as often as it should be, to within one or two.

    The draws follow from `seed` and the row alone: rows of one KV head use the same random numbers, so that
    a row's estimate is the same in any batch. The stated error is the successive-difference estimate for
    stratified draws (Wolter, Introduction to Variance Estimation, §8.2): never too small on average.
    """

    default_size = 256
    least_size = 2
    states_error = True
    cluster_size = 16
    seed = 0

    def width(self, layer: int, head: int) -> int:
        """A handful of numbers for each cluster, and the keys and values of the draws."""
        widest = max(self.host.keys(layer, head).dim, self.host.values(layer, head).dim)
        return max(len(self.clusters(layer, head).sizes), self.size * widest)

    def estimate_rows(
        self, layer: int, head: int, queries: Queries, rows: Tensor, selected: Selected
    ) -> Estimate:
        """Weighted attention to the draws."""
        tokens, log_p = self._draw(layer, head, queries, rows, selected)
        keys, values = (
            stored.read(tokens.flatten(), HOST).reshape(*tokens.shape, -1)
            for stored in (self.host.keys(layer, head), self.host.values(layer, head))
        )
        weights, lse = softmax(queries.logits(torch.einsum("rd,rmd->rm", rows, keys)) - log_p)
        out = torch.einsum("rm,rmd->rd", weights, values)
        # A draw's weight is its estimate of the denominator as a share of m times their mean.
        m = self.size
        variance = weights.diff(dim=1).square().sum(1) * (m / (2 * (m - 1)))
        lse = lse - math.log(m)
        return Estimate(out, lse, variance.log() / 2 + lse)

    def _draw(
        self, layer: int, head: int, queries: Queries, rows: Tensor, selected: Selected
    ) -> tuple[Tensor, Tensor]:
        """Tokens `[r, m]` and the log of their probability in a draw, infinite where a row left none."""
        clusters = self.clusters(layer, head)
        sizes = torch.from_numpy(clusters.sizes).double()
        owner = torch.from_numpy(clusters.labels)[selected.ids.clamp(min=0)].long()
        left = sizes.expand(len(rows), -1).scatter_add(1, owner, selected.padding.double() - 1)
        none = left.sum(1, keepdim=True) == 0
        left = torch.where(none, sizes, left)

        means = (rows @ torch.from_numpy(clusters.sums).T) / sizes.clamp(min=1).float()
        attention = torch.softmax(queries.logits(means).double() + left.log(), dim=1)
        share = (1 - UNIFORM) * attention + UNIFORM * left / left.sum(1, keepdim=True)

        uniform = np.random.default_rng([self.seed, layer, head]).random(self.size)
        upto = share.cumsum(1)
        point = torch.from_numpy((np.arange(self.size) + uniform) / self.size) * upto[:, -1:]
        chosen = torch.searchsorted(upto, point, right=True).clamp(max=len(sizes) - 1)
        # How far a point lies into its cluster's share says which of the cluster's tokens it is.
        size, chance = left.gather(1, chosen), share.gather(1, chosen)
        into = (1 - (upto.gather(1, chosen) - point) / chance) * size
        rank = (left.cumsum(1) - left).gather(1, chosen) + into.floor().clamp(
            torch.zeros_like(size), size - 1
        )
        if (layer, head) not in self._derived:  # each token's place among the members of all clusters
            members = torch.from_numpy(clusters.members)
            order = torch.arange(len(members), dtype=torch.int32)
            self._derived[layer, head] = torch.empty_like(members).scatter_(0, members.long(), order)
        places = self._derived[layer, head][selected.ids.clamp(min=0)]
        place = _unselected(places, selected.padding, rank.long())
        tokens = torch.from_numpy(clusters.members)[place.clamp(max=len(clusters.members) - 1)].long()
        return tokens, (chance / size).log().float().masked_fill(none, torch.inf)


def _unselected(places: Tensor, padding: Tensor, rank: Tensor) -> Tensor:
    """Places `[r, m]` not among the selected `[r, k]` that have `rank [r, m]` such ones before them."""
    beyond = torch.iinfo(torch.int64).max
    ordered = places.long().masked_fill(padding, beyond).sort(dim=1).values
    before = ordered - torch.arange(places.shape[1])  # unselected ones before each selected one
    return rank + torch.searchsorted(before, rank, right=True)


OFF = "off"
_KINDS: dict[str, type[Tail]] = {"clusters": ClusterEstimate, "sample": SampleEstimate}


def create(option: str, host: HostKV) -> Tail | None:
    """The estimate of `off`, `name` or `name:size`; None is off. Raises `ConfigError` for anything else."""
    if option == OFF:
        return None
    name, colon, number = option.partition(":")
    if name not in _KINDS:
        raise ConfigError(
            f"tail '{option}' is unknown: choose {OFF}, {' or '.join(_KINDS)}, or one with a size, "
            "as in sample:512"
        )
    kind = _KINDS[name]
    size = kind.default_size
    if colon:
        whole = number.isascii() and number.isdigit() and len(number) < 10
        if not (whole and kind.least_size <= int(number) <= kind.largest_size):
            raise ConfigError(
                f"tail '{option}' needs a whole number from {kind.least_size} to {kind.largest_size} "
                f"after the colon, as in {name}:{kind.default_size}"
            )
        size = int(number)
    return kind(host, size)
