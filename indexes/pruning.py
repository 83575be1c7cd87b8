"""How many keys score above a floor, foretold from the moments of their cells.

A cell's keys have the mean m and, channel by channel, the variance v, so that their inner products with a
query q have the mean q·m and a standard deviation near sqrt(q²·v). Taken as normal, they tell how many keys
of every cell score above a floor, and so which floor the best k reach, before any key is read.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numba import njit

from offload_decode.indexes.rows.numbers import exponential
from offload_decode.indexes.rows.scan import SINGLE, score_rows

_REASSOCIATE = {"reassoc", "contract", "nsz"}
_FINITE = _REASSOCIATE | {"nnan", "ninf"}
# Dividing by zero is no error: to look for it would keep compilers from doing sixteen at a time.
_compiled = partial(njit, nogil=True, cache=True, error_model="numpy")
_SPREAD = np.float32(8)  # standard deviations beyond which there is nothing
_HALVINGS = 18  # of the range of floors


@_compiled()
def moments(means: Any, variances: Any, queries: Any) -> Any:
    """Means of the inner products of `queries [R, D]` with every cell's keys, and the inverse of their
    standard deviations: float32 `[R, C]` both. R is a multiple of four.
    """
    near = np.empty((len(queries), len(means)), np.float32)
    inverse = np.empty((len(queries), len(means)), np.float32)
    score_rows(means, SINGLE, queries, near)
    score_rows(variances, SINGLE, queries * queries, inverse)
    for r in range(len(queries)):
        for c in range(len(means)):
            inverse[r, c] = np.float32(1) / np.sqrt(max(inverse[r, c], np.float32(1e-30)))
    return near, inverse


@_compiled()
def floor_of(near: Any, inverse: Any, counts: Any, keys: float) -> Any:
    """The score above which about `keys` keys are, for one query."""
    low, high = np.float32(np.inf), np.float32(-np.inf)
    for c in range(len(near)):
        low, high = min(low, near[c]), max(high, near[c] + _SPREAD / inverse[c])
    for _ in range(_HALVINGS):
        middle = np.float32(0.5) * (low + high)
        if _above(near, inverse, counts, middle) >= keys:
            low = middle
        else:
            high = middle
    return low


@_compiled(fastmath=_REASSOCIATE)
def _above(near: Any, inverse: Any, counts: Any, floor: Any) -> Any:
    total = np.float32(0)
    for c in range(len(near)):
        total += np.float32(counts[c]) * _tail((floor - near[c]) * inverse[c])
    return total


@_compiled(forceinline=True, fastmath=_FINITE)
def _tail(z: Any) -> Any:
    """About the share of a normal distribution beyond z, by a logistic curve."""
    z = min(max(z, -_SPREAD), _SPREAD)
    power = exponential(-abs((np.float32(1.5976) + np.float32(0.07056) * z * z) * z))
    return (power if z > 0 else np.float32(1)) / (np.float32(1) + power)
