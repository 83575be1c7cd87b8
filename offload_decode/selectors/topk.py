"""Top-k decoding: the k stored keys with the largest inner product, for every query head, by an index of each
KV head (`kv.indexes`).

Synk et al. 2025 (arXiv 2502.06766), Algorithm 1, but that the parts are merged as docs/methods.md §1 says.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch

from offload_decode.attention.host_tokens import score_tokens
from offload_decode.attention.queries import Queries
from offload_decode.attention.rows import Rows
from offload_decode.common.errors import ConfigError, OffloadDecodeWarning, VectorIndexError
from offload_decode.indexes import registry
from offload_decode.indexes.base import Hits, VectorIndex
from offload_decode.indexes.clusters.index import ClusteredIndex
from offload_decode.kv.indexes import AUTO, DEFAULT, class_of, examine, index_path, kind_folder
from offload_decode.selectors.base import Attended, Selector, SelectorOptions
from offload_decode.selectors.budgets import ErrorBound, HeadBudget, LayerBudget
from offload_decode.selectors.error_bound import RUNGS, WithinError
from offload_decode.selectors.scores import top_inner_products
from offload_decode.store.base import Store
from offload_decode.types import Selection


class Oracle(Selector):
    """Score every key exactly and select the best.

    The ceiling of every selector, without an index.
    """

    name = "oracle"
    paper = "https://arxiv.org/abs/2502.06766"
    reads = "every key"
    holds = "nothing"

    def choose(self, layer: int, queries: Queries, k: int) -> Selection:
        """The k keys of largest inner product, with their scores."""
        return top_inner_products(queries.vectors, self.host.layer_keys(layer), k)


CROSSOVER = ("auto", "yes", "no")


@dataclass(frozen=True)
class Options(SelectorOptions):
    """`index`: the kind of index; `auto` is the clusters where they are built, else flat. `tail`: as for all,
    or `auto`: `clusters` where these are searched, else `off`. `crossover`: attend to everything where this
    machine does that faster than it searches, which is measured once: `yes`, `no`, or `auto`, which is yes in
    commands unless an index or a tail is asked for. `error`: how far from dense attention the output of a
    head may be, relative to its length, and how often it keeps to that, as in `0.05@0.95`, in place of a
    budget and a tail.
    """

    index: str = "auto"
    tail: str = "auto"
    crossover: str = "auto"
    error: str = ""


class TopK(Selector):
    """Search one index per (layer, KV head) with the group's queries as one batch."""

    name = "topk"
    paper = "https://arxiv.org/abs/2502.06766"
    reads = "codes of the clusters that may matter, all keys (flat), or what the index probes"
    holds = "the index (clusters: mapped); nothing with flat"
    options_type = Options
    options: Options

    def prepare(self) -> None:
        self.indexes = HeadIndexes(self.host.store, self.options.index)
        self.largest_k = self.host.length  # that is searched for
        self.fastest = False  # whether to attend to everything where that is faster
        if self.options.crossover not in CROSSOVER:
            raise ConfigError(
                f"crossover '{self.options.crossover}' is unknown: choose {', '.join(CROSSOVER)}"
            )
        self.within = self._within() if self.options.error else None

    def _within(self) -> WithinError:
        self.bound = ErrorBound.parse(self.options.error)
        for name in ("budget", "schedule", "tail"):
            if getattr(self.options, name) != getattr(Options, name):
                raise ConfigError(f"error= finds its own tokens for each query: leave {name}= out")
        if self.shape.latent:
            raise ConfigError(
                "error= bounds what heads put out, and the latents of this model are no output: give a budget"
            )
        if self.host.device.type != "cpu":
            raise ConfigError("error= attends in host memory: give a budget, or run with --device cpu")
        most = LayerBudget((HeadBudget(min(RUNGS[-1].best, self.host.length)),) * self.shape.kv_heads)
        self.budgets = {layer: own and most for layer, own in self.budgets.items()}
        return WithinError(self.host, self.bound, self.indexes.search_thoroughly)

    def takes_all(self, layer: int, k: int) -> bool:
        """Also where a search reads every key: to read the values with them takes no longer, and is exact."""
        return k > self.largest_k or (self.fastest and self.indexes.scans(layer, k))

    @property
    def searched(self) -> tuple[object, ...]:
        return self.indexes.kind, self.largest_k, self.fastest

    def report(self) -> dict[str, object]:
        asked = [(layer, own.largest) for layer, own in self.budgets.items() if own and not own.by_mass]
        dense = sum(self.takes_all(*each) for each in asked)
        where = "" if dense == len(asked) else f" in {dense} of {len(asked)} layers"
        told = {"attends": f"to everything{where}, which is faster there"} if dense else {}
        return {"index": self.indexes.describe(), **told}

    def attend(self, layer: int, queries: Queries) -> Attended | None:
        budget = self.budgets[layer]
        if self.within is None or budget is None:
            return None
        return self.within.attend(layer, queries, self.takes_all(layer, budget.largest))

    def choose(self, layer: int, queries: Queries, k: int) -> Selection:
        """The index's k best; with their scores where the index knows them exactly."""
        hits = self.indexes.search(layer, queries.on_host().numpy(), k)
        scores = torch.from_numpy(hits.scores) if self.indexes.exact_scores else None
        return Selection(torch.from_numpy(hits.ids), scores)


