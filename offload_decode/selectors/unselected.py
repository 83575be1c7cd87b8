"""The unselected tokens: an estimate of the attention to the stored tokens that a query did not select.

A step attends exactly to the selected tokens; the estimate is the state of all others, so that every token
counts once (docs/methods.md §1). It is computed on the host, where keys and values lie.
"""

import math
import warnings
from abc import ABC, abstractmethod
from math import isqrt
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from offload_decode.attention.pages_reference import page_tokens
from offload_decode.attention.queries import Queries, empty_state, softmax
from offload_decode.common.errors import ConfigError, OffloadDecodeWarning
from offload_decode.common.rows import encodings
from offload_decode.indexes.clusters.index import ClusteredIndex
from offload_decode.indexes.clusters.summaries import groups_of
from offload_decode.kv.host_cache import SCORES, HostKV
from offload_decode.kv.indexes import AUTO
from offload_decode.selectors.base import Selector
from offload_decode.selectors.topk import HeadIndexes, TopK
from offload_decode.types import PageSelection, Selection

HOST = torch.device("cpu")
NOT_ESTIMATED = (
    "What is not selected is not estimated: the index is of an earlier version, or cannot be read. "
    "`offload-decode index {}` builds it again."
)


class Estimate(NamedTuple):
    """The state of the unselected tokens: `out [..., D]`, `lse [...]`, empty where there are none.

    deviation: `[...]`, the natural log of the standard error of `exp(lse)`; None where it is not known.
    """

    out: Tensor
    lse: Tensor
    deviation: Tensor | None = None


