"""Exact scores of the keys that a library found, whatever arithmetic it found them by.

Libraries score with the instructions of the processor at hand, some of which round queries or keys. So they
are asked for somewhat more keys than are wanted, and these are scored here, from the stored keys.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from offload_decode.indexes.base import Hits
from offload_decode.indexes.errors import IndexDamaged, InvalidIndexInput
from offload_decode.indexes.flat import NOT_FINITE
from offload_decode.indexes.keys import Float32, Keys
from offload_decode.indexes.rows import scan
from offload_decode.indexes.rows.loops import dot_row

_RIGHT, _WRONG_ID, _NOT_FINITE = range(3)


def asked_for(k: int, n: int) -> int:
    """How many of `n` keys a library is to find, so that the `k` best are among them though it rounds."""
    return min(n, k + k // 4 + 16)


def rescored(keys: Keys, queries: Float32, ids: npt.NDArray[np.int64], k: int) -> Hits:
    """The `k` best of the keys `ids [G, c]` (-1 for none) for each of `queries [G, D]`: by descending score,
    ties to the lower id, as the exact scan has it.

    Raises IndexDamaged for ids that are not those of keys, InvalidIndexInput for scores that are not finite.
    """
    hits = Hits.empty(len(queries), k)
    state = _rescore(scan.bits(keys), scan.layout(keys), queries, ids, hits.ids, hits.scores)
    if state == _WRONG_ID:
        raise IndexDamaged(
            "The index names keys that there are not, or one key twice: build it again with "
            "`offload-decode index`."
        )
    if state == _NOT_FINITE:
        raise InvalidIndexInput(NOT_FINITE)
    return hits


@njit(nogil=True, cache=True)
def _rescore(rows: Any, layout: int, queries: Any, ids: Any, found: Any, scores: Any) -> int:
    best = np.empty(ids.shape[1], np.uint64)
    for g in range(len(queries)):
        count = 0
        for place in range(ids.shape[1]):
            row = ids[g, place]
            if row < -1 or row >= len(rows):
                return _WRONG_ID
            if row >= 0:
                score = dot_row(queries[g], rows, layout, row)
                if not np.isfinite(score):
                    return _NOT_FINITE
                best[count] = scan.candidate(score, row)
                count += 1
        best[:count].sort()
        for place in range(1, count):
            if best[place] == best[place - 1]:
                return _WRONG_ID
        for place in range(min(found.shape[1], count)):
            scores[g, place], found[g, place] = scan.score_and_row(best[count - 1 - place])
    return _RIGHT
