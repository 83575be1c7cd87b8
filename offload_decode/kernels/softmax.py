"""The softmax of the compiled loops, of one query row's scores at a time."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from offload_decode.indexes.rows.numbers import exponential


class Logits(NamedTuple):
    """What makes logits of scores; a softcap of 0 is none."""

    scaling: np.float32
    softcap: np.float32

    @classmethod
    def of(cls, scaling: float, softcap: float | None) -> Logits:
        """As callers have them."""
        return cls(np.float32(scaling), np.float32(softcap or 0))


@njit(nogil=True, cache=True, error_model="numpy")
def weigh(scores: Any, logits: Any) -> Any:
    """Turns the scores `[n]` float32 of one row into weights, where -inf has none; returns their log-sum-exp,
    and the sum that they are to be divided by: -inf and 0 where there is nothing.
    """
    scaling, softcap = logits
    if softcap:
        for j in range(len(scores)):
            if scores[j] != -np.inf:
                scores[j] = softcap * np.tanh(scores[j] * scaling / softcap)
    else:
        for j in range(len(scores)):
            if scores[j] != -np.inf:
                scores[j] *= scaling
    highest, nothing = np.float32(-np.inf), True
    for j in range(len(scores)):
        highest = max(highest, scores[j])
        nothing &= scores[j] == -np.inf
    if nothing:
        scores[:] = 0
        return np.float32(-np.inf), np.float64(0)
    total = _exponentials(scores, highest)
    return np.float32(highest + np.log(total)), total


@njit(nogil=True, cache=True, error_model="numpy")
def divide(out: Any, total: Any) -> None:
    """Divides what was added with the weights, `out [Dv]` float32, by their sum, unless there was nothing."""
    if total != 0:  # NaN as well
        for d in range(len(out)):
            out[d] = np.float32(out[d] / total)


@njit(nogil=True, cache=True, fastmath={"reassoc", "contract"})
def _exponentials(scores: Any, highest: Any) -> Any:
    total = np.float64(0)
    for j in range(len(scores)):
        scores[j] = exponential(scores[j] - highest)
        total += np.float64(scores[j])
    return total
