"""How much of dense attention a step keeps: its share of the attention mass and the error of its output."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.layers import Float32, Layer
from offload_decode.common.rows import encodings

ENOUGH = 0.99  # of the oracle's mass, on average: below, a time does not count
BLOCK = 1 << 16
TUNING_ROWS = 64  # queries of each head

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Truth:
    """Dense attention and exact top-k attention of every row of S steps, in float32.

    lse `[S, Hkv, G]`: of all scaled scores. dense `[S, Hkv, G, D]`: the output. For each k: `mass[k]`
    `[S, Hkv, G]`, the share of the attention that the k best tokens hold, and `best[k]`, the output of
    attending to them alone. slope: of the sorted weights, log against log, from the 10th to the 10,000th.
    """

    lse: Float32
    dense: Float32
    mass: dict[int, Float32]
    best: dict[int, Float32]
    slope: float


@dataclass(frozen=True)
class Fidelity:
    """Of the rows of all steps. `ratio_*`: mass of the tokens attended to over that of the exact top-k, at
    most 1, for a row's surplus makes no other row good; mean, fifth percentile and least. mass: mean,
    absolute. Errors: mean relative distance of the output.
    """

    ratio: float
    ratio_p5: float
    ratio_worst: float
    mass: float
    error_dense: float
    error_topk: float

    @property
    def enough(self) -> bool:
        return self.ratio >= ENOUGH


@dataclass(frozen=True)
class Sample:
    """Queries that choose a search parameter, apart from those that are judged: `rows [Hkv, R, D]`, and the
    attention that the exact top-k of each holds, `best [Hkv, R]`, as a sum of exponentials above `highest`.
    """

    layer: Layer
    rows: Float32
    highest: Float32
    best: npt.NDArray[np.float64]

    @classmethod
    def of(cls, layer: Layer, k: int) -> Sample:
        heads, group, dim = layer.steps.shape[1:]
        steps = layer.tuning.reshape(heads, -1, group, dim)
        spread = np.linspace(0, steps.shape[1] - 1, min(steps.shape[1], -(-TUNING_ROWS // group))).astype(int)
        rows = np.ascontiguousarray(steps[:, spread].reshape(heads, -1, dim))
        highest, best = np.empty(rows.shape[:2], np.float32), np.empty(rows.shape[:2])
        for head, own in enumerate(rows):
            found = scores(own, layer.keys[head]) * np.float32(layer.scaling)
            highest[head] = found.max(axis=1)
            largest = np.partition(found, max(0, layer.length - k), axis=1)[:, max(0, layer.length - k) :]
            best[head] = np.exp(largest - highest[head, :, None], dtype=np.float64).sum(axis=1)
        return cls(layer, rows, highest, best)

    def holds_enough(self, ids: Sequence[Ids]) -> bool:
        """Whether tokens `[R, n]` of the first heads hold ENOUGH of the oracle's mass, on average."""
        ratios = [
            min(mass_of(self.layer, head, query, row, highest) / best, 1)
            for head, own in enumerate(ids)
            for query, row, highest, best in zip(
                self.rows[head], own, self.highest[head], self.best[head], strict=True
            )
        ]
        return float(np.mean(ratios)) >= ENOUGH


def truth(layer: Layer, ks: Iterable[int]) -> Truth:
    """Computed head by head, the keys block by block."""
    steps, heads, group, dim = layer.steps.shape
    ks = sorted({min(k, layer.length) for k in ks})
    lse, dense = np.empty((steps, heads, group), np.float32), np.empty(layer.steps.shape, np.float32)
    mass = {k: np.empty_like(lse) for k in ks}
    best = {k: np.empty_like(dense) for k in ks}
    slopes = []
    for head in range(heads):
        rows = layer.steps[:, head].reshape(-1, dim)
        weights = scores(rows, layer.keys[head]) * np.float32(layer.scaling)
        highest = weights.max(axis=1, keepdims=True)
        weights = np.exp(weights - highest, out=weights)
        total = weights.sum(axis=1, keepdims=True, dtype=np.float64)
        lse[:, head] = (highest + np.log(total)).reshape(steps, group)
        dense[:, head] = (weighed(weights, layer.values[head]) / total).reshape(steps, group, dim)
        most = max(ks)
        order = np.argpartition(-weights, most - 1, axis=1)[:, :most]
        kept = np.take_along_axis(weights, order, 1)
        place = np.argsort(-kept, axis=1)
        order, kept = np.take_along_axis(order, place, 1), np.take_along_axis(kept, place, 1)
        slopes.append(_slope(kept))
        for k in ks:
            part = kept[:, :k].sum(axis=1, dtype=np.float64)
            mass[k][:, head] = (part / total[:, 0]).reshape(steps, group)
            out = np.stack(
                [
                    own @ encodings.decode(layer.values[head][ids]) / whole
                    for own, ids, whole in zip(kept[:, :k], order[:, :k], part, strict=True)
                ]
            )
            best[k][:, head] = out.reshape(steps, group, dim)
    return Truth(lse, dense, mass, best, float(np.mean(slopes)))


