"""How sure a number is that has no formula for it: what it comes to over draws of the same data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from offload_decode.evals.intervals import CONFIDENCE

DRAWS = 2000
FEWEST = 8  # of fewer the draws are too much alike: their interval would be too narrow
Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A number and the interval that holds the true one; None where too little was measured to say."""

    value: float
    low: float | None
    high: float | None


def block_mean(runs: Sequence[Array], block: int) -> Estimate:
    """The mean over all values of `runs`, and its interval from draws of whole blocks of `block` neighbours
    (Carlstein 1986): values that stand next to each other are not independent.

    The last block of a run may be shorter. At least one value.
    """
    blocks = [run[start : start + block] for run in runs for start in range(0, len(run), block)]
    sums, counts = (np.array([of(one) for one in blocks], np.float64) for of in (np.sum, len))
    value = float(sums.sum() / counts.sum())
    return _estimate(value, len(blocks), lambda drawn: float(sums[drawn].sum() / counts[drawn].sum()))


def resampled(statistic: Callable[[Array], float], rows: Array) -> Estimate:
    """`statistic` of `rows [n, …]`, with the interval from draws of whole rows; there is none where it is nan
    of more than a few of the draws, because the others are not like all.
    """
    return _estimate(statistic(rows), len(rows), lambda drawn: statistic(rows[drawn]))


def _estimate(value: float, count: int, of: Callable[[npt.NDArray[np.int64]], float]) -> Estimate:
    """Percentile bootstrap (Efron 1979), the same in every process."""
    if count < FEWEST:
        return Estimate(value, None, None)
    rng = np.random.default_rng(0)
    drawn = np.array([of(rng.integers(count, size=count)) for _ in range(DRAWS)])
    known = drawn[~np.isnan(drawn)]
    if len(known) < DRAWS * CONFIDENCE:
        return Estimate(value, None, None)
    low, high = np.quantile(known, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Estimate(value, float(low), float(high))