class Tail(ABC):
    """One way of estimating, by the summaries of clusters: of the index that is searched, or was built; where
    there is none, they are made in memory, layer by layer, unless `built` ones are asked for.
    """

    def __init__(self, host: HostKV, indexes: HeadIndexes, built: bool = False):
        self.host, self.indexes, self.built = host, indexes, built
        self._made: dict[int, list[ClusteredIndex]] = {}
        self._warned = False

    def clusters(self, layer: int) -> list[ClusteredIndex] | None:
        """Those of every KV head; None where `built` ones have no summaries, as those of earlier versions,
        which is warned of once.
        """
        if layer in self._made:
            return self._made[layer]
        heads = range(len(self.host.layer_keys(layer)))
        found = self.indexes.layer(layer, len(heads)) if self.indexes.kind == "clusters" else []
        loaded = [index for index in found if isinstance(index, ClusteredIndex)]
        if self.built:
            whole = len(loaded) == len(heads) and all(index.summarized for index in loaded)
            if not whole and not self._warned:
                self._warned = True
                warnings.warn(OffloadDecodeWarning(NOT_ESTIMATED.format(self.host.store.path)), stacklevel=2)
            return loaded if whole else None
        if len(loaded) < len(heads):
            stored = ((self.host.keys(layer, head), self.host.values(layer, head)) for head in heads)
            loaded = [ClusteredIndex.untuned(keys.array, values.array) for keys, values in stored]
        for head, index in enumerate(loaded):
            index.summarize(self.host.values(layer, head).array)
        self._made[layer] = loaded
        return loaded

    @abstractmethod
    def estimate(self, layer: int, queries: Queries, selection: Selection | PageSelection) -> Estimate:
        """The state of what `selection`, which is not everything, leaves out, for each row `[Hkv, R]`."""


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
    """`clusters`: groups of about eight keys stand at their mean, less the selected ones, and cells of little
    weight at theirs (docs/methods.md §2).

    By Jensen's inequality the estimated denominator is too small; a second-order correction by the keys'
    variance mends that, but worsened the output, so there is none.
    """

    def estimate(self, layer: int, queries: Queries, selection: Selection | PageSelection) -> Estimate:
        heads = self.clusters(layer)
        if heads is None:
            return Estimate(*empty_state(queries.vectors, self.host.values(layer, 0).dim))
        rows = queries.on_host().contiguous().numpy()
        dim, how = self.host.values(layer, 0).dim, (queries.scaling, queries.softcap)
        if isinstance(selection, Selection):
            scores = None if selection.scores is None else selection.scores.cpu().contiguous().numpy()
            ids, _ = selected_lists(selection, queries, self.host.length)
            states = [ClusteredIndex.estimate(heads, rows, ids.contiguous().numpy(), scores, dim, *how)]
        else:
            lists, list_of_row = selected_lists(selection, queries, self.host.length)
            states, step = [], max(1, SCORES // max(1, lists[:, 0].numel()))
            for start in range(0, rows.shape[1], step):
                part = slice(start, start + step)
                own = np.ascontiguousarray(rows[:, part]), lists[:, list_of_row[part]].numpy()
                states.append(ClusteredIndex.estimate(heads, *own, None, dim, *how))
        out, lse = (torch.from_numpy(np.concatenate(own, axis=1)) for own in zip(*states, strict=True))
        return Estimate(out.to(queries.vectors.device), lse.to(queries.vectors.device))


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

    seed = 0

    def __init__(self, host: HostKV, indexes: HeadIndexes, size: int):
        super().__init__(host, indexes)
        self.size = size
        self._clusters: dict[tuple[int, int], _Clusters] = {}

    def estimate(self, layer: int, queries: Queries, selection: Selection | PageSelection) -> Estimate:
        rows = queries.vectors.cpu()
        state = empty_state(rows, self.host.values(layer, 0).dim)
        deviation = torch.full_like(state.lse, -torch.inf)
        lists, list_of_row = selected_lists(selection, queries, self.host.length)
        for head in range(rows.shape[0]):
            widest = max(self.host.keys(layer, head).dim, self.host.values(layer, head).dim)
            groups = len(self._of_head(layer, head).sizes)
            step = rows_at_once(groups, self.size * widest, lists.shape[2])
            for start in range(0, rows.shape[1], step):
                part = slice(start, start + step)
                selected = lists[head, list_of_row[part]]
                own = self.estimate_rows(layer, head, queries, rows[head, part], selected)
                state.out[head, part], state.lse[head, part], deviation[head, part] = own
        there = (part.to(queries.vectors.device) for part in (*state, deviation))
        return Estimate(*there)

    def _of_head(self, layer: int, head: int) -> "_Clusters":
        if (layer, head) not in self._clusters:
            heads = self.clusters(layer)
            assert heads is not None, "they are made where there are none"
            self._clusters[layer, head] = _Clusters.of(heads[head])
        return self._clusters[layer, head]

    def estimate_rows(
        self, layer: int, head: int, queries: Queries, rows: Tensor, selected: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Weighted attention to the draws, for `rows [r, D]` of one KV head that selected ids `[r, k]`."""
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
        return out, lse, variance.log() / 2 + lse

    def _draw(
        self, layer: int, head: int, queries: Queries, rows: Tensor, selected: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Tokens `[r, m]` and the log of their probability in a draw, infinite where a row left none."""
        clusters, padding = self._of_head(layer, head), selected < 0
        sizes = clusters.sizes.double()
        owner = clusters.labels[selected.clamp(min=0)].long()
        left = sizes.expand(len(rows), -1).scatter_add(1, owner, padding.double() - 1)
        none = left.sum(1, keepdim=True) == 0
        left = torch.where(none, sizes, left)

        means = rows @ clusters.means.T
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
        place = _unselected(clusters.places[selected.clamp(min=0)], padding, rank.long())
        tokens = clusters.members[place.clamp(max=len(clusters.members) - 1)].long()
        return tokens, (chance / size).log().float().masked_fill(none, torch.inf)


def rows_at_once(groups: int, drawn: int, selected: int) -> int:
    """Rows of a head that are estimated together: each meets every group, the numbers of the keys and values
    that it has `drawn`, and the tokens that the others selected.
    """
    return max(1, min(SCORES // max(groups, drawn), isqrt(SCORES // max(1, selected))))


class _Clusters(NamedTuple):
    """The groups of a head's summaries: `means [C, D]`, `sizes [C]`, the cluster of each key, `labels [N]`,
    the keys in the order of their clusters, `members [N]`, and the place of each key among these,
    `places [N]`.
    """

    means: Tensor
    sizes: Tensor
    labels: Tensor
    members: Tensor
    places: Tensor

    @staticmethod
    def bytes_of(n: int, dim: int) -> int:
        """Of `n` keys, groups being of as many as they are on average."""
        return groups_of(n) * 4 * (dim + 1) + 3 * 4 * n

    @classmethod
    def of(cls, index: ClusteredIndex) -> "_Clusters":
        cells, summaries = index.cells, index.summaries
        means = encodings.decode(encodings.as_records(summaries.keys, encodings.INT8))
        means += np.repeat(cells.means, np.diff(summaries.first), axis=0)
        members = np.argsort(summaries.labels, kind="stable").astype(np.int32)
        places = np.empty_like(members)
        places[members] = np.arange(len(members), dtype=np.int32)
        parts = means, summaries.sizes, summaries.labels, members, places
        return cls(*(torch.from_numpy(np.array(part)) for part in parts))


def _unselected(places: Tensor, padding: Tensor, rank: Tensor) -> Tensor:
    """Places `[r, m]` not among the selected `[r, k]` that have `rank [r, m]` such ones before them."""
    beyond = torch.iinfo(torch.int64).max
    ordered = places.long().masked_fill(padding, beyond).sort(dim=1).values
    before = ordered - torch.arange(places.shape[1])  # unselected ones before each selected one
    return rank + torch.searchsorted(before, rank, right=True)


OFF, CLUSTERS, SAMPLE = "off", "clusters", "sample"
DRAWS = 256
_MOST = 1 << 16


def parse(option: str) -> tuple[str, int]:
    """The way that an option `tail` names, and the draws of `sample`. Raises `ConfigError`."""
    name, colon, number = option.partition(":")
    if name not in (OFF, AUTO, CLUSTERS, SAMPLE) or (colon and name != SAMPLE):
        raise ConfigError(
            f"tail '{option}' is unknown: choose {OFF}, {AUTO}, {CLUSTERS} or {SAMPLE}, this with a number "
            "of draws as in sample:512"
        )
    whole = number.isascii() and number.isdigit() and len(number) < 10
    if colon and not (whole and 2 <= int(number) <= _MOST):
        raise ConfigError(
            f"tail '{option}' needs a whole number from 2 to {_MOST} after the colon, as in sample:{DRAWS}"
        )
    return name, int(number or DRAWS)


def held_bytes(option: str, n: int, dim: int, built: bool) -> int:
    """Bytes of memory that an estimate keeps of a KV head of `n` keys `[dim]` from its first use on. built:
    the clusters are there, on the disk. Raises as `parse`.
    """
    name, _ = parse(option)
    if name in (OFF, AUTO):
        return 0
    made = 0 if built else ClusteredIndex.untuned_bytes(n, dim)
    return made + (_Clusters.bytes_of(n, dim) if name == SAMPLE else 0)


def working_bytes(option: str, n: int, dims: tuple[int, int], stored: int, rows: int, k: int) -> int:
    """Bytes that it takes to estimate once, for `rows` queries of one KV head that select `k` tokens each.
    dims: of a key and a value; stored: the bytes of both. Raises as `parse`.
    """
    name, draws = parse(option)
    if name != SAMPLE:
        return 0  # compiled loops hold a few numbers for each group
    groups, floats = groups_of(n), 4 * sum(dims)
    together = min(rows, rows_at_once(groups, draws * max(dims), k))
    # Seven float64 for each group, the draws' keys and values as they are stored and as floats, and six int64
    # for each of the draws and of the selected tokens.
    return together * (7 * 8 * groups + draws * (stored + floats) + 6 * 8 * (draws + k))


def create(selector: Selector) -> Tail | None:
    """The estimate that a selector's option `tail` names: `off` (None), `auto` (clusters, where the index
    that is searched has them), `clusters`, `sample` or `sample:512`. Raises `ConfigError` for others.
    """
    (name, draws), host = parse(selector.options.tail), selector.host
    if name == OFF:
        return None
    searched = selector.indexes if isinstance(selector, TopK) else None
    if searched is None or (name != AUTO and searched.kind != "clusters"):
        searched = HeadIndexes(host.store, AUTO)
    if name == SAMPLE:
        return SampleEstimate(host, searched, draws)
    if name == AUTO and searched.kind != "clusters":
        return None
    return ClusterEstimate(host, searched, built=name == AUTO)