def judge(layer: Layer, exact: Truth, k: int, outs: Float32, ids: Sequence[Sequence[Ids]] | None) -> Fidelity:
    """`outs [S, Hkv, G, D]` are the outputs of the steps, `ids[step][head]` `[G, n]` the tokens that were
    attended to, padded with -1, or None for all tokens. Their mass is counted from the keys, whatever scores
    a method claims. `layer` may be the first heads of the one that `exact` is of.
    """
    k = min(k, layer.length)
    steps, heads = len(outs), len(layer.keys)
    oracle = exact.mass[k][:steps, :heads]
    mass = np.ones(oracle.shape)
    if ids is not None:
        for place in np.ndindex(mass.shape):
            step, head, row = place
            lse = float(exact.lse[place])
            mass[place] = mass_of(layer, head, layer.steps[place], ids[step][head][row], lse)
    ratio = np.minimum(mass / oracle, 1)
    return Fidelity(
        ratio=float(ratio.mean()),
        ratio_p5=float(np.percentile(ratio, 5)),
        ratio_worst=float(ratio.min()),
        mass=float(mass.mean()),
        error_dense=_error(outs, exact.dense[:steps, :heads]),
        error_topk=_error(outs, exact.best[k][:steps, :heads]),
    )


def mass_of(layer: Layer, head: int, query: Float32, ids: Ids, lse: float) -> float:
    """What tokens `ids [n]` hold of the exponentials of a query's logits, in units of `exp(lse)`: with the
    log-sum-exp of all tokens, their share of the attention. A token counts once.
    """
    found = np.unique(ids[ids >= 0])
    logits = encodings.decode(layer.keys[head][found]) @ query * np.float32(layer.scaling)
    return float(np.exp(logits.astype(np.float64) - lse).sum())


def scores(rows: Float32, keys: npt.NDArray[Any]) -> Float32:
    """Inner products `[R, N]`."""
    found = np.empty((len(rows), len(keys)), np.float32)
    for start in range(0, len(keys), BLOCK):
        part = slice(start, start + BLOCK)
        np.matmul(rows, encodings.decode(keys[part]).T, out=found[:, part])
    return found


def weighed(weights: Float32, values: npt.NDArray[Any]) -> Float32:
    """Sums `[R, D]` of values by `weights [R, N]`."""
    total = np.zeros((len(weights), encodings.dim(values)), np.float32)
    for start in range(0, len(values), BLOCK):
        part = slice(start, start + BLOCK)
        total += weights[:, part] @ encodings.decode(values[part])
    return total


def _slope(kept: Float32) -> float:
    """Mean slope of `kept [R, n]`, sorted weights, from the 10th to the 10,000th where there are so many."""
    last = min(kept.shape[1], 10_000)
    if last < 20:
        return float("nan")
    ranks = np.unique(np.geomspace(10, last, 40).astype(int))
    logs = np.log(np.maximum(kept[:, ranks - 1], 1e-30).astype(np.float64))
    return float(np.mean(np.polyfit(np.log(ranks), logs.T, 1)[0]))


def _error(outs: Float32, exact: Float32) -> float:
    gap = np.linalg.norm((outs - exact).astype(np.float64), axis=-1)
    return float(np.mean(gap / np.linalg.norm(exact.astype(np.float64), axis=-1)))
