"""`topk` behind clusters on a host in one compiled call: the search, attention to what it found, and the
estimate of the rest, which are else three calls with a dozen small operations between them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit

from offload_decode.attention.host_dense import merge_row
from offload_decode.attention.host_tokens import ENTRIES, SPARSE, Logits, Named, State, attend_task
from offload_decode.attention.queries import Queries
from offload_decode.common.rows.team import cells, closure, fork, now
from offload_decode.indexes.base import VectorIndex
from offload_decode.indexes.clusters.estimate import Given, estimate_task
from offload_decode.indexes.clusters.index import ClusteredIndex
from offload_decode.indexes.clusters.search import UNPREDICTED, Best, search_task
from offload_decode.kv.host_cache import HostKV
from offload_decode.selectors.base import Attended
from offload_decode.selectors.budgeted import Budgeted
from offload_decode.selectors.topk import TopK
from offload_decode.selectors.unselected import ClusterEstimate, Tail
from offload_decode.types import AttentionState, Selection


class _Ready(NamedTuple):
    """What a layer's calls of so many rows and keys have in common: the indexes it is `of`, what searches
    them (None where they are not all searched at once), whether the rest is estimated, keys and values.
    """

    of: list[VectorIndex]
    search: tuple[Any, int] | None
    estimates: bool
    rows: tuple[Any, Any]


@dataclass(frozen=True)
class OnePass:
    """Of one prefix; `attend` gives what the selector, the host and the estimate give one after the other."""

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

    def attend(self, layer: int, queries: Queries) -> Attended | None:
        """None where this layer's heads are not all searched by their clusters, or where a number is not
        finite: the long way raises then.
        """
        selector: Any = self.chosen.selector
        budget = selector.budgets[layer]
        if budget is None or budget.by_mass or budget.uneven or selector.takes_all(layer, budget.largest):
            return None
        heads, rows, _ = queries.vectors.shape
        vectors = queries.vectors.contiguous().numpy()
        k = budget.largest
        found = selector.indexes.layer(layer, heads)
        ready = self._ready.get((layer, rows, k))
        if ready is None or ready.of is not found:  # or another kind has taken the place of a damaged index
            ready = self._ready[layer, rows, k] = self._prepared(layer, found, rows, k)
        if ready.search is None:
            return None
        values = self.host.layer_values(layer)
        shape = 1, heads, rows
        best = Best(
            np.full((*shape, k), -1, np.int64), np.empty((*shape, k), np.float32), np.zeros(shape, np.int64)
        )
        states = State.empty(heads, rows, values[0].dim), State.empty(heads, rows, values[0].dim)
        read, wrong = np.zeros((heads, rows), np.int64), np.zeros(1, np.int64)
        spent = np.zeros((heads * rows, 2), np.int64)
        logits = Logits.of(queries.scaling, queries.softcap)
        how = (*ready.search, vectors, k, *ready.rows, logits, (ENTRIES, SPARSE))
        given = (how, UNPREDICTED, best, states, ready.estimates, read, wrong, spent)
        tokens = _attend_layer(cells(), heads * -(-rows // ready.search[1]), given)
        if tokens < 0:
            return None
        return Attended(
            AttentionState(*map(torch.from_numpy, states[0])),
            Selection(torch.from_numpy(best.ids[0]), torch.from_numpy(best.scores[0])),
            best.ids.size,
            tokens * values[0].row_bytes,
            spent[0, 0] / max(1, spent[0, 0] + spent[0, 1]),
        )

    def _prepared(self, layer: int, found: list[VectorIndex], rows: int, k: int) -> _Ready:
        values = self.host.layer_values(layer)
        parts = self.host.layer_keys(layer).compiled, values.compiled
        clustered = [head for head in found if type(head) is ClusteredIndex]
        if len(clustered) < len(found):
            return _Ready(found, None, False, parts)
        search = ClusteredIndex.at_once(clustered, rows, k)
        estimates = self.tail is not None and self.tail.clusters(layer) is not None
        if estimates and not all(head.means_of(values[0].dim) for head in clustered):
            search = None
        return _Ready(found, search, estimates, parts)


@njit(nogil=True, cache=True)
def _attend_layer(team: Any, tasks: int, given: Any) -> int:
    """All tasks: how many different tokens they read, or -1 where something is missing or not finite. The
    first of `spent` gets the sum of all.
    """
    how, _, best, states, _, read, wrong, spent = given
    queries, k, lse, tokens = how[2], how[3], states[0].lse, 0
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
            tokens += read[head, r]
    return -1 if wrong[0] else tokens


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
