"""The unselected tail as clusters of keys: each stands for its remaining tokens at their mean key and value.

Selected tokens are taken out of their cluster's size, key sum and value sum, so that what is left is the mean
of the unselected tokens alone (docs/methods.md §2). By Jensen's inequality the estimated denominator is too
small; a second-order correction by the keys' variance mends that, but worsened the output, so there is none.
"""

from __future__ import annotations

import torch
from torch import Tensor

from offload_decode.attention.queries import Queries
from offload_decode.attention.states import softmax
from offload_decode.indexes.key_groups import Clusters, build
from offload_decode.kv.host import HostKV
from offload_decode.tails.base import HOST, Estimate, Selected, Tail


class HeadClusters:
    """The clusters of every (layer, KV head), built when first asked for and kept."""

    def __init__(self, host: HostKV, size: int):
        self.host = host
        self.size = size
        self._built: dict[tuple[int, int], Clusters] = {}

    def get(self, layer: int, head: int) -> Clusters:
        """The clusters of one KV head's keys."""
        if (layer, head) not in self._built:
            self._built[layer, head] = build(self.host.keys(layer, head).array, self.size)
        return self._built[layer, head]

    @property
    def nbytes(self) -> int:
        """Bytes of those that were built."""
        return sum(built.nbytes for built in self._built.values())


class ClusterTail(Tail):
    """`clusters:16`: clusters of 16 keys on average."""

    name = "clusters"
    default_size = 16

    def __init__(self, host: HostKV, size: int):
        super().__init__(host, size)
        self.clusters = HeadClusters(host, size)
        self._values: dict[tuple[int, int], Tensor] = {}

    @property
    def nbytes(self) -> int:
        """The clusters with their values' sums."""
        return self.clusters.nbytes + sum(sums.nbytes for sums in self._values.values())

    def width(self, layer: int, head: int) -> int:
        """A handful of numbers for each cluster."""
        return len(self.clusters.get(layer, head).sizes)

    def estimate_rows(
        self, layer: int, head: int, queries: Queries, rows: Tensor, selected: Selected
    ) -> Estimate:
        """Attention to what is left of the clusters."""
        clusters = self.clusters.get(layer, head)
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
        out = weights @ self._value_sums(layer, head) - taken @ values
        return Estimate(out, lse)

    def _value_sums(self, layer: int, head: int) -> Tensor:
        if (layer, head) not in self._values:
            values = self.host.values(layer, head).array
            self._values[layer, head] = torch.from_numpy(self.clusters.get(layer, head).sum_of(values))
        return self._values[layer, head]
