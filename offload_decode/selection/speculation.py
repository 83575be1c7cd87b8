"""Speculative retrieval: a step takes over what was found for the query of the token before it.

FreeKV (Liu et al. 2025, arXiv 2505.13109), speculative retrieval with fine-grained correction, there of pages
and here of tokens. A step's own query is searched for while the step goes on, and what is found serves the
next one. A KV head whose queries have turned away, by their cosine with the previous ones and the mean over
the head's GQA group, is corrected: searched before it attends.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from indexes.base import Hits

Ids = NDArray[np.int64]
Rows = NDArray[np.float32]
Search = Callable[[int, Sequence[int], Rows, int], Hits]


class Ahead(NamedTuple):
    """What one layer was searched for ahead: `rows [Hkv, G, D]`, and the ids `[Hkv, G, k]` found for them."""

    rows: Rows
    ids: Future[Ids]


class Speculation:
    """The searches ahead of one conversation. `search(layer, heads, rows [H, G, D], k)` is the real one.

    `counts`, of this and all its forks: `heads` that had something to take over, and of these `corrected`.
    """

    def __init__(self, search: Search, similarity: float):
        self.search = search
        self.similarity = similarity
        self.counts: Counter[str] = Counter()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="speculation")
        self._ahead: dict[int, Ahead] = {}

    def fork(self) -> Self:
        """The same memory for a conversation that goes its own way; searches that run serve both."""
        forked = copy.copy(self)
        forked._ahead = dict(self._ahead)
        return forked

    def forget(self) -> None:
        """Take nothing over. A search that still runs ends in vain and changes nothing."""
        self._ahead = {}

    def step(self, layer: int, rows: Rows, k: int) -> tuple[Ids, Rows | None]:
        """Ids `[Hkv, G, k]` for `rows [Hkv, G, D]`, with scores where every head was searched for just these;
        and the search ahead for the rest.
        """
        near = self._near(layer, rows)
        heads, rest = np.flatnonzero(~near).tolist(), np.flatnonzero(near).tolist()
        if rest:
            ids, scores = self._ahead[layer].ids.result().copy(), None
            if heads:
                ids[heads] = self.search(layer, heads, rows[heads], k).ids
        else:
            hits = self.search(layer, heads, rows, k)
            ids, scores = hits.ids, hits.scores
        rows = rows.copy()  # the model's own memory until here

        def complete() -> Ids:
            found = ids.copy()
            if rest:
                found[rest] = self.search(layer, rest, rows[rest], k).ids
            return found

        self._ahead[layer] = Ahead(rows, self._worker.submit(complete))
        return ids, scores

    def _near(self, layer: int, rows: Rows) -> NDArray[np.bool_]:
        """The heads `[Hkv]` that take over; none where the search ahead failed, to fail again in the open."""
        none = np.zeros(len(rows), bool)
        if (ahead := self._ahead.get(layer)) is None:
            return none
        lengths = np.linalg.norm(rows, axis=-1) * np.linalg.norm(ahead.rows, axis=-1)
        cosine = (rows * ahead.rows).sum(-1) / np.maximum(lengths, np.finfo(np.float32).tiny)
        near: NDArray[np.bool_] = cosine.mean(-1) >= self.similarity
        if near.any() and ahead.ids.exception() is not None:
            near = none
        self.counts.update(heads=len(rows), corrected=int((~near).sum()))
        return near
