"""A way of a step, timed and judged: the rows of the benchmarks' tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks.fidelity import ENOUGH, Fidelity, Truth, judge
from benchmarks.layers import Float32, Layer
from benchmarks.machine import Machine
from benchmarks.tables import table
from benchmarks.timing import Timing, timed
from benchmarks.ways import BASELINE, Way

NEARLY = ENOUGH - 0.01  # baselines are tuned on other queries than they are judged on

EVERYTHING = ("torch dense", "transformers")  # ways that attend to all tokens, whatever k

# What ratios are taken to, by the beginning of a name: of several, the fastest.
REFERENCES: dict[str, str | tuple[str, ...]] = {
    "flat": "faiss flat per query head",
    "IVF": "faiss IVF",
    "HNSW": ("faiss HNSW", "hnswlib per"),
    "dense": "torch dense",
    "offloaded": "transformers",
}


@dataclass(frozen=True)
class Row:
    """A way at one size. Seconds and bytes are of all `of_heads` KV heads of the layer: what was measured on
    `heads` of them is scaled up. allowed: the share of the time that the measured bandwidths allow for the
    bytes that were counted.
    """

    data: str
    tokens: int
    k: int
    batch: int
    way: str
    side: str
    heads: int
    of_heads: int
    timing: Timing
    build_seconds: float
    parameter: str
    fidelity: Fidelity
    bytes: int | None
    allowed: float | None

    @property
    def seconds(self) -> float:
        return self.timing.median

    def brief(self) -> str:
        """Its figures while others are still to come."""
        return f"{self.seconds * 1e3:.2f} ms, {self.fidelity.ratio:.4f} of the oracle's mass"

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "enough": self.fidelity.enough}


def measured(
    way: Way, layer: Layer, exact: Truth, k: int, machine: Machine, *, batch: int = 1, seconds: float = 2.0
) -> Row:
    """Times `way` over the layer's steps in turn, `batch` of them at once, and judges every step."""
    own = layer.heads(way.heads)
    steps = own.steps
    questions = [batched(steps, turn, batch) for turn in range(len(steps))]
    timing = timed(lambda turn: way.step(questions[turn % len(questions)]), seconds=seconds)
    scale = len(layer.keys) / way.heads
    per_layer = scale / way.layers
    timing = Timing(
        timing.median * per_layer,
        timing.lowest * per_layer,
        timing.highest * per_layer,
        timing.repetitions,
    )
    outs = np.stack([way.step(np.ascontiguousarray(one)) for one in steps])
    ids = None if way.chosen is None else [way.chosen(np.ascontiguousarray(one)) for one in steps]
    counted = [way.traffic(question) for question in questions[:4]]
    bytes_read = allowed = None
    if counted[0] is not None:
        in_order, rows = (
            float(np.mean([getattr(one, side) for one in counted])) * scale for side in ("in_order", "rows")
        )
        bytes_read = round(in_order + rows)
        allowed = (in_order / machine.read + rows / machine.gather) / timing.median
    return Row(
        layer.name,
        layer.length,
        k,
        batch,
        way.name,
        way.side,
        way.heads,
        len(layer.keys),
        timing,
        way.build_seconds * scale,
        way.parameter,
        judge(own, exact, k, outs, ids),
        bytes_read,
        allowed,
    )


def batched(steps: Float32, turn: int, batch: int) -> Float32:
    """`batch` steps from `turn` on as rows `[Hkv, batch · G, D]`, a step's group together."""
    places = [(turn + place) % len(steps) for place in range(batch)]
    _, heads, group, dim = steps.shape
    return np.ascontiguousarray(steps[places].swapaxes(0, 1)).reshape(heads, batch * group, dim)


def against(rows: Sequence[Row], row: Row, reference: str | tuple[str, ...]) -> float | None:
    """How many times a row is as fast as the fastest named baseline of its data, size, k and batch. One that
    holds less than NEARLY of the oracle's mass is none.
    """
    same = [
        other.seconds
        for other in rows
        if other.side == BASELINE
        and other.way.startswith(reference)
        and (other.data, other.tokens, other.batch) == (row.data, row.tokens, row.batch)
        and (other.k == row.k or other.way.startswith(EVERYTHING))
        and other.fidelity.ratio >= NEARLY
    ]
    return min(same) / row.seconds if same else None


def show(rows: Sequence[Row], among: Sequence[Row] | None = None) -> str:
    """A table: milliseconds, times as fast as the baselines, fidelity, bytes. A ratio in brackets does not
    count, for its way holds less than enough of the oracle's mass.
    """
    heads = [
        "way",
        "ms",
        *(f"x {name}" for name in REFERENCES),
        "mass / oracle's",
        "p5",
        "worst",
        "mass",
        "error",
        "to exact k",
        "MB read",
        "allowed",
        "built s",
        "heads",
        "parameter",
    ]
    lines = []
    for row in rows:
        held = row.fidelity
        ratios = [against(among or rows, row, reference) for reference in REFERENCES.values()]
        written = ["" if r is None else f"{r:.2g}" if r < 10 else f"{r:.0f}" for r in ratios]
        lines.append(
            [
                row.way,
                f"{row.seconds * 1e3:.2f}",
                *(cell if held.enough or not cell else f"({cell})" for cell in written),
                f"{held.ratio:.4f}" + ("" if held.enough else " low"),
                f"{held.ratio_p5:.3f}",
                f"{held.ratio_worst:.3f}",
                f"{held.mass:.3f}",
                f"{held.error_dense:.1%}",
                f"{held.error_topk:.1%}",
                "" if row.bytes is None else f"{row.bytes / 1e6:.1f}",
                "" if row.allowed is None else f"{row.allowed:.0%}",
                f"{row.build_seconds:.1f}",
                f"{row.heads} of {row.of_heads}" if row.heads < row.of_heads else str(row.heads),
                row.parameter,
            ]
        )
    return table(heads, lines)


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """Single numbers for the history: of our ways, ratios first."""
    found: dict[str, float] = {}
    for row in rows:
        if row.side == BASELINE:
            continue
        place = f"{row.data}/{row.tokens}/k{row.k}/b{row.batch}/{row.way}"
        ratios = {name: against(rows, row, reference) for name, reference in REFERENCES.items()}
        if row.fidelity.enough:
            found |= {f"{place}/x {name}": ratio for name, ratio in ratios.items() if ratio is not None}
        found[f"{place}/mass ratio"] = row.fidelity.ratio
        found[f"{place}/ms"] = row.seconds * 1e3
        if row.allowed is not None:
            found[f"{place}/allowed"] = row.allowed
    return found
