"""Intervals, p-values, bootstraps and rank correlations, by scipy and statsmodels (extra `eval`)."""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt

from offload_decode.evals.extra import library

CONFIDENCE = 0.95
DRAWS = 2000
FEWEST = 8  # of fewer the draws are too much alike: their interval would be too narrow
_SIGNS = 10_000  # choices of signs that a randomization test tries; all of them where there are no more
Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Share:
    """A mean of scores from 0 to 1, or of differences of them, how many there were, and the interval
    that holds the true one.
    """

    mean: float
    count: int
    low: float
    high: float


@dataclass(frozen=True)
class Estimate:
    """A number and the interval that holds the true one; None where too little was measured to say."""

    value: float
    low: float | None
    high: float | None


def wilson(scores: Sequence[float]) -> Share:
    """Wilson's score interval (Wilson 1927) of the mean of scores from 0 to 1, at least one. For scores
    between it is too wide rather than too narrow: of those with a given mean, 0 and 1 vary most.
    """
    mean, count = fmean(scores), len(scores)
    interval = library("statsmodels.stats.proportion").proportion_confint
    low, high = interval(mean * count, count, alpha=1 - CONFIDENCE, method="wilson")
    return Share(mean, count, min(mean, max(0.0, float(low))), max(mean, min(1.0, float(high))))


def difference(first: Share, second: Share, correlation: float = 0.0) -> Share:
    """first - second, by squaring and adding the distances to their own limits: Newcombe (1998, Statistics in
    Medicine 17: 873-890, method 10) and, with the correlation of paired scores, 17: 2635-2650, method 8; for
    other means than proportions Zou and Donner (2008, Statistics in Medicine 27: 1693-1702).
    """

    def reach(one: float, other: float) -> float:
        return math.sqrt(max(0.0, one * one + other * other - 2 * correlation * one * other))

    mean = first.mean - second.mean
    below = reach(first.mean - first.low, second.high - second.mean)
    above = reach(first.high - first.mean, second.mean - second.low)
    return Share(mean, min(first.count, second.count), max(-1.0, mean - below), min(1.0, mean + above))


def paired_difference(first: Sequence[float], second: Sequence[float]) -> Share:
    """`difference` of scores of the same questions, in the same order."""
    correlation = np.nan_to_num(pearson(np.array(first, np.float64), np.array(second, np.float64)))
    return difference(wilson(first), wilson(second), float(correlation))


def mean_of(shares: Sequence[Share]) -> Share:
    """The mean of independent shares, at least one, each with the same weight (Zou and Donner 2008)."""
    mean = fmean(share.mean for share in shares)
    below = math.hypot(*(share.mean - share.low for share in shares)) / len(shares)
    above = math.hypot(*(share.high - share.mean for share in shares)) / len(shares)
    return Share(mean, sum(share.count for share in shares), mean - below, mean + above)


def paired(first: Sequence[float], second: Sequence[float]) -> float:
    """Two-sided p of scores of the same questions, in the same order: how often differences as large come
    about when each has either sign by chance (Fisher's randomization test; of scores of 0 and 1, McNemar's
    exact test).
    """
    found = np.array([a - b for a, b in zip(first, second, strict=True) if a != b], np.float64)
    if not len(found):
        return 1.0
    stats = library("scipy.stats")
    if len(set(np.abs(found))) == 1:
        return float(stats.binomtest(int((found > 0).sum()), len(found)).pvalue)
    tested = stats.permutation_test(
        (found,), np.sum, permutation_type="samples", vectorized=True, n_resamples=_SIGNS, rng=0
    )
    return float(tested.pvalue)


def unpaired(first: Sequence[float], second: Sequence[float]) -> float:
    """Two-sided p of scores of different questions: the `N - 1` chi-squared test of two proportions (Campbell
    2007, Statistics in Medicine 26: 3661-3675), too large rather than too small for scores between 0 and 1.
    """
    if {*first, *second} in ({0.0}, {1.0}):
        return 1.0
    stats = library("scipy.stats")
    table = [[sum(scores), len(scores) - sum(scores)] for scores in (first, second)]
    squared, count = stats.chi2_contingency(table, correction=False).statistic, len(first) + len(second)
    return float(stats.chi2.sf(squared * (count - 1) / count, 1))


def holm(values: Sequence[float]) -> list[float]:
    """p-values, each corrected for all of them (Holm 1979), in their order."""
    if not values:
        return []
    corrected = library("statsmodels.stats.multitest").multipletests(values, method="holm")[1]
    return list(corrected.tolist())


def block_mean(runs: Sequence[Array], block: int) -> Estimate:
    """The mean over all values of `runs`, and its interval from draws of whole blocks of `block` neighbours
    (Carlstein 1986): values that stand next to each other are not independent.

    The last block of a run may be shorter. At least one value.
    """
    blocks = [run[start : start + block] for run in runs for start in range(0, len(run), block)]
    sums, counts = (np.array([of(one) for one in blocks], np.float64) for of in (np.sum, len))
    return bootstrapped(lambda sums, counts, axis: sums.sum(axis) / counts.sum(axis), sums, counts)


def bootstrapped(statistic: Callable[..., Any], *columns: Array) -> Estimate:
    """`statistic(*columns, axis)` of columns `[n]`, with the percentile interval (Efron 1979) from draws of
    whole rows, the same in every process; there is none where it is nan of more than a few of the draws,
    because the others are not like all.
    """
    value = float(statistic(*columns, axis=-1))
    if len(columns[0]) < FEWEST:
        return Estimate(value, None, None)
    stats = library("scipy.stats")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)  # of draws that are nan
        found = stats.bootstrap(
            columns, statistic, paired=True, vectorized=True, n_resamples=DRAWS, method="percentile", rng=0
        )
    drawn = found.bootstrap_distribution
    known = drawn[~np.isnan(drawn)]
    if len(known) < DRAWS * CONFIDENCE:
        return Estimate(value, None, None)
    low, high = np.quantile(known, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Estimate(value, float(low), float(high))


def pearson(first: Array, second: Array, axis: int = -1) -> Any:
    """Pearson's correlation along an axis; nan where either is the same throughout, or a single value."""
    stats = library("scipy.stats")
    if first.shape[axis] < 2:
        return math.nan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)  # of constant draws: they are nan
        return stats.pearsonr(first, second, axis=axis).statistic


def spearman(first: Array, second: Array, axis: int = -1) -> Any:
    """Spearman's rank correlation, as `pearson`: equal values share the mean of their ranks."""
    rankdata = library("scipy.stats").rankdata
    return pearson(rankdata(first, axis=axis), rankdata(second, axis=axis), axis)
