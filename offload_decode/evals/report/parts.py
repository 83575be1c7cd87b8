"""The parts of the report: of questions and answers, likelihoods, sparsity, needle grids and fidelity."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from statistics import fmean
from typing import Any

from offload_decode.evals import plots, sparsity
from offload_decode.evals.contender import DENSE, label
from offload_decode.evals.perplexity import Likelihood, curve
from offload_decode.evals.plots import Line, Point
from offload_decode.evals.report.blocks import (
    Block,
    Part,
    Value,
    count,
    cut,
    grid,
    interval,
    picture,
    pictures,
    plot,
    share_cell,
    table,
)
from offload_decode.evals.runs import Asked, Results, Said, grouped
from offload_decode.evals.stats import Estimate, wilson
from offload_decode.evals.summary import Cell, Summary, budget_of, percent, without_budget
from offload_decode.evals.verdict import of_needles

_COLUMNS = 6  # tasks side by side: as many as a sheet of paper is wide
_DEPTHS = 5  # parts of a text
_EXAMPLES = 3  # wrong answers of a task
Answers = Sequence[tuple[Asked, list[Said]]]


def headline(summary: Summary) -> list[Block]:
    """The worst task and the mean of every way."""
    several = len(summary.tasks) > 1
    heading = ["way of answering", "worst, %" if several else "%", "95 %", "task"]
    heading += ["mean, %", "95 %"] if several else []
    groups, figures = {}, []
    for length, heads in grouped(summary.headlines(), lambda head: head.length).items():
        rows = []
        for head in heads:
            worst = head.worst.score
            row = [head.way, Value(percent(worst.mean), strong=True, chance=head.worst.at_chance)]
            row += [interval(worst), Value(head.worst.task, left=True)]
            row += [percent(head.mean.mean), interval(head.mean)] if several else []
            rows.append([*row, count(fmean(cell.attended for cell in summary.at(length, head.way)))])
        title = f"{label(length)} tokens"
        groups[title] = rows
        source = plots.shares_svg([(h.way, h.worst.score, h.mean if several else None) for h in heads])
        told = "the accuracies of the table above, on a scale from 0 to 100 %"
        figures.append(picture(f"{title}{', ◆ worst, ● mean' if several else ''}", told, source))
    counts = sorted({cell.score.count for cell in summary.cells})
    asked = f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"
    tasks = f"{len(summary.tasks)} tasks, " if several else ""
    return [
        table("The worst task and the mean", [*heading, "tokens attended"], groups, ways=True),
        _daggered(f"{tasks}{asked} questions for each task and length. {_seeds(summary)}"),
        pictures(figures),
    ]


def _daggered(text: str) -> Block:
    return {"kind": "note", "text": text}


def _seeds(summary: Summary) -> str:
    seeds = sorted({seed for cell in summary.cells for seed in cell.seeds})
    if len(seeds) < 2:
        return f"Seed {seeds[0]}."
    most = max(summary.cells, key=lambda cell: cell.spread)
    typical = fmean(cell.spread for cell in summary.cells)
    return (
        f"Seeds {', '.join(map(str, seeds))} are pooled; their means lie {100 * typical:.1f} points apart on "
        f"average, and {100 * most.spread:.1f} at most ({most.task}, {label(most.length)}, {most.way})."
    )


def answered(answers: Answers, summary: Summary) -> list[Part]:
    parts = [
        ("Accuracy by task and budget", _by_task(summary)),
        ("Accuracy against tokens loaded", _against_tokens(summary)),
        ("Budgets that do as well as dense attention", _reaching(summary)),
        ("Accuracy by length and depth", _depths(answers, summary)),
        ("Speed", _speed(summary)),
        ("Answers that were wrong", _wrong(answers)),
    ]
    return [(title, blocks) for title, blocks in parts if blocks]


def _by_task(summary: Summary) -> list[Block]:
    legend = (
        "Accuracy in %, the worst task first, with its 95 % interval (Wilson); below it, of the same "
        "answers, RULER’s string match and SQuAD’s exact match and F1, and the share of dense attention’s "
        "accuracy where that is at least 90 %."
    )
    blocks = [_daggered(legend)]
    for length in summary.lengths:
        by_task = grouped((cell for cell in summary.cells if cell.length == length), lambda cell: cell.task)
        tasks = sorted(by_task, key=lambda task: fmean(cell.score.mean for cell in by_task[task]))
        sheets = -(-len(tasks) // _COLUMNS)
        for sheet in range(sheets):
            first, last = (len(tasks) * place // sheets for place in (sheet, sheet + 1))
            shown = tasks[first:last]
            rows: list[list[Any]] = []
            for way in summary.ways:
                cells = [summary.by_place.get((task, length, way)) for task in shown]
                if any(cells):
                    rows.append([way, *map(_accuracy, cells)])
            any_cells = [by_task[task][0] for task in shown]
            rows.append(["control: facts taken out", *(share_cell(cell.control) for cell in any_cells)])
            rows.append(["guess from the question alone", *(percent(cell.guess) for cell in any_cells)])
            title = f"{label(length)} tokens{f', tasks {first + 1} to {last}' if sheets > 1 else ''}"
            blocks.append(table(f"Accuracy at {title}", ["", *shown], rows, title, ways=True))
    return blocks


def _accuracy(cell: Cell | None) -> Value | str:
    if cell is None:
        return "–"
    below = [f"match {percent(cell.ruler.mean)}"]
    if cell.exact is not None and cell.f1 is not None:
        below.append(f"exact {percent(cell.exact)}, F1 {percent(cell.f1)}")
    if cell.ratio is not None:
        below.append(f"{100 * cell.ratio:.0f} % of dense")
    score = cell.score
    return Value(percent(score.mean), interval(score), tuple(below), True, score.mean, cell.at_chance)


def _against_tokens(summary: Summary) -> list[Block]:
    families = summary.families()
    styles = {family: style for style, family in enumerate(families)}
    figures = []
    for task, length in product(summary.tasks, summary.lengths):
        dense = summary.by_place.get((task, length, DENSE))
        cells = {
            family: sorted(own, key=lambda cell: cell.attended)
            for family, ways in families.items()
            if (own := [cell for way in ways if (cell := summary.by_place.get((task, length, way)))])
        }
        if cells:
            lines = [Line(family, styles[family], tuple(map(_point, own))) for family, own in cells.items()]
            chance = (dense or [*cells.values()][-1][0]).chance.mean
            more, band = (f"; {DENSE}: {100 * dense.score.mean:.0f} %", dense.score) if dense else ("", None)
            how: dict[str, Any] = {"log_x": True, "percent": True, "band": band, "rule": chance}
            caption = f"{task}, {label(length)} tokens"
            figures.append(plot(caption, lines, _share_at, "tokens attended", more, **how))
    note = (
        "Accuracy in %, by the stored tokens attended to, a step, layer and head; bars are 95 % intervals. "
        "The dotted line is chance."
    )
    return [note, pictures(figures, styles, band=True)] if figures else []


def _point(cell: Cell) -> Point:
    return Point(max(1.0, cell.attended), cell.score.mean, cell.score.low, cell.score.high)


def _share_at(point: Point) -> str:
    return f"{100 * point.y:.0f} % at {count(point.x)}"


def _reaching(summary: Summary) -> list[Block]:
    found = summary.reaching()
    families = list(dict.fromkeys(family for reached in found.values() for family in reached))
    groups: dict[str, list[list[str]]] = defaultdict(list)
    for length, task in product(summary.lengths, summary.tasks):
        if reached := found.get((task, length)):
            row = [_reached(reached[family]) if family in reached else "–" for family in families]
            groups[f"{label(length)} tokens"].append([task, *row])
    note = (
        "The smallest budget from which on every budget that was measured scores at least 99 % of dense "
        "attention, for tasks in which that is at least 90 %. A few hundred questions do not tell 99 % from "
        "97 %: look at the intervals."
    )
    return [note, table("Budgets that suffice", ["task", *families], groups)] if families else []


def _reached(cell: Cell | None) -> str:
    return "none" if cell is None else budget_of(cell.way) or count(cell.attended)


def _depths(answers: Answers, summary: Summary) -> list[Block]:
    """A grid of length and part of the text for each way, of the questions about one place."""
    scores: dict[str, dict[tuple[int, int], list[float]]] = defaultdict(lambda: defaultdict(list))
    placed = [(asked, asked.depth, replies) for asked, replies in answers if asked.depth is not None]
    for asked, depth, replies in placed:
        part = min(_DEPTHS - 1, int(depth * _DEPTHS))
        for said in replies:
            if not said.control:
                scores[said.way][asked.length, part].append(said.score)
    names = {part: f"{100 * part // _DEPTHS}–{100 * (part + 1) // _DEPTHS} %" for part in range(_DEPTHS)}
    grids = [grid(way, scores[way], names) for way in summary.ways if way in scores]
    note = (
        "Accuracy in % of all questions about one place of the text, by length in tokens and depth, with "
        f"95 % intervals: {', '.join(dict.fromkeys(asked.task for asked, *_ in placed))}."
    )
    return [note, {"kind": "grids", "tables": grids}] if grids else []


def _speed(summary: Summary) -> list[Block]:
    """What an answer cost: time and bytes a token, by way."""
    groups = {}
    for length in summary.lengths:
        rows = []
        ways = {way: cells for way in summary.ways if (cells := summary.at(length, way))}
        means = {way: fmean(cell.seconds for cell in cells) for way, cells in ways.items()}
        for way, cells in ways.items():
            seconds = means[way]
            faster = f"{means[DENSE] / seconds:.2g} ×" if DENSE in means and seconds > 0 else "–"
            attended, stored = fmean(c.attended for c in cells), fmean(c.stored for c in cells)
            share = f"{100 * attended / stored:.3g} %" if stored else "–"
            took = f"{1000 * seconds:,.0f}" if seconds >= 0.1 else f"{1000 * seconds:.3g}"
            moved = _byte_size(fmean(cell.bytes_moved for cell in cells))
            rows.append([way, took, faster, moved, count(attended), share])
        groups[f"{label(length)} tokens"] = rows
    heading = ["way of answering", "ms a token", "dense’s speed", "bytes moved a token", "tokens attended"]
    note = (
        "Medians over answers of a generated token’s time, means over tasks. They were taken in the course "
        "of the evaluation, on the machine below, and compare with nothing that was measured elsewhere."
    )
    return [note, table("Speed", [*heading, "of the store"], groups, ways=True)]


def _byte_size(amount: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:,.0f} {unit}" if unit == "bytes" or amount >= 100 else f"{amount:.3g} {unit}"
        amount /= 1000
    return f"{amount:,.3g} TB"


def _wrong(answers: Answers) -> list[Block]:
    """A few answers that were wrong, so that a reader can judge the scorer too."""
    examples: dict[str, list[Block]] = defaultdict(list)
    seen: dict[str, int] = defaultdict(int)
    rng = random.Random(0)
    for asked, replies in answers:
        wrong = [said for said in replies if said.score < 1 and not said.control]
        if wrong:
            seen[asked.task] += 1
            kept = examples[asked.task]
            # Each wrongly answered question is as likely as the next to be shown.
            place = len(kept) if len(kept) < _EXAMPLES else rng.randrange(seen[asked.task])
            if place < _EXAMPLES:
                kept[place : place + 1] = [_example(asked, rng.choice(wrong))]
    tasks = [(task, f"{seen[task]:,}", kept) for task, kept in examples.items()]
    return ["Drawn at random.", {"kind": "examples", "tasks": tasks}] if tasks else []


def _example(asked: Asked, said: Said) -> Block:
    texts = {"asked": asked.asked, "expected": ", ".join(asked.expected), f"{said.way} said": said.said}
    depth = "" if asked.depth is None else f", at {100 * asked.depth:.0f} % of the text"
    scores = f"score {said.score:.2g}, string match {said.ruler_score:.2g}"
    return {
        "lines": [(name, cut(text)) for name, text in texts.items()],
        "foot": f"{label(asked.length)} tokens{depth}; {scores}",
    }


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
    styles = _styles(without_budget(each.way) for each in known)
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


def _styles(names: Iterable[str]) -> dict[str, int]:
    return {name: style for style, name in enumerate(dict.fromkeys(names))}


def _more_at(each: Likelihood) -> Point:
    low, high = (each.more.value if limit is None else limit for limit in (each.more.low, each.more.high))
    return Point(max(1.0, each.attended or 0.0), each.more.value, low, high)


def _by_position(found: Results) -> list[Block]:
    points: dict[str, list[Point]] = defaultdict(list)
    for each in curve(found):
        points[each.way].append(Point((each.first + each.last) / 2, each.nll, each.nll, each.nll))
    styles = _styles(points)
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
    rows = []
    for (task, length), group in sparsity.sparse_by(found, lambda one: (one.task, one.length)).items():
        _, median, most = group.keys["90"]
        means = [count(group.keys[name][0]) for name in sparsity.NAMES]
        rest = [count(median), count(most), f"{group.entropy:.2f}", f"{group.effective:,.1f}"]
        rows.append([task, label(length), *means, *rest])
    heading = ["task", "tokens", *(f"{name} %" for name in sparsity.NAMES), "90 %, median head"]
    heading += ["90 %, 95th percentile", "entropy, nats", "exp(entropy)"]
    heads = sparsity.entropy_by_head(found)
    groups: dict[str, list[list[str]]] = defaultdict(list)
    for (task, layer), own in heads.items():
        groups[task].append([f"layer {layer}", *(f"{nats:.2f}" for nats in own)])
    return [
        "Stored tokens that hold so much of a head’s attention to stored tokens while dense attention writes "
        "its answer: means over layers, heads and questions.",
        table("Keys that hold the attention, by task", heading, rows),
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
    return [note, pictures([figure], _styles(line.name for line in lines))]


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


def needles(found: Mapping[str, Any]) -> tuple[str, list[str], list[Part]]:
    """Grids of length and depth, and whether the needles found mean anything."""
    given = found["configuration"]
    options = [f"{name} {value}" for name, value in given.get("options", {}).items()]
    titles = {"dense": "dense", "selected": ", ".join([str(given["selector"]), *options])}
    titles["control"] = "control: needle taken out"
    depths = {at: f"{100 * at:.4g} %" for at in sorted({float(cell["depth"]) for cell in found["cells"]})}
    every, grids = [], []
    for panel, title in titles.items():
        scores: dict[tuple[int, float], list[float]] = defaultdict(list)
        for cell in found["cells"]:
            scores[int(cell["length"]), float(cell["depth"])].append(score := float(cell[panel]["score"]))
            if not 0 <= score <= 1:
                raise ValueError(f"a score of {score}")
        by_length = grouped(sorted(scores), lambda place: place[0]).values()
        means = [wilson([score for place in own for score in scores[place]]) for own in by_length]
        every.append([score for own in scores.values() for score in own])
        grids.append(grid(title, scores, depths, [["all", *map(share_cell, means)]]))
    note = "Accuracy in %, by length in tokens and depth, with 95 % intervals."
    parts: list[Part] = [("Needles by length and depth", [note, {"kind": "grids", "tables": grids}])]
    return "needle in a haystack", of_needles(every[:2], every[2]), parts


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
    shown = table("Fidelity by selector and budget", [*heading, "KL, nats", "same token"], rows)
    return "fidelity to exact attention", [], [("Selectors against exact attention", [note, shown])]
