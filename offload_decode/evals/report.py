"""Runs as one HTML page that needs nothing from elsewhere: what is shown, for `report.html.jinja` to lay out.

A part of the page is a title with blocks: notes, tables, figures, examples, pairs of names and values. All
text is escaped by the template, and what cannot be seen in it is spelled out: models may have written it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from statistics import fmean
from typing import Any

from indexes.plain_files import NotPlain, open_plain
from offload_decode.errors import ConfigError
from offload_decode.evals import plots, runs
from offload_decode.evals.contender import DENSE
from offload_decode.evals.extra import REPORT, library, require
from offload_decode.evals.lengths import label
from offload_decode.evals.perplexity import NLL, Likelihood, at_chance, curve, likelihoods
from offload_decode.evals.plots import Line, Point
from offload_decode.evals.runs import ANSWER, Asked, Results, Said, questions_and_answers
from offload_decode.evals.sparsity import (
    NAMES,
    SPARSITY,
    entropy_by_head,
    left_out,
    predictions,
    questions,
    sparse_by,
)
from offload_decode.evals.stats import Estimate, Share, wilson
from offload_decode.evals.summary import Cell, Summary, budget_of, percent, summarize, without_budget
from offload_decode.evals.verdict import at_chance as tasks_at_chance
from offload_decode.evals.verdict import of_needles, verdict
from offload_decode.plain_json import parse

MOST = 256 << 20
"""Bytes of a file that is one JSON value."""
_COLUMNS = 6  # tasks side by side: as many as a sheet of paper is wide
_DEPTHS = 5  # parts of a text
_EXAMPLES = 3  # wrong answers of a task
_PANELS = {"dense": "dense", "selected": "", "control": "control: needle taken out"}
_TITLES = {
    "ruler": "RULER",
    "aggregate": "Tasks that need much of a text",
    "passkey": "Passkeys",
    "ablation": "Options of a selector",
    "perplexity": "Perplexity",
    "sparsity": "Sparsity",
}

Block = dict[str, Any]
Part = tuple[str, list[Block]]
Answers = Sequence[tuple[Asked, list[Said]]]


@dataclass(frozen=True)
class Value:
    """A cell of a table: its text, smaller text `beside` and `below` it, and the `share` that tints it."""

    text: str
    beside: str = ""
    below: tuple[str, ...] = ()
    strong: bool = False
    share: float | None = None
    chance: bool = False
    left: bool = False


@dataclass(frozen=True)
class Run:
    """What is shown of a file: `warnings` first, then the `opening` blocks, then titled parts."""

    title: str
    model: str
    lead: str
    file: str
    warnings: Sequence[str]
    grave: bool
    opening: Sequence[Block]
    parts: Sequence[Part]


def page(paths: Sequence[Path]) -> str:
    """The page of one run or several, in their order. Raises `ConfigError` for a file that holds none, and
    where the extra `eval` is missing.
    """
    require(*REPORT)
    runs = [_run(path) for path in paths]
    jinja, folder = library("jinja2"), files(__package__)
    markup = library("markupsafe").Markup

    def finalize(value: Any) -> Any:
        return plots.visible(value) if isinstance(value, str) and not isinstance(value, markup) else value

    def breakable(way: str) -> Any:
        pieces = plots.visible(way).replace(":", ":\0").replace(",", ",\0").split("\0")
        return markup("<wbr>").join(pieces)

    environment = jinja.Environment(autoescape=True, finalize=finalize, undefined=jinja.StrictUndefined)
    environment.filters["breakable"] = breakable
    template = environment.from_string(folder.joinpath("report.html.jinja").read_text(encoding="utf-8"))
    style = folder.joinpath("report.css").read_text(encoding="utf-8")
    text: str = template.render(
        title=f"Evaluation of {', '.join(dict.fromkeys(Path(run.model).name or run.model for run in runs))}",
        runs=runs,
        style=markup(style),
        digest=base64.b64encode(hashlib.sha256(style.encode()).digest()).decode(),
    )
    return text


def read(path: Path) -> Results | Mapping[str, Any]:
    """A run, or the object in a `needle.json` or `fidelity.json`. Raises `ConfigError` for anything else."""
    try:
        with open(open_plain(path, follow=True), "rb") as file:
            if b'"record"' in file.readline(64) or os.fstat(file.fileno()).st_size > MOST:
                return runs.read(path)
            file.seek(0)
            value = parse(file.read(MOST))
    except FileNotFoundError as error:
        raise ConfigError(f"there are no results at {path}: run `offload-decode eval` first") from error
    except NotPlain as error:
        raise ConfigError(f"there are no results at {path}: {error}") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is no file of an evaluation: {error}") from error
    if not isinstance(value, dict) or not isinstance(value.get("configuration"), dict):
        raise ConfigError(f"{path} is no file of an evaluation: it does not say what was measured")
    return value


def _run(path: Path) -> Run:
    found = read(path)
    if isinstance(found, Results):
        return _of_results(path, found)
    configuration = found["configuration"]
    shown = {"cells": _needles, "entries": _fidelity}
    name = next((name for name in shown if name in found), None)
    if name is None:
        raise ConfigError(f"{path} is no file of an evaluation: it has neither cells nor entries")
    try:
        title, warnings, parts = shown[name](found)
    except (KeyError, TypeError, AttributeError, ValueError, ZeroDivisionError) as error:
        file = "needle.json" if name == "cells" else "fidelity.json"
        raise ConfigError(
            f"this is no {file} of this release: its {name} are not whole ({error!r:.80})"
        ) from error
    parts.append(("Measured with", [_pairs(configuration, {"file": path.name})]))
    model = str(configuration.get("model", "?"))
    return Run(title, model, _lead(configuration, model, path), path.name, warnings, True, [], parts)


def _of_results(path: Path, found: Results) -> Run:
    header = found.header
    warnings: list[str] = []
    opening: list[Block] = []
    parts: list[Part] = []
    grave = True
    if found.of(ANSWER):
        summary = summarize(found)
        warnings, grave = verdict(summary), len(tasks_at_chance(summary)) == len(summary.tasks)
        opening = _headline(summary)
        parts += _answered(list(questions_and_answers(found)), summary)
    if found.of(SPARSITY):
        parts = [
            ("Keys that hold the attention", _keys(found)),
            ("Does entropy foretell the budget?", _entropy(found)),
            *parts,
        ]
    if found.of(NLL):
        lines = likelihoods(found)
        if not opening:
            warnings = at_chance(lines)
        parts += _likelihood(found, lines)
    if not parts:
        raise ConfigError(f"{path} holds nothing that could be shown yet: let a part of the run finish first")
    model = str(header.made_with.get("model", "?"))
    about = {
        "evaluation": header.evaluation,
        "started": header.started,
        "finished": f"{len(found.finished):,} of {header.units:,} parts",
        "file": path.name,
    }
    parts.append(("Measured with", [_pairs(about, header.made_with, header.configuration)]))
    title = _TITLES.get(header.evaluation, header.evaluation)
    lead = _lead(header.made_with, model, path)
    return Run(title, model, lead, path.name, warnings, grave, opening, parts)


def _lead(made_with: Mapping[str, Any], model: str, path: Path) -> str:
    return ", ".join(
        [model, *(str(made_with[key]) for key in ("dtype", "device") if key in made_with), path.name]
    )


# Questions and answers.


def _headline(summary: Summary) -> list[Block]:
    """The worst task and the mean of every way."""
    several = len(summary.tasks) > 1
    heading = ["way of answering", "worst, %" if several else "%", "95 %", "task"]
    heading += ["mean, %", "95 %"] if several else []
    groups, figures = [], []
    for length in summary.lengths:
        rows = []
        heads = [head for head in summary.headlines() if head.length == length]
        for head in heads:
            worst = head.worst.score
            row = [head.way, Value(percent(worst.mean), strong=True, chance=head.worst.at_chance)]
            row += [_interval(worst), Value(head.worst.task, left=True)]
            row += [percent(head.mean.mean), _interval(head.mean)] if several else []
            rows.append([*row, _count(fmean(cell.attended for cell in summary.at(length, head.way)))])
        title = f"{label(length)} tokens"
        groups.append((title, rows))
        source = plots.shares_svg([(h.way, h.worst.score, h.mean if several else None) for h in heads])
        told = "the accuracies of the table above, on a scale from 0 to 100 %"
        figures.append(_figure(f"{title}{', ◆ worst, ● mean' if several else ''}", told, source))
    counts = sorted({cell.score.count for cell in summary.cells})
    asked = f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"
    tasks = f"{len(summary.tasks)} tasks, " if several else ""
    return [
        _table("The worst task and the mean", [*heading, "tokens attended"], groups, ways=True),
        _note(f"{tasks}{asked} questions for each task and length. {_seeds(summary)}", dagger=True),
        _figures(figures),
    ]


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


def _answered(answers: Answers, summary: Summary) -> list[Part]:
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
        "Accuracy in %, the worst task first, with its 95 % interval (Wilson); below it RULER’s own score of "
        "the same answers, and the share of dense attention’s accuracy where that is at least 90 %."
    )
    blocks = [_note(legend, dagger=True)]
    for length in summary.lengths:
        by_task: dict[str, list[Cell]] = {}
        for cell in summary.cells:
            if cell.length == length:
                by_task.setdefault(cell.task, []).append(cell)
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
            rows.append(["control: facts taken out", *(_control(cell.control) for cell in any_cells)])
            rows.append(["guess from the question alone", *(percent(cell.guess) for cell in any_cells)])
            title = f"{label(length)} tokens{f', tasks {first + 1} to {last}' if sheets > 1 else ''}"
            blocks.append(_table(f"Accuracy at {title}", ["", *shown], [("", rows)], title, ways=True))
    return blocks


def _accuracy(cell: Cell | None) -> Value | str:
    if cell is None:
        return "–"
    below = [f"RULER {percent(cell.ruler.mean)}"]
    if cell.ratio is not None:
        below.append(f"{100 * cell.ratio:.0f} % of dense")
    score = cell.score
    return Value(percent(score.mean), _interval(score), tuple(below), True, score.mean, cell.at_chance)


def _control(share: Share | None) -> Value | str:
    return "not asked" if share is None else Value(percent(share.mean), _interval(share))


def _against_tokens(summary: Summary) -> list[Block]:
    families = summary.families()
    styles = {family: style for style, family in enumerate(families)}
    figures = []
    for task, length in ((task, length) for task in summary.tasks for length in summary.lengths):
        dense = summary.by_place.get((task, length, DENSE))
        lines, chance = [], dense.chance.mean if dense else 0.0
        for family, ways in families.items():
            cells = [cell for way in ways if (cell := summary.by_place.get((task, length, way)))]
            if cells:
                cells.sort(key=lambda cell: cell.attended)
                lines.append(Line(family, styles[family], tuple(map(_point, cells))))
                chance = chance if dense else cells[0].chance.mean
        if lines:
            told = _told(lines, lambda p: f"{100 * p.y:.0f} % at {_count(p.x)}")
            told += f"; {DENSE}: {100 * dense.score.mean:.0f} %" if dense else ""
            band = dense.score if dense else None
            across = "tokens attended"
            source = plots.lines_svg(lines, across, log_x=True, percent=True, band=band, rule=chance)
            figures.append(_figure(f"{task}, {label(length)} tokens", told, source))
    note = (
        "Accuracy in %, by the stored tokens attended to, a step, layer and head; bars are 95 % intervals. "
        "The dotted line is chance."
    )
    return [_note(note), _figures(figures, styles, band=True)] if figures else []


def _point(cell: Cell) -> Point:
    return Point(max(1.0, cell.attended), cell.score.mean, cell.score.low, cell.score.high)


def _reaching(summary: Summary) -> list[Block]:
    found = summary.reaching()
    families = list(dict.fromkeys(family for reached in found.values() for family in reached))
    groups = []
    for length in summary.lengths:
        rows = [
            [task, *(_reached(found[task, length], family) for family in families)]
            for task in summary.tasks
            if (task, length) in found
        ]
        if rows:
            groups.append((f"{label(length)} tokens", rows))
    note = (
        "The smallest budget from which on every budget that was measured scores at least 99 % of dense "
        "attention, for tasks in which that is at least 90 %. A few hundred questions do not tell 99 % from "
        "97 %: look at the intervals."
    )
    return [_note(note), _table("Budgets that suffice", ["task", *families], groups)] if families else []


def _reached(cells: Mapping[str, Cell | None], family: str) -> str:
    if family not in cells:
        return "–"
    cell = cells[family]
    return "none" if cell is None else budget_of(cell.way) or _count(cell.attended)


def _depths(answers: Answers, summary: Summary) -> list[Block]:
    """A grid of length and part of the text for each way, of the questions about one place."""
    scores: dict[tuple[str, int, int], list[float]] = {}
    tasks: dict[str, None] = {}
    for asked, replies in answers:
        if asked.depth is not None:
            tasks[asked.task] = None
            part = min(_DEPTHS - 1, int(asked.depth * _DEPTHS))
            for said in replies:
                if not said.control:
                    scores.setdefault((said.way, asked.length, part), []).append(said.score)
    grids = []
    for way in summary.ways:
        lengths = [length for length in summary.lengths if any(key[:2] == (way, length) for key in scores)]
        rows = [
            [
                f"{100 * part // _DEPTHS}–{100 * (part + 1) // _DEPTHS} %",
                *(_grid_cell(scores.get((way, length, part))) for length in lengths),
            ]
            for part in range(_DEPTHS)
        ]
        if lengths:
            grids.append(_table(f"Needles, {way}", ["depth", *map(label, lengths)], [("", rows)], way))
    note = (
        "Accuracy in % of all questions about one place of the text, by length in tokens and depth, with "
        f"95 % intervals: {', '.join(tasks)}."
    )
    return [_note(note), {"kind": "grids", "tables": grids}] if grids else []


def _grid_cell(scores: Sequence[float] | None) -> Value | str:
    if not scores:
        return "–"
    share = wilson(scores)
    return Value(f"{100 * share.mean:.0f}", below=(_interval(share),), strong=True, share=share.mean)


def _speed(summary: Summary) -> list[Block]:
    """What an answer cost: time and bytes a token, by way."""
    groups = []
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
            moved = _size(fmean(cell.bytes_moved for cell in cells))
            rows.append([way, took, faster, moved, _count(attended), share])
        groups.append((f"{label(length)} tokens", rows))
    heading = ["way of answering", "ms a token", "dense’s speed", "bytes moved a token", "tokens attended"]
    note = (
        "Medians over answers of a generated token’s time, means over tasks. They were taken in the course "
        "of the evaluation, on the machine below, and compare with nothing that was measured elsewhere."
    )
    return [_note(note), _table("Speed", [*heading, "of the store"], groups, ways=True)]


def _wrong(answers: Answers) -> list[Block]:
    """A few answers that were wrong, so that a reader can judge the scorer too."""
    examples: dict[str, list[Block]] = {}
    seen: dict[str, int] = {}
    rng = random.Random(0)
    for asked, replies in answers:
        wrong = [said for said in replies if said.score < 1 and not said.control]
        if wrong:
            seen[asked.task] = seen.get(asked.task, 0) + 1
            kept = examples.setdefault(asked.task, [])
            # Each wrongly answered question is as likely as the next to be shown.
            place = len(kept) if len(kept) < _EXAMPLES else rng.randrange(seen[asked.task])
            if place < _EXAMPLES:
                kept[place : place + 1] = [_example(asked, rng.choice(wrong))]
    tasks = [(task, f"{seen[task]:,}", kept) for task, kept in examples.items()]
    return [_note("Drawn at random."), {"kind": "examples", "tasks": tasks}] if tasks else []


def _example(asked: Asked, said: Said) -> Block:
    texts = {"asked": asked.asked, "expected": ", ".join(asked.expected), f"{said.way} said": said.said}
    depth = "" if asked.depth is None else f", at {100 * asked.depth:.0f} % of the text"
    scores = f"score {said.score:.2g}, RULER’s {said.ruler_score:.2g}"
    return {
        "lines": [(name, cut(text)) for name, text in texts.items()],
        "foot": f"{label(asked.length)} tokens{depth}; {scores}",
    }


# Needle grids and fidelity.


def _needles(found: Mapping[str, Any]) -> tuple[str, list[str], list[Part]]:
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
            [f"{100 * depth:.4g} %", *(_grid_cell(scores.get((panel, length, depth))) for length in lengths)]
            for depth in depths
        ]
        means = [
            wilson([score for depth in depths for score in scores.get((panel, length, depth), ())])
            for length in lengths
        ]
        rows.append(["all", *map(_control, means)])
        grids.append(_table(f"Needles, {title}", ["depth", *map(label, lengths)], [("", rows)], title))
    note = _note("Accuracy in %, by length in tokens and depth, with 95 % intervals.")
    warnings = of_needles([every["dense"], every["selected"]], every["control"])
    parts = [("Needles by length and depth", [note, {"kind": "grids", "tables": grids}])]
    return "needle in a haystack", warnings, parts


def _fidelity(found: Mapping[str, Any]) -> tuple[str, list[str], list[Part]]:
    """A table of selectors by budget."""
    rows = []
    for entry in found["entries"]:
        live, agreement = entry["live"], entry["agreement"]
        shares = [live["recall"], live["mass"], live["error"]["p50"], live["error"]["p95"]]
        named = [str(entry["label"]), str(entry["budget"]), _count(float(entry["attended"]))]
        divergence, same = f"{float(agreement['kl_mean']):.2g}", percent(float(agreement["top1"]))
        rows.append([*named, *(percent(float(share)) for share in shares), divergence, same])
    heading = ["selector", "budget", "tokens attended", "recall", "mass", "error, median", "error, 95th"]
    note = (
        "In %: the share of the exact top-k that was found (recall), the share of the attention that the "
        "selection holds (mass), the error of the attention to stored tokens, relative to dense attention, "
        "and how often the likeliest next token is that of dense attention."
    )
    table = _table("Fidelity by selector and budget", [*heading, "KL, nats", "same token"], [("", rows)])
    return "fidelity to exact attention", [], [("Selectors against exact attention", [_note(note), table])]


# Likelihood.


def _likelihood(found: Results, lines: Sequence[Likelihood]) -> list[Part]:
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
        attended = "–" if each.attended is None else _count(each.attended)
        more = ["", ""] if each.way == DENSE else [_signed(each.more.value), _limits(each.more, _signed)]
        row = [each.way, attended, f"{each.nll:.4f}", perplexity, *more, _count(each.tokens)]
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
    table = _table("Likelihood by way", [*heading, "tokens predicted"], list(groups.items()), ways=True)
    return [_note(note), table, *map(_note, shares)]


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
        figures.append(_figure(f"{label(length)} tokens", _told(lines, _nats), source))
    note = (
        "Nats a token above dense attention (the dotted line), by stored tokens attended to, with 95 % "
        "intervals."
    )
    return [_note(note), _figures(figures, styles)] if figures else []


def _by_position(found: Results) -> list[Block]:
    points: dict[str, list[Point]] = {}
    for each in curve(found):
        point = Point((each.first + each.last) / 2, each.nll, each.nll, each.nll)
        points.setdefault(each.way, []).append(point)
    styles = {name: style for style, name in enumerate(points)}
    lines = [Line(name, styles[name], tuple(own)) for name, own in points.items()]
    source = plots.lines_svg(lines, "position in the text", wide=True)
    figure = _figure("every token of the text", _told(lines, _nats), source)
    return [_note("Nats a token, over stretches of the text."), _figures([figure], styles)]


def _nats(point: Point) -> str:
    return f"{point.y:.3g} nats at {_count(point.x)}"


# Sparsity.


def _keys(found: Results) -> list[Block]:
    """Keys that hold the attention by task and by layer, and the entropy of every head."""
    rows = []
    for (task, length), group in sparse_by(found, lambda one: (one["task"], one["length"])).items():
        _, median, most = group.keys["90"]
        means = [_count(group.keys[name][0]) for name in NAMES]
        rest = [_count(median), _count(most), f"{group.entropy:.2f}", f"{group.effective:,.1f}"]
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
        _note(note),
        _table("Keys that hold the attention, by task", heading, [("", rows)]),
        *_layers(found),
        _note("Entropy of each query head’s attention to stored tokens, in nats, by task and layer."),
        _table("Entropy by layer and head", ["nats", *numbers], list(groups.items())),
    ]


def _layers(found: Results) -> list[Block]:
    layers = sorted(sparse_by(found, lambda record: record["layer"]).items())
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
    figure = _figure("Keys by layer", _told(lines, lambda point: f"{_count(point.y)} keys"), source)
    return [_note(note), _figures([figure], {line.name: line.style for line in lines})]


def _entropy(found: Results) -> list[Block]:
    asked = questions(found)
    rows = [
        [
            f"{each.predictor}, over {each.over}",
            _count(each.count),
            _correlation(each.rank.value),
            _limits(each.rank, _correlation),
            _correlation(each.pearson),
        ]
        for each in predictions(asked)
    ]
    needed = [each.needed for each in asked if each.needed is not None]
    none = "no number that can be told: dense attention answered none."
    note = (
        "Rank correlation (Spearman) with the fewest tokens that answer as well as dense attention, and "
        "Pearson’s with their logarithm; the length alone is what the others must beat. Questions needed "
        f"{f'{_count(fmean(needed))} tokens on average.' if needed else none}"
    )
    heading = ["predictor", "count", "rank correlation", "95 %", "Pearson’s r"]
    notes = [_note(f"{said[0].upper()}{said[1:]}.") for said in left_out(asked)]
    return [_note(note), _table("Predictors of the budget", heading, [("", rows)]), *notes]


def _correlation(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.2f}".replace("-", "−")


# Blocks and numbers.


def _note(text: str, dagger: bool = False) -> Block:
    return {"kind": "note", "text": text, "dagger": dagger}


def _table(
    name: str,
    heading: Sequence[str],
    groups: Sequence[tuple[str, Sequence[Sequence[Any]]]],
    caption: str = "",
    ways: bool = False,
) -> Block:
    """Rows in groups, each with a title ("": none); the first cell of a row names it, and may break behind
    its commas where it is one of the `ways`. `name` is what a screen reader calls the table.
    """
    shown = {"heading": heading, "groups": groups, "caption": caption, "ways": ways}
    return {"kind": "table", "name": name, **shown}


def _figure(caption: str, told: str, source: str) -> dict[str, str]:
    return {"caption": caption, "alt": f"{caption}: {told}", "src": source}


def _figures(figures: Sequence[Block], styles: dict[str, int] | None = None, band: bool = False) -> Block:
    legend = None
    if styles:
        told = f"Legend: {', '.join([*styles, *([DENSE] if band else [])])}"
        legend = {"alt": told, "src": plots.legend_svg(styles, band)}
    return {"kind": "figures", "figures": figures, "legend": legend}


def _told(lines: Iterable[Line], point: Any) -> str:
    return "; ".join(f"{line.name}: {', '.join(map(point, line.points))}" for line in lines)


def _pairs(*parts: Mapping[str, Any]) -> Block:
    """Plain values by their names; names of objects within each other are joined."""
    return {"kind": "pairs", "pairs": [row for part in parts for row in _flat("", part)]}


def _flat(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        spoken = f"{prefix} {name}".strip().replace("_", " ")
        if isinstance(value, dict) and all(isinstance(each, str | int | float) for each in value.values()):
            yield from _flat("" if name == "versions" else spoken, value)
        elif isinstance(value, list) and all(isinstance(each, str | int | float) for each in value):
            yield spoken, cut(", ".join(map(str, value)), 1200)
        else:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            yield spoken, cut(text, 1200)


def cut(text: str, most: int = 400) -> str:
    """The beginning of a long text, and how much more there is."""
    return text if len(text) <= most else f"{text[:most]} … ({len(text) - most:,} more characters)"


def _interval(share: Share) -> str:
    return f"{100 * share.low:.0f}–{100 * share.high:.0f}"


def _limits(value: Estimate, shown: Any) -> str:
    if value.low is None or value.high is None:
        return "–"
    return f"{shown(value.low)} to {shown(value.high)}"


def _signed(number: float) -> str:
    """With a sign in front, `−` for minus; nothing is +0."""
    text = f"{abs(number):.4f}"
    return text if float(text) == 0 else ("+" if number > 0 else "−") + text


def _count(number: float) -> str:
    return f"{number:,.0f}"


def _size(amount: float) -> str:
    """Bytes in decimal units."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:,.0f} {unit}" if unit == "bytes" or amount >= 100 else f"{amount:.3g} {unit}"
        amount /= 1000
    return f"{amount:,.3g} TB"
