"""The part of a page about a run of `eval sparsity`."""

from __future__ import annotations

import math
from statistics import fmean

from offload_decode.evals.lengths import label
from offload_decode.evals.report import plot
from offload_decode.evals.report.html import Markup, Part, join, tag
from offload_decode.evals.report.numbers import count
from offload_decode.evals.report.tables import table
from offload_decode.evals.resampling import Estimate
from offload_decode.evals.results import Results
from offload_decode.evals.sparsity_report import (
    NAMES,
    entropy_by_head,
    left_out,
    predictions,
    questions,
    sparse_by,
)


def parts(results: Results) -> list[tuple[str, Markup]]:
    """Keys that hold the attention by task and by layer, and how well entropy foretells the budget needed."""
    return [
        ("Keys that hold the attention", _keys(results)),
        ("Does entropy foretell the budget?", _entropy(results)),
    ]


def _keys(results: Results) -> Markup:
    rows: list[list[Part]] = []
    for (task, length), group in sparse_by(
        results, lambda record: (record["task"], record["length"])
    ).items():
        means = [count(group.keys[name][0]) for name in NAMES]
        rest = [f"{group.entropy:.2f}", f"{group.effective:,.1f}"]
        rows.append(
            [task, label(length), *means, count(group.keys["90"][1]), count(group.keys["90"][2]), *rest]
        )
    heading: list[Part] = ["task", "tokens", *(f"{name} %" for name in NAMES)]
    heading += ["90 %, median head", "90 %, 95th percentile", "entropy, nats", "exp(entropy)"]
    note = (
        "Stored tokens that hold so much of a head’s attention to stored tokens while dense attention writes "
        "its answer: means over layers, heads and questions."
    )
    whole = table(None, heading, [(None, rows)], "Keys that hold the attention, by task")
    return join([tag("p", note, class_="note"), whole, _layers(results), _heads(results)])


def _layers(results: Results) -> Markup | None:
    layers = sparse_by(results, lambda record: record["layer"])
    if len(layers) < 2:
        return None
    ordered = sorted(layers.items())
    lines = []
    for style, name in enumerate(NAMES):
        points = []
        for layer, group in ordered:
            mean, median, most = group.keys[name]
            points.append(plot.Point(layer, mean, min(mean, median), max(mean, most)))
        lines.append(plot.Line(f"{name} % of the attention", style, tuple(points)))
    values = [value for line in lines for point in line.points for value in (point.low, point.high)]
    across = plot.steps("layer", [layer for layer, _ in ordered])
    up = plot.log_axis("keys", values)
    told = "; ".join(
        f"{line.name}: {', '.join(count(point.y) for point in line.points)} keys" for line in lines
    )
    picture = plot.lines("Keys by layer", told, across, up, lines, (), plot.WIDE)
    legend = tag("ul", [plot.key(line.style, line.name) for line in lines], class_="legend")
    note = (
        "By layer, on a logarithmic scale: the mean, and a bar from the median head to the 95th percentile."
    )
    return join([tag("p", note, class_="note"), legend, tag("figure", picture)])


def _heads(results: Results) -> Markup:
    """The entropy of every head, by task and layer."""
    found = entropy_by_head(results)
    groups: dict[Part, list[list[Part]]] = {}
    for (task, layer), heads in found.items():
        groups.setdefault(task, []).append([f"layer {layer}", *(f"{nats:.2f}" for nats in heads)])
    heading: list[Part] = ["nats", *map(str, range(max(map(len, found.values()))))]
    note = "Entropy of each query head’s attention to stored tokens, in nats, by task and layer."
    drawn = table(None, heading, list(groups.items()), "Entropy by layer and head")
    return join([tag("p", note, class_="note"), drawn])


def _entropy(results: Results) -> Markup:
    asked = questions(results)
    rows: list[list[Part]] = []
    for each in predictions(asked):
        row: list[Part] = [f"{each.predictor}, over {each.over}", count(each.count)]
        rows.append([*row, _number(each.rank.value), _interval(each.rank), _number(each.pearson)])
    needed = [each.needed for each in asked if each.needed is not None]
    none = " no number that can be told: dense attention answered none."
    middle = f" {count(fmean(needed))} tokens on average." if needed else none
    note = (
        "Rank correlation (Spearman) with the fewest tokens that answer as well as dense attention, and "
        f"Pearson’s with their logarithm; the length alone is what the others must beat. Questions "
        f"needed{middle}"
    )
    heading: list[Part] = ["predictor", "count", "rank correlation", "95 %", "Pearson’s r"]
    return join(
        [
            tag("p", note, class_="note"),
            table(None, heading, [(None, rows)], "Predictors of the budget"),
            [tag("p", f"{said[0].upper()}{said[1:]}.", class_="note") for said in left_out(asked)],
        ]
    )


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.2f}".replace("-", "−")


def _interval(value: Estimate) -> str:
    if value.low is None or value.high is None:
        return "–"
    return f"{_number(value.low)} to {_number(value.high)}"
