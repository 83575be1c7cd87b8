"""Prefixes of conversations that share a pass, searched side by side: those that search in one compiled call
make one call for all of them in each layer, whatever their stores are.

Stores on one base have its keys and clusters in the same files, which are mapped once: what one of them reads
is in the processor's cache for the next.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor

from offload_decode.attention.index_queries import IndexQueries
from offload_decode.attention.queries import Queries, joined
from offload_decode.engine.step import StoredPrefix, by_head
from offload_decode.selectors.one_pass import OnePass, attend_beside
from offload_decode.types import AttentionState


def joins(prefix: StoredPrefix) -> bool:
    """Whether a prefix may stand beside others: it searches in one compiled call, and its model has no
    indexer of its own, which asks for each prefix. One of a class that is derived may attend elsewhere.
    """
    own = type(prefix) is StoredPrefix and isinstance(prefix.one_pass, OnePass)
    return own and prefix.selector.shape.index is None


class SideBySide:
    """Implements `offload_decode.kv.generated.Attendable` for a packed pass: of its tokens, the first so many
    are those of the first prefix, and so on. Each prefix keeps its own statistics and watches.
    """

    def __init__(self, blocks: Sequence[tuple[StoredPrefix, int]]):
        self._prefixes, self._tokens = [prefix for prefix, _ in blocks], [tokens for _, tokens in blocks]

    def begin(
        self,
        layer: int,
        query: Tensor,
        scaling: float,
        softcap: float | None,
        index: IndexQueries | None = None,
    ) -> Callable[[], AttentionState]:
        """As `StoredPrefix.begin`, of `query [1, H, T, D]`."""
        assert index is None, "models with an indexer of their own are not searched in one call"
        parts = zip(self._prefixes, torch.split(query, self._tokens, dim=2), strict=True)
        queries = [prefix.grouped(part, scaling, softcap).sent() for prefix, part in parts]
        return partial(self._finish, layer, queries)

    def _finish(self, layer: int, queries: Sequence[Queries]) -> AttentionState:
        states = []
        with ExitStack() as held:
            # In one order, so that no two threads wait for each other.
            for host in sorted({prefix.host for prefix in self._prefixes}, key=id):
                held.enter_context(host.lock)
                host.store.check_mapped(layer)
            began = time.perf_counter()
            calls = [
                (own, asked)
                for prefix, asked in zip(self._prefixes, queries, strict=True)
                if isinstance(own := prefix.one_pass, OnePass)
            ]
            found = attend_beside(layer, calls)
            rows = [asked.vectors.shape[1] for asked in queries]
            served = sum(own for own, attended in zip(rows, found, strict=True) if attended is not None)
            seconds = (time.perf_counter() - began) / max(1, served)
            for prefix, asked, count, attended in zip(self._prefixes, queries, rows, found, strict=True):
                if attended is None:
                    states.append(prefix.finish(layer, asked))
                else:
                    prefix.record(layer, asked, attended, seconds * count)
                    states.append(by_head(attended.state, asked))
        return joined(states, 2)
