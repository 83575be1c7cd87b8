"""A way of a step, timed and judged: the rows of the benchmarks' tables."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np

from benchmarks.fidelity import ENOUGH, Fidelity, Truth, together
from benchmarks.history import table
from benchmarks.layers import Float32, Layer
from benchmarks.machine import Machine, timed
from benchmarks.ways import BASELINE, Way

NEARLY = ENOUGH - 0.01  # baselines are tuned on other queries than they are judged on
DENSE = "torch dense"  # attends to all tokens, whatever k
# What ratios are taken to, by the beginning of a name: of several, the fastest.
REFERENCES = {"flat": "faiss flat per query head", "IVF": "faiss IVF", "dense": DENSE}


@dataclass(frozen=True)
class Row:
    """A way at one size. Seconds are of all `of_heads` KV heads of the layer: what was measured on `heads` of
    them is scaled up. allowed: the share of the time that the measured bandwidths allow for the bytes that
    were counted.
    """

    tokens: int
    k: int
    batch: int
    way: str
    side: str
    heads: int
    of_heads: int
    seconds: float
    parameter: str
    fidelity: Fidelity
    allowed: float | None

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "enough": self.fidelity.enough}


def measured(
    way: Way, layer: Layer, exact: Truth, k: int, machine: Machine, *, batch: int = 1, seconds: float = 2.0
) -> Row:
    """Times `way` over the layer's steps in turn, `batch` of them at once, and judges every step; `exact` is
    of the same heads.
    """
    of_heads = layer.steps[:, : way.heads]
    steps = [np.ascontiguousarray(step) for step in of_heads]
    questions = [batched(of_heads, turn, batch) for turn in range(len(steps))]
    scale = len(layer.keys) / way.heads
    taken = scale * median(timed(lambda turn: way.step(questions[turn % len(questions)]), seconds=seconds))
    out = together(np.stack([way.step(step) for step in steps]))
    ids = None if way.chosen is None else way.chosen(exact.rows)
    allowed = None
    if way.traffic is not None:
        counted = [way.traffic(question) for question in questions[:4]]
        in_order = float(np.mean([traffic.in_order for traffic in counted])) * scale
        rows = float(np.mean([traffic.rows for traffic in counted])) * scale
        allowed = (in_order / machine.read + rows / machine.gather) / taken
    return Row(
        tokens=layer.length,
        k=k,
        batch=batch,
        way=way.name,
        side=way.side,
        heads=way.heads,
        of_heads=len(layer.keys),
        seconds=taken,
        parameter=way.parameter,
        fidelity=exact.judge(k, ids, out),
        allowed=allowed,
    )


def batched(steps: Float32, turn: int, batch: int) -> Float32:
    """`batch` steps from `turn` on as rows `[Hkv, batch · G, D]`, a step's group together."""
    return together(steps[[(turn + place) % len(steps) for place in range(batch)]])


def against(rows: Sequence[Row], row: Row, reference: str) -> float | None:
    """How many times a row is as fast as the fastest named baseline of its size, k and batch. One that holds
    less than NEARLY of the oracle's mass is none.
    """
    same = [
        other.seconds
        for other in rows
        if other.side == BASELINE
        and other.way.startswith(reference)
        and (other.tokens, other.batch) == (row.tokens, row.batch)
        and (other.k == row.k or other.way.startswith(DENSE))
        and other.fidelity.ratio >= NEARLY
    ]
    return min(same) / row.seconds if same else None


def show(rows: Sequence[Row], among: Sequence[Row] | None = None) -> str:
    """A table: milliseconds, times as fast as the baselines, fidelity. A ratio in brackets does not
    count, for its way holds less than enough of the oracle's mass.
    """
    names = ["way", "ms", *(f"x {name}" for name in REFERENCES), "mass / oracle's", "error"]
    names += ["allowed", "heads", "parameter"]
    return table(names, [list(_cells(row, among or rows)) for row in rows])


def _cells(row: Row, among: Sequence[Row]) -> Iterator[str]:
    fidelity = row.fidelity
    yield row.way
    yield f"{row.seconds * 1e3:.2f}"
    for reference in REFERENCES.values():
        ratio = against(among, row, reference)
        written = "" if ratio is None else f"{ratio:.2g}" if ratio < 10 else f"{ratio:.0f}"
        yield written if fidelity.enough or not written else f"({written})"
    yield f"{fidelity.ratio:.4f}" + ("" if fidelity.enough else " low")
    yield f"{fidelity.error:.1%}"
    yield "" if row.allowed is None else f"{row.allowed:.0%}"
    yield f"{row.heads} of {row.of_heads}" if row.heads < row.of_heads else str(row.heads)
    yield row.parameter


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """Single numbers for the history: of our ways, ratios first."""
    found: dict[str, float] = {}
    for row in rows:
        if row.side == BASELINE:
            continue
        place = f"long-tailed/{row.tokens}/k{row.k}/b{row.batch}/{row.way}"
        if row.fidelity.enough:
            ratios = {name: against(rows, row, reference) for name, reference in REFERENCES.items()}
            found |= {f"{place}/x {name}": ratio for name, ratio in ratios.items() if ratio is not None}
        found[f"{place}/mass ratio"] = row.fidelity.ratio
        found[f"{place}/ms"] = row.seconds * 1e3
        if row.allowed is not None:
            found[f"{place}/allowed"] = row.allowed
    return found
