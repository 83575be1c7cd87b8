"""A head's keys searched in parts by several threads: what they foretell together, and what they found, as
one search gives it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from offload_decode.indexes.base import Hits
from offload_decode.indexes.keys import Float32
from offload_decode.indexes.pruned_scan import Foretold, Heads, foretell_floors, foretell_moments
from offload_decode.indexes.rows import pool
from offload_decode.indexes.rows.ordering import join


def foretold(heads: Heads, queries: Float32, k: int, threads: int) -> Foretold:
    """What is foretold of the heads for `queries [H, R, D]`, by so many threads: it would take each as long
    as it takes one.
    """
    told = Foretold.room(heads, queries.shape[1])
    pool.run(lambda part: foretell_moments(heads, queries, part, threads, told), range(threads))
    pool.run(lambda part: foretell_floors(heads, queries, k, part, threads, told), range(threads))
    return told


def joined_hits(ids: npt.NDArray[np.int64], scores: Float32, counts: npt.NDArray[np.int64]) -> Hits:
    """What was found in P parts of each head's keys, `[P, H, R, k]` of which `counts [P, H, R]` are there, as
    one search gives it.
    """
    if len(ids) == 1:
        return Hits(ids[0], scores[0])
    hits = Hits(np.full(ids.shape[1:], -1), np.full(ids.shape[1:], -np.inf, np.float32))
    join(ids, scores, counts, hits.ids, hits.scores)
    return hits
