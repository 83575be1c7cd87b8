"""How much of dense attention a step keeps: its share of the attention mass and the error of its output.

The reference is that of `eval fidelity`, `evals.closeness.Exact`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.layers import Float32, Layer, MemoryLayer
from offload_decode.evals.closeness import Exact

ENOUGH = 0.99  # of the oracle's mass, on average: below, a time does not count
TUNING_ROWS = 64  # queries of each head

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Fidelity:
    """Means over rows. ratio: mass of the tokens attended to over that of the exact top-k, at most 1, for a
    row's surplus makes no other row good. error: relative distance of the output to that of dense attention.
    """

    ratio: float
    error: float

    @property
    def enough(self) -> bool:
        return self.ratio >= ENOUGH


class Truth:
    """Dense attention and exact top-k attention, for each k, of queries `rows [Hkv, R, D]` of a layer."""

    def __init__(self, layer: Layer, rows: Float32, ks: Collection[int]) -> None:
        memory = MemoryLayer(layer)
        self.rows = rows
        self.exact = Exact(memory.host, 0, memory.queries(rows), {min(k, layer.length) for k in ks})

    @classmethod
    def of_steps(cls, layer: Layer, ks: Collection[int]) -> Truth:
        """Of the queries that are timed and judged, step by step."""
        return cls(layer, together(layer.steps), ks)

    @classmethod
    def of_sample(cls, layer: Layer, k: int) -> Truth:
        """Of queries that choose a search parameter, apart from those that are judged."""
        heads, group, dim = layer.steps.shape[1:]
        steps = layer.tuning.reshape(heads, -1, group, dim)
        spread = np.linspace(0, steps.shape[1] - 1, min(steps.shape[1], -(-TUNING_ROWS // group))).astype(int)
        return cls(layer, np.ascontiguousarray(steps[:, spread].reshape(heads, -1, dim)), [k])

    def judge(self, k: int, ids: Sequence[Ids] | None, out: Float32 | None = None) -> Fidelity:
        """Of tokens that were attended to, `[R, n]` of each head and padded with -1, or None for all tokens;
        `out [Hkv, R, D]`. Their mass is counted from the keys, whatever scores a method claims.
        """
        k = min(k, self.exact.host.length)
        chosen = None if ids is None else torch.from_numpy(np.stack(ids))
        given = self.exact.out if out is None else torch.from_numpy(out)
        _, mass, error, *_ = self.exact.judge(slice(None), chosen, given, k)
        return Fidelity(float((mass / self.exact.held[k]).clamp(max=1).mean()), float(error.mean()))


def together(steps: Float32) -> Float32:
    """Rows `[Hkv, S · G, D]` of steps `[S, Hkv, G, D]`, a step's group together."""
    _, heads, _, dim = steps.shape
    return np.ascontiguousarray(steps.swapaxes(0, 1)).reshape(heads, -1, dim)