class HeadIndexes:
    """Indexes of one kind, loaded when first searched; `auto` is the `default_kind`.

    Raises `ConfigError` for a kind that is not built, or not finished. `auto` warns of clusters that cannot
    be searched, now or when one of them turns out to be damaged, and searches all keys.
    """

    def __init__(self, store: Store, kind: str):
        self.store = store
        self._loaded: dict[tuple[int, int], VectorIndex] = {}
        self._layers: dict[int, list[VectorIndex]] = {}  # those of which all heads are loaded
        self._scans: dict[tuple[int, int], bool] = {}
        self._may_fall_back = kind == AUTO
        self.kind = DEFAULT if kind == AUTO else kind
        self._class = class_of(store, self.kind)
        if self.kind == "flat":
            return
        built = examine(store, self.kind)
        if built is not None and built.whole:
            return
        if self._may_fall_back:
            self._fall_back(None if built is None else built.reason(store.path))
        elif built is None:
            raise ConfigError(
                f"there is no '{kind}' index beside {store.path}: build it with "
                f"`offload-decode index {store.path} --kind {kind}`, or search with -o index=flat"
            )
        elif built.there < built.heads:
            raise ConfigError(f"{built.unfinished(store.path)}, or search with -o index=flat")
        elif built.problem is not None:
            raise built.problem

    def describe(self) -> str:
        """The kind, and whether the heads that were searched are tuned to a full scan."""
        tuned = [index.recall.full_scan for index in self._loaded.values() if index.recall is not None]
        if not any(tuned):
            return self.kind
        some = "" if all(tuned) else f" in {sum(tuned):,} of {len(tuned):,} heads"
        return f"{self.kind} (tuned to a full scan{some})"

    def get(self, layer: int, head: int) -> VectorIndex:
        """The index of one head; raises VectorIndexError when it is missing, damaged or of other keys."""
        return self._all(layer, [head])[0]

    def layer(self, layer: int, heads: int) -> list[VectorIndex]:
        """The indexes of all KV heads of a layer, of one kind; raises as `get`."""
        own = self._layers.get(layer)
        if own is None:
            own = self._layers[layer] = self._all(layer, range(heads))
        return own

    def search(self, layer: int, queries: npt.NDArray[Any], k: int) -> Hits:
        """The k best keys of every KV head for its `queries [Hkv, R, D]`, in one call."""
        own = self.layer(layer, len(queries))  # which may change the kind
        return self._class.search_heads(own, queries, k)

    def search_thoroughly(self, layer: int, heads: Sequence[int], queries: npt.NDArray[Any], k: int) -> Hits:
        """As `search`, of some KV heads, with exact scores; of clusters every cell is scanned."""
        every = self.layer(layer, self.store.manifest.shape.kv_heads)
        own = [every[head] for head in heads]
        if self.kind == ClusteredIndex.name:
            return ClusteredIndex.search_heads(own, queries, k, every_cell=True)
        hits = self._class.search_heads(own, queries, k)
        if self.exact_scores:
            return hits
        keys = [Rows(self.store.keys(layer, head)) for head in heads]
        scores = score_tokens(torch.from_numpy(queries), keys, torch.from_numpy(hits.ids))
        return Hits(hits.ids, scores.numpy())

    def scans(self, layer: int, k: int) -> bool:
        """Whether an index of this layer was tuned to read every key, or does for so many."""
        if (layer, k) not in self._scans:
            heads = self.layer(layer, self.store.manifest.shape.kv_heads)
            self._scans[layer, k] = any(one.scans(k) for one in heads if not one.exhaustive)
        return self._scans[layer, k]

    @property
    def exact_scores(self) -> bool:
        """Whether the scores of a search are exact inner products."""
        return self._class.exact_scores

    def _all(self, layer: int, heads: Sequence[int]) -> list[VectorIndex]:
        try:
            return [self._load(layer, head) for head in heads]
        except VectorIndexError as error:
            if not self._may_fall_back or self.kind == "flat":
                raise
            self._fall_back(str(error).rstrip("."))
            return [self._load(layer, head) for head in heads]

    def _load(self, layer: int, head: int) -> VectorIndex:
        if (layer, head) not in self._loaded:
            keys, digest = self.store.keys(layer, head), self.store.digest(layer, head)
            if self.kind == "flat":
                index = self._class.build(keys, digest=digest)
            else:
                path = index_path(kind_folder(self.store.path, self.kind), layer, head)
                index = self._class.load(path, keys, digest=digest)
            self._loaded[layer, head] = index
        return self._loaded[layer, head]

    def _fall_back(self, reason: str | None) -> None:
        self.kind, self._class = "flat", registry.get("flat")
        self._loaded.clear()
        self._layers.clear()
        if reason is not None:
            warnings.warn(OffloadDecodeWarning(f"All keys are searched: {reason}."), stacklevel=3)
