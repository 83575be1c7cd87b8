"""The parts of the report about likelihoods, sparsity and fidelity."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from offload_decode.evals import sparsity
from offload_decode.evals.contender import DENSE, label
from offload_decode.evals.perplexity import Likelihood, curve
from offload_decode.evals.plots import Line, Point
from offload_decode.evals.report import blocks as show
from offload_decode.evals.report.blocks import Block, Part, count, pictures, plot, table
from offload_decode.evals.runs import Results, grouped
from offload_decode.evals.stats import Estimate
from offload_decode.evals.summary import percent, without_budget


def likelihood(found: Results, lines: Sequence[Likelihood]) -> list[Part]:
    sliding = found.header.configuration.get("fashion") == "sliding"
    parts = [("Likelihood by selector and budget", _likelihood_table(lines, sliding))]
    if blocks := _likelihood_against_tokens(lines):
        parts.append(("Likelihood against tokens loaded", blocks))
    if sliding:
        parts.append(("Likelihood by position", _by_position(found)))
    return parts


def _likelihood_table(found: Sequence[Likelihood], sliding: bool) -> list[Block]:
    groups: dict[str, list[list[Any]]] = defaultdict(list)
    shares = []
    for each in found:
        where = f"behind {'up to ' if sliding else ''}{label(each.length)} stored tokens"
        perplexity = f"{each.perplexity:,.2f}" if each.perplexity < 1e6 else f"{each.perplexity:.3g}"
        attended = "–" if each.attended is None else count(each.attended)
        more = ["", ""] if each.way == DENSE else [_signed(each.more.value), _limits(each.more, _signed)]
        groups[where].append([each.way, attended, f"{each.nll:.4f}", perplexity, *more, count(each.tokens)])
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
    return [note, table("Likelihood by way", [*heading, "tokens predicted"], groups, ways=True), *shares]


def _likelihood_against_tokens(found: Sequence[Likelihood]) -> list[Block]:
    known = [each for each in found if each.attended is not None and each.way != DENSE]
    styles = show.styles_of(without_budget(each.way) for each in known)
    figures = []
    for length, here in grouped(known, lambda each: each.length).items():
        lines = [
            Line(family, styles[family], tuple(sorted(map(_more_at, own), key=lambda point: point.x)))
            for family, own in grouped(here, lambda each: without_budget(each.way)).items()
        ]
        figures.append(plot(f"{label(length)} tokens", lines, _nats, "tokens attended", log_x=True, rule=0.0))
    note = (
        "Nats a token above dense attention (the dotted line), by stored tokens attended to, with 95 % "
        "intervals."
    )
    return [note, pictures(figures, styles)] if figures else []


def _more_at(each: Likelihood) -> Point:
    low, high = (each.more.value if limit is None else limit for limit in (each.more.low, each.more.high))
    return Point(max(1.0, each.attended or 0.0), each.more.value, low, high)


def _by_position(found: Results) -> list[Block]:
    points: dict[str, list[Point]] = defaultdict(list)
    for each in curve(found):
        points[each.way].append(Point((each.first + each.last) / 2, each.nll, each.nll, each.nll))
    styles = show.styles_of(points)
    lines = [Line(name, styles[name], tuple(own)) for name, own in points.items()]
    figure = plot("every token of the text", lines, _nats, "position in the text", wide=True)
    return ["Nats a token, over stretches of the text.", pictures([figure], styles)]


def _nats(point: Point) -> str:
    return f"{point.y:.3g} nats at {count(point.x)}"


def _limits(value: Estimate, shown: Callable[[float], str]) -> str:
    if value.low is None or value.high is None:
        return "–"
    return f"{shown(value.low)} to {shown(value.high)}"


def _signed(number: float) -> str:
    """With a sign in front, `−` for minus; nothing is +0."""
    text = f"{abs(number):.4f}"
    return text if float(text) == 0 else ("+" if number > 0 else "−") + text


def keys(found: Results) -> list[Block]:
    """Keys that hold the attention by task and by layer, and the entropy of every head."""
    by_task = sparsity.sparse_by(found, lambda one: (one.task, one.length))
    rows = [[task, label(length), *group.cells()] for (task, length), group in by_task.items()]
    heads = sparsity.entropy_by_head(found)
    groups: dict[str, list[list[str]]] = defaultdict(list)
    for (task, layer), own in heads.items():
        groups[task].append([f"layer {layer}", *(f"{nats:.2f}" for nats in own)])
    return [
        "Stored tokens that hold so much of a head’s attention to stored tokens while dense attention writes "
        "its answer: means over layers, heads and questions.",
        table("Keys that hold the attention, by task", ["task", "tokens", *sparsity.HEADING], rows),
        *_layers(found),
        "Entropy of each query head’s attention to stored tokens, in nats, by task and layer.",
        table("Entropy by layer and head", ["nats", *map(str, range(max(map(len, heads.values()))))], groups),
    ]


def _layers(found: Results) -> list[Block]:
    layers = sorted(sparsity.sparse_by(found, lambda record: record.layer).items())
    if len(layers) < 2:
        return []
    lines = []
    for style, name in enumerate(sparsity.NAMES):
        shares = [(layer, *group.keys[name]) for layer, group in layers]
        points = [Point(at, mean, min(mean, middle), max(mean, most)) for at, mean, middle, most in shares]
        lines.append(Line(f"{name} % of the attention", style, tuple(points)))
    figure = plot("Keys by layer", lines, lambda p: f"{count(p.y)} keys", "layer", log_y=True, wide=True)
    note = (
        "By layer, on a logarithmic scale: the mean, and a bar from the median head to the 95th percentile."
    )
    return [note, pictures([figure], show.styles_of(line.name for line in lines))]


def entropy(found: Results) -> list[Block]:
    asked = sparsity.questions(found)
    rows = [
        [
            f"{each.predictor}, over {each.over}",
            count(each.count),
            _correlation(each.rank.value),
            _limits(each.rank, _correlation),
            _correlation(each.pearson),
        ]
        for each in sparsity.predictions(asked)
    ]
    needed = [each.needed for each in asked if each.needed is not None]
    none = "no number that can be told: dense attention answered none."
    note = (
        "Rank correlation (Spearman) with the fewest tokens that answer as well as dense attention, and "
        "Pearson’s with their logarithm; the length alone is what the others must beat. Questions needed "
        f"{f'{count(fmean(needed))} tokens on average.' if needed else none}"
    )
    heading = ["predictor", "count", "rank correlation", "95 %", "Pearson’s r"]
    notes = [f"{said[0].upper()}{said[1:]}." for said in sparsity.left_out(asked)]
    return [note, table("Predictors of the budget", heading, rows), *notes]


def _correlation(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.2f}".replace("-", "−")


_FIDELITY: tuple[tuple[str, Callable[[Any], float], bool], ...] = (
    ("output error in %, median", lambda entry: 100 * entry["live"]["error"]["p50"], True),
    ("attention mass in %", lambda entry: 100 * entry["live"]["mass"], False),
    ("recall in %", lambda entry: 100 * entry["live"]["recall"], False),
    ("KL in nats", lambda entry: entry["agreement"]["kl_mean"], True),
)
"""What is drawn of an entry, and whether on a logarithmic scale."""


def fidelity(entries: Sequence[Mapping[str, Any]]) -> list[Part]:
    """A table of selectors by budget, and their measures by tokens attended."""
    rows = []
    for entry in entries:
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
    shown = table("Fidelity by selector and budget", [*heading, "KL, nats", "same token"], rows)
    by_label = grouped((each for each in entries if each["label"] != DENSE), lambda each: str(each["label"]))
    styles = show.styles_of(by_label)
    figures = []
    for name, value, log_y in _FIDELITY:
        lines = [Line(label, styles[label], _measured(own, value, log_y)) for label, own in by_label.items()]
        figures.append(plot(name, lines, _value_at, "tokens attended", log_x=True, log_y=log_y))
    return [("Selectors against exact attention", [note, shown, pictures(figures, styles)])]


def _measured(
    entries: Sequence[Mapping[str, Any]], value: Callable[[Any], float], positive: bool
) -> tuple[Point, ...]:
    places = sorted((max(1.0, float(entry["attended"])), float(value(entry))) for entry in entries)
    return tuple(Point(x, y, y, y) for x, y in places if y > 0 or not positive)


def _value_at(point: Point) -> str:
    return f"{point.y:.3g} at {count(point.x)}"
