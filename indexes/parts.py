"""A head's keys searched in parts by several threads: what they found, as one search gives it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from indexes.base import Hits
from indexes.keys import Float32
from indexes.rows.ordering import join


def joined_hits(ids: npt.NDArray[np.int64], scores: Float32, counts: npt.NDArray[np.int64]) -> Hits:
    """What was found in P parts of each head's keys, `[P, H, R, k]` of which `counts [P, H, R]` are there, as
    one search gives it.
    """
    if len(ids) == 1:
        return Hits(ids[0], scores[0])
    hits = Hits(np.full(ids.shape[1:], -1), np.full(ids.shape[1:], -np.inf, np.float32))
    join(ids, scores, counts, hits.ids, hits.scores)
    return hits
