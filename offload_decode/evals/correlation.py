"""How well one number foretells another."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def pearson(first: Array, second: Array) -> float:
    """Pearson's correlation of `[n]` and `[n]`; nan where either is the same throughout."""
    one, other = first - first.mean(), second - second.mean()
    spread = math.sqrt(float(one @ one) * float(other @ other))
    return float(one @ other) / spread if spread > 0 else math.nan


def spearman(first: Array, second: Array) -> float:
    """Spearman's rank correlation; equal values share the mean of their ranks."""
    return pearson(ranks(first), ranks(second))


def ranks(values: Array) -> Array:
    """Ranks from 1, smallest first; equal values have the mean of theirs."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = counts.cumsum()
    return (last - (counts - 1) / 2)[place]
