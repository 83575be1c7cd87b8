"""Choosing `nprobe` or `ef` by a measured recall: queries are unlike keys, so no default can be trusted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from offload_decode.indexes.base import FROM_KEYS, FROM_QUERIES, Hits, RecallRecord
from offload_decode.indexes.flat import FlatIndex
from offload_decode.indexes.keys import Float32, Keys, check_queries
from offload_decode.indexes.rows import encodings

_MAX_QUERIES = 512  # half chooses, half measures: a standard error near 0.01 at worst
_KEY_SAMPLE = 256
_TIE = 1e-5  # relative; scores of one key from two loops differ by summation order


class Tunable(Protocol):
    """What `tune` needs of an index."""

    @property
    def parameter(self) -> str: ...

    def ladder(self, k: int) -> Sequence[float]:
        """Rising parameter values to try for `k`; at the last one the search is exhaustive."""
        ...

    def search_at(self, queries: Float32, k: int, value: float) -> Hits:
        """The search at one parameter value, 1 <= k <= N; ids of -1 where it found fewer."""
        ...


def tune(
    index: Tunable, flat: FlatIndex, queries: npt.NDArray[Any] | None, k: int, target: float
) -> RecallRecord | None:
    """The first value of the ladder whose recall@k on one half of the queries reaches `target`, with the
    recall of the other half. A sample of the keys stands in for missing queries. None for an empty index.
    """
    if len(flat) == 0:
        return None
    k = min(k, len(flat))
    if queries is not None and len(queries):
        source, sample = FROM_QUERIES, check_queries(_spread(queries, _MAX_QUERIES), flat.dim)
    else:
        source, sample = FROM_KEYS, encodings.decode(_spread(flat.keys, _KEY_SAMPLE))
        sample = check_queries(sample, flat.dim)
    choose, report = (sample[0::2], sample[1::2]) if len(sample) > 1 else (sample, sample)
    truth = flat.search(choose, k)
    ladder = index.ladder(k)
    for value in ladder:
        if recall(index.search_at(choose, k, value), truth) >= target:
            break
    measured = recall(index.search_at(report, k, value), flat.search(report, k))
    full_scan = value == ladder[-1]
    return RecallRecord(target, k, measured, len(report), source, index.parameter, value, full_scan)


def recall(hits: Hits, truth: Hits) -> float:
    """Mean share of the true top-k `[G, k]` that was found; a key that ties with the k-th counts as found."""
    worst = truth.scores[:, -1:]
    tolerance = _TIE * np.abs(truth.scores).max(axis=1, keepdims=True)
    return float(np.mean(hits.scores >= worst - tolerance))


def geometric(start: int, stop: int) -> list[int]:
    """Rising values from `start`, by about half each, below `stop`."""
    values = []
    while start < stop:
        values.append(start)
        start = max(start + 1, start * 3 // 2)
    return values


def _spread(rows: Keys, count: int) -> Keys:
    """At most `count` rows, evenly spread."""
    if len(rows) <= count:
        return rows
    return rows[np.linspace(0, len(rows) - 1, count).astype(np.int64)]
