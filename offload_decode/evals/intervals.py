"""How sure a share is, given how few were asked, and how sure the difference of two."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Share:
    """A mean of scores from 0 to 1, how many there were, and the interval that holds the true one."""

    mean: float
    count: int
    low: float
    high: float


@dataclass(frozen=True)
class Difference:
    """How much larger one share is than another, from -1 to 1, and the interval that holds the true one."""

    mean: float
    low: float
    high: float


def wilson(scores: Sequence[float], confidence: float = CONFIDENCE) -> Share:
    """Wilson's score interval (Wilson 1927) of the mean of scores from 0 to 1, at least one.

    For scores between 0 and 1 it is too wide rather than too narrow: of all such scores with a given
    mean, those that are 0 or 1 vary most.
    """
    return wilson_of(fmean(scores), len(scores), confidence)


def wilson_of(mean: float, count: int, confidence: float = CONFIDENCE) -> Share:
    """`wilson`, of so many scores with that mean."""
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    middle = (mean + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(mean * (1 - mean) / count + z * z / (4 * count * count))
    return Share(mean, count, min(mean, max(0.0, middle - half)), max(mean, min(1.0, middle + half)))


def difference(first: Share, second: Share, correlation: float = 0.0) -> Difference:
    """first - second, by squaring and adding the distances to their own limits: Newcombe (1998, Statistics in
    Medicine 17: 873-890, method 10) and, with the correlation of paired scores, 17: 2635-2650, method 8; for
    other means than proportions Zou and Donner (2008, Statistics in Medicine 27: 1693-1702).
    """

    def reach(one: float, other: float) -> float:
        return math.sqrt(max(0.0, one * one + other * other - 2 * correlation * one * other))

    mean = first.mean - second.mean
    below = reach(first.mean - first.low, second.high - second.mean)
    above = reach(first.high - first.mean, second.mean - second.low)
    return Difference(mean, max(-1.0, mean - below), min(1.0, mean + above))


def paired_difference(first: Sequence[float], second: Sequence[float]) -> Difference:
    """`difference` of scores of the same questions, in the same order."""
    return difference(wilson(first), wilson(second), _correlation(first, second))


def mean_of(shares: Sequence[Share]) -> Share:
    """The mean of independent shares, at least one, each with the same weight (Zou and Donner 2008)."""
    mean = fmean(share.mean for share in shares)
    below = math.hypot(*(share.mean - share.low for share in shares)) / len(shares)
    above = math.hypot(*(share.high - share.mean for share in shares)) / len(shares)
    return Share(mean, sum(share.count for share in shares), mean - below, mean + above)


def _correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Pearson's; 0 where one of them is the same throughout."""
    one, other = fmean(first), fmean(second)
    joint = sum((a - one) * (b - other) for a, b in zip(first, second, strict=True))
    spread = math.sqrt(sum((a - one) ** 2 for a in first) * sum((b - other) ** 2 for b in second))
    return joint / spread if spread > 0 else 0.0
