"""A way of a step, timed and judged: the rows of the benchmarks' tables."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks.fidelity import ENOUGH, Fidelity, Truth, judge
from benchmarks.history import table
from benchmarks.layers import Float32, Layer
from benchmarks.machine import Machine, Timing, timed
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

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "enough": self.fidelity.enough}


def measured(
    way: Way, layer: Layer, exact: Truth, k: int, machine: Machine, *, batch: int = 1, seconds: float = 2.0
) -> Row:
    """Times `way` over the layer's steps in turn, `batch` of them at once, and judges every step."""
    served = layer.heads(way.heads)
    steps = [np.ascontiguousarray(step) for step in served.steps]
    questions = [batched(served.steps, turn, batch) for turn in range(len(steps))]
    timing = timed(lambda turn: way.step(questions[turn % len(questions)]), seconds=seconds)
    scale = len(layer.keys) / way.heads
    per_layer = scale / way.layers
    timing = Timing(
        timing.median * per_layer,
        timing.lowest * per_layer,
        timing.highest * per_layer,
        timing.repetitions,
    )
    outs = np.stack([way.step(step) for step in steps])
    ids = None if way.chosen is None else [way.chosen(step) for step in steps]
    bytes_read = allowed = None
    if counted := [traffic for question in questions[:4] if (traffic := way.traffic(question))]:
        in_order = float(np.mean([traffic.in_order for traffic in counted])) * scale
        rows = float(np.mean([traffic.rows for traffic in counted])) * scale
        bytes_read = round(in_order + rows)
        allowed = (in_order / machine.read + rows / machine.gather) / timing.median
    return Row(
        data=layer.name,
        tokens=layer.length,
        k=k,
        batch=batch,
        way=way.name,
        side=way.side,
        heads=way.heads,
        of_heads=len(layer.keys),
        timing=timing,
        build_seconds=way.build_seconds * scale,
        parameter=way.parameter,
        fidelity=judge(served, exact, k, outs, ids),
        bytes=bytes_read,
        allowed=allowed,
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
    names = ["way", "ms", *(f"x {name}" for name in REFERENCES), "mass / oracle's", "p5", "worst", "mass"]
    names += ["error", "to exact k", "MB read", "allowed", "built s", "heads", "parameter"]
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
    yield f"{fidelity.ratio_p5:.3f}"
    yield f"{fidelity.ratio_worst:.3f}"
    yield f"{fidelity.mass:.3f}"
    yield f"{fidelity.error_dense:.1%}"
    yield f"{fidelity.error_topk:.1%}"
    yield "" if row.bytes is None else f"{row.bytes / 1e6:.1f}"
    yield "" if row.allowed is None else f"{row.allowed:.0%}"
    yield f"{row.build_seconds:.1f}"
    yield f"{row.heads} of {row.of_heads}" if row.heads < row.of_heads else str(row.heads)
    yield row.parameter


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """Single numbers for the history: of our ways, ratios first."""
    found: dict[str, float] = {}
    for row in rows:
        if row.side == BASELINE:
            continue
        place = f"{row.data}/{row.tokens}/k{row.k}/b{row.batch}/{row.way}"
        if row.fidelity.enough:
            ratios = {name: against(rows, row, reference) for name, reference in REFERENCES.items()}
            found |= {f"{place}/x {name}": ratio for name, ratio in ratios.items() if ratio is not None}
        found[f"{place}/mass ratio"] = row.fidelity.ratio
        found[f"{place}/ms"] = row.seconds * 1e3
        if row.allowed is not None:
            found[f"{place}/allowed"] = row.allowed
    return found
