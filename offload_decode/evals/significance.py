"""Whether a difference is more than noise: p-values of mean scores, and of many at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import repeat
from statistics import NormalDist, fmean

from offload_decode.evals.intervals import Share

_ENUMERATED = 18  # differences whose signs are all tried: 2**18 sums


def paired(first: Sequence[float], second: Sequence[float]) -> float:
    """Two-sided p of scores of the same questions, in the same order: how often differences as large come
    about when each has either sign by chance (Fisher's randomization test).

    Scores of 0 and 1: McNemar's exact test. Others: every choice of signs for up to 18 differences, and the
    normal approximation of their sum for more.
    """
    found = [a - b for a, b in zip(first, second, strict=True) if a != b]
    if not found:
        return 1.0
    total = abs(sum(found))
    if len({abs(each) for each in found}) == 1:
        return _binomial(sum(each > 0 for each in found), len(found))
    if len(found) <= _ENUMERATED:
        sums = [0.0]
        for each in found:
            sums = [before + sign * each for before in sums for sign in (1, -1)]
        return sum(abs(each) >= total - 1e-9 for each in sums) / len(sums)
    return _two_sided(total / math.sqrt(sum(each * each for each in found)))


def unpaired(first: Sequence[float], second: Sequence[float]) -> float:
    """Two-sided p of scores of different questions: the `N - 1` chi-squared test of two proportions (Campbell
    2007, Statistics in Medicine 26: 3661-3675), too large rather than too small for scores between 0 and 1.
    """
    n, m = len(first), len(second)
    pooled = (sum(first) + sum(second)) / (n + m)
    variance = pooled * (1 - pooled) * (1 / n + 1 / m) * (n + m) / max(1, n + m - 1)
    return 1.0 if variance <= 0 else _two_sided((fmean(first) - fmean(second)) / math.sqrt(variance))


def larger(first: Share, second: Share) -> float:
    """One-sided p that the first of two means is larger by chance: Fisher's exact test, in which sums of
    scores are rounded against it. Intervals mislead here: one right answer of twenty lifts the lower limit of
    Wilson's above 0.
    """
    hits = math.floor(first.mean * first.count + 1e-6)
    total = hits + math.ceil(second.mean * second.count - 1e-6)
    whole = _choose(first.count + second.count, total)
    return min(
        1.0,
        sum(
            math.exp(_choose(first.count, k) + _choose(second.count, total - k) - whole)
            for k in range(hits, min(first.count, total) + 1)
            if total - k <= second.count
        ),
    )


def exceeding(scores: Sequence[float], most: float, others: int) -> float:
    """One-sided p that so many of these scores are above each of so many others, of which the largest is
    `most`, by chance: in one order of all, scores drawn alike stand anywhere (Rosenbaum 1954). It tells more
    than `larger` of scores between 0 and 1: half of four lists right is more than two lucky answers of four.
    """
    above = sum(score > most + 1e-9 for score in scores)
    return math.exp(_choose(len(scores), above) - _choose(len(scores) + others, above))


def holm(values: Sequence[float]) -> list[float]:
    """p-values, each corrected for all of them (Holm 1979), in their order."""
    order = sorted(range(len(values)), key=lambda place: values[place])
    corrected, largest = [0.0] * len(values), 0.0
    for rank, place in enumerate(order):
        largest = max(largest, min(1.0, (len(values) - rank) * values[place]))
        corrected[place] = largest
    return corrected


def _choose(n: int, k: int) -> float:
    """The logarithm of n over k."""
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def _binomial(successes: int, count: int) -> float:
    """Two-sided p of so many heads of a fair coin."""
    fewer = min(successes, count - successes)
    ways = sum(map(math.comb, repeat(count), range(fewer + 1)))
    return float(min(1.0, 2 * ways / 2**count))


def _two_sided(z: float) -> float:
    return 2 * (1 - NormalDist().cdf(abs(z))) if abs(z) < 8 else 0.0
