"""`topk` behind clusters on a host in one compiled call: the search, attention to what it found, and the
estimate of the rest, which are else three calls with a dozen small operations between them. Conversations
with several stores that are packed into one pass make that call together.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numba import njit

from offload_decode.attention.host_dense import merge_row
from offload_decode.attention.host_tokens import ENTRIES, SPARSE, Logits, Named, State, attend_task
from offload_decode.attention.queries import Queries
from offload_decode.attention.rows import LayerRows, rows_beside
from offload_decode.common.rows.team import cells, closure, fork, now
from offload_decode.indexes.base import VectorIndex
from offload_decode.indexes.clusters.estimate import Given, estimate_task
from offload_decode.indexes.clusters.index import ClusteredIndex
from offload_decode.indexes.clusters.search import UNPREDICTED, Best, Heads, beside, search_task
from offload_decode.kv.host_cache import HostKV
from offload_decode.selectors.base import Attended
from offload_decode.selectors.budgeted import Budgeted
from offload_decode.selectors.topk import TopK
from offload_decode.selectors.unselected import ClusterEstimate, Tail
from offload_decode.types import AttentionState, Selection


class _Ready(NamedTuple):
    """What a layer's calls of so many rows and of `k` keys have in common: the indexes it is `of`, what
    searches them (None where they are not all searched at once), whether the rest is estimated, keys, values
    and the width of these.
    """

    of: list[VectorIndex]
    k: int
    search: Heads | None
    estimates: bool
    keys: LayerRows
    values: LayerRows
    dim: int

    def kind(self, queries: Queries) -> Hashable:
        """Equal for what one call can have, whatever the stores."""
        forms = [(own.row_bytes, own.layout) for own in (self.keys, self.values)]
        how = queries.vectors.shape, queries.scaling, queries.softcap
        return self.k, self.estimates, self.dim, *forms, *how


@dataclass(frozen=True)
class OnePass:
    """Of one prefix; `attend` gives what the selector, the host and the estimate give one after the other.
    What its layers have `ready` is shared with its forks.
    """

    host: HostKV
    chosen: Budgeted
    tail: ClusterEstimate | None
    _ready: dict[tuple[int, int, int], _Ready] = field(default_factory=dict)

    @classmethod
    def of(cls, host: HostKV, chosen: Budgeted, tail: Tail | None) -> OnePass | None:
        """None where other ways of choosing or estimating are asked for, or a device."""
        selector = chosen.selector
        # Of no other class: one that is derived may choose in its own way.
        searches = type(selector) is TopK and selector.indexes.kind == "clusters"
        if not searches or host.device.type != "cpu":
            return None
        if tail is None:
            return cls(host, chosen, None)
        return cls(host, chosen, tail) if isinstance(tail, ClusterEstimate) and tail.built else None

    def fork(self, chosen: Budgeted) -> Self:
        """The same for another conversation with the store."""
        return replace(self, chosen=chosen)

    def attend(self, layer: int, queries: Queries) -> Attended | None:
        """None where this layer's heads are not all searched by their clusters, or where a number is not
        finite: the long way raises then.
        """
        ready = self.prepared(layer, queries)
        found = [] if ready is None else _called([(ready, queries)])
        return found[0] if found else None

    def prepared(self, layer: int, queries: Queries) -> _Ready | None:
        """What a call needs, where one call does all."""
        selector: Any = self.chosen.selector
        budget = selector.budgets[layer]
        if budget is None or budget.by_mass or budget.uneven or selector.takes_all(layer, budget.largest):
            return None
        heads, rows, _ = queries.vectors.shape
        k = budget.largest
        found = selector.indexes.layer(layer, heads)
        ready = self._ready.get((layer, rows, k))
        if ready is None or ready.of is not found:
            # Another kind may have taken the place of a damaged index, which nobody is to hold then.
            for key, own in list(self._ready.items()):
                if key[0] == layer and own.of is not found:
                    self._ready.pop(key, None)
            ready = self._ready[layer, rows, k] = self._prepared(layer, found, rows, k)
        return ready if ready.search is not None else None

    def _prepared(self, layer: int, found: list[VectorIndex], rows: int, k: int) -> _Ready:
        values = self.host.layer_values(layer)
        parts = self.host.layer_keys(layer).compiled, values.compiled, values[0].dim
        clustered = [head for head in found if type(head) is ClusteredIndex]
        if len(clustered) < len(found):
            return _Ready(found, k, None, False, *parts)
        search = ClusteredIndex.at_once(clustered, rows, k)
        estimates = self.tail is not None and self.tail.clusters(layer) is not None
        if estimates and not all(head.means_of(values[0].dim) for head in clustered):
            search = None
        return _Ready(found, k, search, estimates, *parts)


def attend_beside(layer: int, asked: Sequence[tuple[OnePass, Queries]]) -> list[Attended | None]:
    """What each prefix gives for its queries, as its `attend`; those that search alike make one call."""
    alike: dict[Hashable, list[int]] = {}
    ready = [one.prepared(layer, queries) for one, queries in asked]
    for place, ((_, queries), own) in enumerate(zip(asked, ready, strict=True)):
        if own is not None:
            alike.setdefault(own.kind(queries), []).append(place)
    attended: list[Attended | None] = [None] * len(asked)
    for places in alike.values():
        given = [(own, asked[place][1]) for place in places if (own := ready[place]) is not None]
        found: Sequence[Attended | None] = _called(given) or [None]
        if found == [None] and len(places) > 1:  # one of them is missing something, and others may not be
            found = [one.attend(layer, queries) for one, queries in (asked[place] for place in places)]
        for place, one in zip(places, found, strict=True):
            attended[place] = one
    return attended


def _called(given: Sequence[tuple[_Ready, Queries]]) -> list[Attended]:
    """One call for all, which are of one kind; nothing where anything is missing or not finite."""
    first, queries = given[0]
    heads, rows, _ = queries.vectors.shape
    count = heads * len(given)
    shape = 1, count, rows
    best = Best(
        np.full((*shape, first.k), -1, np.int64),
        np.empty((*shape, first.k), np.float32),
        np.zeros(shape, np.int64),
    )
    states = State.empty(count, rows, first.dim), State.empty(count, rows, first.dim)
    read, wrong = np.zeros((count, rows), np.int64), np.zeros(1, np.int64)
    spent = np.zeros((count * rows, 2), np.int64)
    asking = queries.vectors.contiguous().numpy()
    search, keys, values = first.search, first.keys, first.values
    if len(given) > 1:
        asking = np.concatenate([own.vectors.numpy() for _, own in given])
        search = beside([own.search for own, _ in given if own.search is not None])
        keys, values = (rows_beside([getattr(own, name) for own, _ in given]) for name in ("keys", "values"))
    per_task = ClusteredIndex.per_task(count, rows)
    logits = Logits.of(queries.scaling, queries.softcap)
    how = search, per_task, asking, first.k, keys, values, logits, (ENTRIES, SPARSE)
    task = how, UNPREDICTED, best, states, first.estimates, read, wrong, spent
    if _attend_layer(cells(), count * -(-rows // per_task), task) < 0:
        return []
    searching = spent[0, 0] / max(1, spent[0, 0] + spent[0, 1])
    attended = []
    for start in range(0, count, heads):
        own = slice(start, start + heads)
        state = AttentionState(torch.from_numpy(states[0].out[own]), torch.from_numpy(states[0].lse[own]))
        ids, scores = best.ids[0, own], best.scores[0, own]
        selection = Selection(torch.from_numpy(ids), torch.from_numpy(scores))
        tokens = int(read[own].sum())
        attended.append(Attended(state, selection, ids.size, tokens * values.row_bytes, searching))
    return attended


@njit(nogil=True, cache=True)
def _attend_layer(team: Any, tasks: int, given: Any) -> int:
    """All tasks: 0, or -1 where something is missing or not finite. The first of `spent` gets their sum."""
    how, _, best, states, _, read, wrong, spent = given
    queries, k, lse = how[2], how[3], states[0].lse
    for head in range(lse.shape[0]):
        for r in range(lse.shape[1]):
            total = np.float32(0)
            for d in range(queries.shape[2]):
                total += np.abs(queries[head, r, d])
            if not np.isfinite(total):
                return -1
    body, data = closure(_task, given)
    fork(team, body, data, tasks)
    for task in range(1, tasks):
        spent[0] += spent[task]
    for head in range(lse.shape[0]):
        for r in range(lse.shape[1]):
            if best.seen[0, head, r] < k or read[head, r] < 0 or not np.isfinite(lse[head, r]):
                return -1
    return -1 if wrong[0] else 0


@njit(nogil=True, cache=True)
def _task(
    task: int,
    how: Any,
    predicted: Any,
    best: Any,
    states: Any,
    estimates: bool,
    read: Any,
    wrong: Any,
    spent: Any,
) -> None:
    """Some rows of a head, to the first of `states`; nanoseconds of the search and of the rest to `spent`."""
    heads, per_task, queries, k, keys, values, logits, limits = how
    state, rest = states
    time = np.zeros(2, np.int64)
    began = now(time)
    search_task(task, heads, queries, k, per_task, predicted, best)
    found = now(time)
    ids, scores = best.ids[0], best.scores[0]
    attend_task(task, queries, keys, values, Named(ids, scores), logits, limits, per_task, state, read)
    if estimates:
        selected = Given(queries, ids, scores, logits.scaling, logits.softcap)
        estimate_task(task, heads, selected, per_task, rest.out, rest.lse, wrong)
        tasks = -(-queries.shape[1] // per_task)
        head, first = task // tasks, task % tasks * per_task
        for r in range(first, min(first + per_task, queries.shape[1])):
            merge_row(state.out[head, r], state.lse[head], rest.out[head, r], rest.lse[head, r], r)
    spent[task, 0], spent[task, 1] = found - began, now(time) - found
