"""The parts of the report about needle grids, fidelity, likelihood and sparsity."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from offload_decode.evals import plots
from offload_decode.evals.contender import DENSE
from offload_decode.evals.lengths import label
from offload_decode.evals.perplexity import Likelihood, curve
from offload_decode.evals.plots import Line, Point
from offload_decode.evals.report.blocks import (
    Block,
    Part,
    count,
    described,
    grid_cell,
    limits,
    paragraph,
    picture,
    pictures,
    share_cell,
    signed,
    table_of,
)
from offload_decode.evals.runs import Results
from offload_decode.evals.sparsity import NAMES, entropy_by_head, left_out, predictions, questions, sparse_by
from offload_decode.evals.stats import wilson
from offload_decode.evals.summary import percent, without_budget
from offload_decode.evals.verdict import of_needles

_PANELS = {"dense": "dense", "selected": "", "control": "control: needle taken out"}


def needles(found: Mapping[str, Any]) -> tuple[str, list[str], list[Part]]:
    """Grids of length and depth, and whether the needles found mean anything."""
    configuration = found["configuration"]
    scores: dict[tuple[str, int, float], list[float]] = {}
    for cell in found["cells"]:
        for panel in _PANELS:
            score = float(cell[panel]["score"])
            if not 0 <= score <= 1:
                raise ValueError(f"a score of {score}")
            scores.setdefault((panel, int(cell["length"]), float(cell["depth"])), []).append(score)
    lengths, depths = sorted({key[1] for key in scores}), sorted({key[2] for key in scores})
    options = [f"{name} {value}" for name, value in configuration.get("options", {}).items()]
    every: dict[str, list[float]] = {}
    grids = []
    for panel, name in _PANELS.items():
        every[panel] = [score for key, own in scores.items() if key[0] == panel for score in own]
        title = name or ", ".join([str(configuration["selector"]), *options])
        rows: list[list[Any]] = [
            [f"{100 * depth:.4g} %", *(grid_cell(scores.get((panel, length, depth))) for length in lengths)]
            for depth in depths
        ]
        means = [
            wilson([score for depth in depths for score in scores.get((panel, length, depth), ())])
            for length in lengths
        ]
        rows.append(["all", *map(share_cell, means)])
        grids.append(table_of(f"Needles, {title}", ["depth", *map(label, lengths)], [("", rows)], title))
    note = paragraph("Accuracy in %, by length in tokens and depth, with 95 % intervals.")
    warnings = of_needles([every["dense"], every["selected"]], every["control"])
    parts = [("Needles by length and depth", [note, {"kind": "grids", "tables": grids}])]
    return "needle in a haystack", warnings, parts


def fidelity(found: Mapping[str, Any]) -> tuple[str, list[str], list[Part]]:
    """A table of selectors by budget."""
    rows = []
    for entry in found["entries"]:
        live, agreement = entry["live"], entry["agreement"]
        shares = [live["recall"], live["mass"], live["error"]["p50"], live["error"]["p95"]]
        named = [str(entry["label"]), str(entry["budget"]), count(float(entry["attended"]))]
        divergence, same = f"{float(agreement['kl_mean']):.2g}", percent(float(agreement["top1"]))
        rows.append([*named, *(percent(float(share)) for share in shares), divergence, same])
    heading = ["selector", "budget", "tokens attended", "recall", "mass", "error, median", "error, 95th"]
    note = (
        "In %: the share of the exact top-k that was found (recall), the share of the attention that the "
        "selection holds (mass), the error of the attention to stored tokens, relative to dense attention, "
        "and how often the likeliest next token is that of dense attention."
    )
    table = table_of("Fidelity by selector and budget", [*heading, "KL, nats", "same token"], [("", rows)])
    return (
        "fidelity to exact attention",
        [],
        [("Selectors against exact attention", [paragraph(note), table])],
    )


# Likelihood.


def likelihood(found: Results, lines: Sequence[Likelihood]) -> list[Part]:
    sliding = found.header.configuration.get("fashion") == "sliding"
    parts = [("Likelihood by selector and budget", _likelihood_table(lines, sliding))]
    if blocks := _likelihood_against_tokens(lines):
        parts.append(("Likelihood against tokens loaded", blocks))
    if sliding:
        parts.append(("Likelihood by position", _by_position(found)))
    return parts


def _likelihood_table(found: Sequence[Likelihood], sliding: bool) -> list[Block]:
    behind = "behind up to " if sliding else "behind "
    groups: dict[str, list[list[Any]]] = {}
    shares = []
    for each in found:
        where = f"{behind}{label(each.length)} stored tokens"
        perplexity = f"{each.perplexity:,.2f}" if each.perplexity < 1e6 else f"{each.perplexity:.3g}"
        attended = "–" if each.attended is None else count(each.attended)
        more = ["", ""] if each.way == DENSE else [signed(each.more.value), limits(each.more, signed)]
        row = [each.way, attended, f"{each.nll:.4f}", perplexity, *more, count(each.tokens)]
        groups.setdefault(where, []).append(row)
        if each.way == DENSE and each.tail_share is not None:
            shares.append(
                f"{100 * each.tail_share:.1f} % of dense attention {where} goes to the chunk’s own tokens, "
                "which every way attends to whole."
            )
    heading = ["way", "tokens attended", "nats a token", "perplexity", "above dense", "95 %"]
    note = (
        "Negative log-likelihood of the text’s own next tokens, and how much more of it there is than with "
        "dense attention on the same tokens; intervals from draws of blocks of neighbours. "
        "“window:512” is the bare model, which sees the 512 tokens before the chunk and nothing else; "
        "“unigram” is no model: how often each token has come so far."
    )
    table = table_of("Likelihood by way", [*heading, "tokens predicted"], list(groups.items()), ways=True)
    return [paragraph(note), table, *map(paragraph, shares)]


def _likelihood_against_tokens(found: Sequence[Likelihood]) -> list[Block]:
    known = [each for each in found if each.attended is not None and each.way != DENSE]
    styles = {name: style for style, name in enumerate(dict.fromkeys(without_budget(e.way) for e in known))}
    figures = []
    for length in dict.fromkeys(each.length for each in known):
        points: dict[str, list[Point]] = {}
        for each in known:
            if each.length == length:
                more, at = each.more, max(1.0, each.attended or 0.0)
                low, high = (more.value if one is None else one for one in (more.low, more.high))
                points.setdefault(without_budget(each.way), []).append(Point(at, more.value, low, high))
        lines = [
            Line(name, styles[name], tuple(sorted(own, key=lambda point: point.x)))
            for name, own in points.items()
        ]
        source = plots.lines_svg(lines, "tokens attended", log_x=True, rule=0.0)
        figures.append(picture(f"{label(length)} tokens", described(lines, _nats), source))
    note = (
        "Nats a token above dense attention (the dotted line), by stored tokens attended to, with 95 % "
        "intervals."
    )
    return [paragraph(note), pictures(figures, styles)] if figures else []


def _by_position(found: Results) -> list[Block]:
    points: dict[str, list[Point]] = {}
    for each in curve(found):
        point = Point((each.first + each.last) / 2, each.nll, each.nll, each.nll)
        points.setdefault(each.way, []).append(point)
    styles = {name: style for style, name in enumerate(points)}
    lines = [Line(name, styles[name], tuple(own)) for name, own in points.items()]
    source = plots.lines_svg(lines, "position in the text", wide=True)
    figure = picture("every token of the text", described(lines, _nats), source)
    return [paragraph("Nats a token, over stretches of the text."), pictures([figure], styles)]


def _nats(point: Point) -> str:
    return f"{point.y:.3g} nats at {count(point.x)}"


# Sparsity.


def keys(found: Results) -> list[Block]:
    """Keys that hold the attention by task and by layer, and the entropy of every head."""
    rows = []
    for (task, length), group in sparse_by(found, lambda one: (one.task, one.length)).items():
        _, median, most = group.keys["90"]
        means = [count(group.keys[name][0]) for name in NAMES]
        rest = [count(median), count(most), f"{group.entropy:.2f}", f"{group.effective:,.1f}"]
        rows.append([task, label(length), *means, *rest])
    heading = ["task", "tokens", *(f"{name} %" for name in NAMES), "90 %, median head"]
    heading += ["90 %, 95th percentile", "entropy, nats", "exp(entropy)"]
    note = (
        "Stored tokens that hold so much of a head’s attention to stored tokens while dense attention writes "
        "its answer: means over layers, heads and questions."
    )
    heads = entropy_by_head(found)
    groups: dict[str, list[list[str]]] = {}
    for (task, layer), own in heads.items():
        groups.setdefault(task, []).append([f"layer {layer}", *(f"{nats:.2f}" for nats in own)])
    numbers = list(map(str, range(max(map(len, heads.values())))))
    return [
        paragraph(note),
        table_of("Keys that hold the attention, by task", heading, [("", rows)]),
        *_layers(found),
        paragraph("Entropy of each query head’s attention to stored tokens, in nats, by task and layer."),
        table_of("Entropy by layer and head", ["nats", *numbers], list(groups.items())),
    ]


def _layers(found: Results) -> list[Block]:
    layers = sorted(sparse_by(found, lambda record: record.layer).items())
    if len(layers) < 2:
        return []
    lines = []
    for style, name in enumerate(NAMES):
        points = []
        for layer, group in layers:
            mean, median, most = group.keys[name]
            points.append(Point(layer, mean, min(mean, median), max(mean, most)))
        lines.append(Line(f"{name} % of the attention", style, tuple(points)))
    note = (
        "By layer, on a logarithmic scale: the mean, and a bar from the median head to the 95th percentile."
    )
    source = plots.lines_svg(lines, "layer", log_y=True, wide=True)
    figure = picture("Keys by layer", described(lines, lambda point: f"{count(point.y)} keys"), source)
    return [paragraph(note), pictures([figure], {line.name: line.style for line in lines})]


def entropy(found: Results) -> list[Block]:
    asked = questions(found)
    rows = [
        [
            f"{each.predictor}, over {each.over}",
            count(each.count),
            _correlation(each.rank.value),
            limits(each.rank, _correlation),
            _correlation(each.pearson),
        ]
        for each in predictions(asked)
    ]
    needed = [each.needed for each in asked if each.needed is not None]
    none = "no number that can be told: dense attention answered none."
    note = (
        "Rank correlation (Spearman) with the fewest tokens that answer as well as dense attention, and "
        "Pearson’s with their logarithm; the length alone is what the others must beat. Questions needed "
        f"{f'{count(fmean(needed))} tokens on average.' if needed else none}"
    )
    heading = ["predictor", "count", "rank correlation", "95 %", "Pearson’s r"]
    notes = [paragraph(f"{said[0].upper()}{said[1:]}.") for said in left_out(asked)]
    return [paragraph(note), table_of("Predictors of the budget", heading, [("", rows)]), *notes]


def _correlation(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.2f}".replace("-", "−")
