"""How sure a share is, given how few were asked."""

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


def wilson(scores: Sequence[float], confidence: float = CONFIDENCE) -> Share:
    """Wilson's score interval (Wilson 1927) of the mean of scores from 0 to 1, at least one.

    For scores between 0 and 1 it is too wide rather than too narrow: of all such scores with a given
    mean, those that are 0 or 1 vary most.
    """
    mean, count = fmean(scores), len(scores)
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    middle = (mean + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(mean * (1 - mean) / count + z * z / (4 * count * count))
    return Share(mean, count, max(0.0, middle - half), min(1.0, middle + half))
