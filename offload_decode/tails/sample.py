"""The unselected tail by importance sampling: an unbiased estimate that states its error.

A token is drawn through its cluster (docs/methods.md §2). A cluster's probability is its share of the
attention by `tails.clusters`, mixed with its share of the tokens so that no weight is unbounded; the tokens
of a cluster are equally likely, and selected tokens are never drawn. With weights 1 / (m · p) the denominator
and the numerator of the attention are unbiased. Draws are stratified, one from each m-th of the probability,
so that a cluster is drawn as often as it should be, to within one or two.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from offload_decode.attention.queries import Queries
from offload_decode.attention.states import softmax
from offload_decode.kv.host import HostKV
from offload_decode.tails.base import HOST, Estimate, Selected, Tail
from offload_decode.tails.clusters import HeadClusters

CLUSTER_SIZE = 16
UNIFORM = 0.1  # the share of draws that ignore the query


class SampleTail(Tail):
    """`sample:256`: 256 draws for each row.

    The draws follow from `seed` and the row alone: rows of one KV head use the same random numbers, so that
    a row's estimate is the same in any batch. The stated error is the successive-difference estimate for
    stratified draws (Wolter, Introduction to Variance Estimation, §8.2): never too small on average.
    """

    name = "sample"
    default_size = 256
    least_size = 2
    states_error = True

    def __init__(self, host: HostKV, size: int, seed: int = 0):
        super().__init__(host, size)
        self.seed = seed
        self.clusters = HeadClusters(host, CLUSTER_SIZE)
        self._places: dict[tuple[int, int], Tensor] = {}

    @property
    def nbytes(self) -> int:
        """The clusters that draws go through, and each token's place in them."""
        return self.clusters.nbytes + sum(places.nbytes for places in self._places.values())

    def width(self, layer: int, head: int) -> int:
        """A handful of numbers for each cluster, and the keys and values of the draws."""
        widest = max(self.host.keys(layer, head).dim, self.host.values(layer, head).dim)
        return max(len(self.clusters.get(layer, head).sizes), self.size * widest)

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
        clusters = self.clusters.get(layer, head)
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
        place = _unselected(
            self._place_of(layer, head)[selected.ids.clamp(min=0)], selected.padding, rank.long()
        )
        tokens = torch.from_numpy(clusters.members)[place.clamp(max=len(clusters.members) - 1)].long()
        return tokens, (chance / size).log().float().masked_fill(none, torch.inf)

    def _place_of(self, layer: int, head: int) -> Tensor:
        """Where each token stands among the members of all clusters: int32 `[N]`."""
        if (layer, head) not in self._places:
            members = torch.from_numpy(self.clusters.get(layer, head).members)
            order = torch.arange(len(members), dtype=torch.int32)
            self._places[layer, head] = torch.empty_like(members).scatter_(0, members.long(), order)
        return self._places[layer, head]


def _unselected(places: Tensor, padding: Tensor, rank: Tensor) -> Tensor:
    """The places `[r, m]` that are not among the selected `places [r, k]` and have `rank [r, m]` such places
    before them.
    """
    beyond = torch.iinfo(torch.int64).max
    ordered = places.long().masked_fill(padding, beyond).sort(dim=1).values
    before = ordered - torch.arange(places.shape[1])  # unselected ones before each selected one
    return rank + torch.searchsorted(before, rank, right=True)
