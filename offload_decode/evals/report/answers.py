"""The parts of the report about a run that asked questions."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from offload_decode.evals import plots
from offload_decode.evals.contender import DENSE
from offload_decode.evals.lengths import label
from offload_decode.evals.plots import Line, Point
from offload_decode.evals.report.blocks import (
    Block,
    Part,
    Value,
    byte_size,
    count,
    cut,
    described,
    grid_cell,
    interval,
    paragraph,
    picture,
    pictures,
    share_cell,
    table_of,
)
from offload_decode.evals.runs import Asked, Said
from offload_decode.evals.summary import Cell, Summary, budget_of, percent

_COLUMNS = 6  # tasks side by side: as many as a sheet of paper is wide
_DEPTHS = 5  # parts of a text
_EXAMPLES = 3  # wrong answers of a task
Answers = Sequence[tuple[Asked, list[Said]]]


def headline(summary: Summary) -> list[Block]:
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
            row += [interval(worst), Value(head.worst.task, left=True)]
            row += [percent(head.mean.mean), interval(head.mean)] if several else []
            rows.append([*row, count(fmean(cell.attended for cell in summary.at(length, head.way)))])
        title = f"{label(length)} tokens"
        groups.append((title, rows))
        source = plots.shares_svg([(h.way, h.worst.score, h.mean if several else None) for h in heads])
        told = "the accuracies of the table above, on a scale from 0 to 100 %"
        figures.append(picture(f"{title}{', ◆ worst, ● mean' if several else ''}", told, source))
    counts = sorted({cell.score.count for cell in summary.cells})
    asked = f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"
    tasks = f"{len(summary.tasks)} tasks, " if several else ""
    return [
        table_of("The worst task and the mean", [*heading, "tokens attended"], groups, ways=True),
        paragraph(f"{tasks}{asked} questions for each task and length. {_seeds(summary)}", dagger=True),
        pictures(figures),
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
    blocks = [paragraph(legend, dagger=True)]
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
            rows.append(["control: facts taken out", *(share_cell(cell.control) for cell in any_cells)])
            rows.append(["guess from the question alone", *(percent(cell.guess) for cell in any_cells)])
            title = f"{label(length)} tokens{f', tasks {first + 1} to {last}' if sheets > 1 else ''}"
            blocks.append(table_of(f"Accuracy at {title}", ["", *shown], [("", rows)], title, ways=True))
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
            told = described(lines, lambda p: f"{100 * p.y:.0f} % at {count(p.x)}")
            told += f"; {DENSE}: {100 * dense.score.mean:.0f} %" if dense else ""
            band = dense.score if dense else None
            across = "tokens attended"
            source = plots.lines_svg(lines, across, log_x=True, percent=True, band=band, rule=chance)
            figures.append(picture(f"{task}, {label(length)} tokens", told, source))
    note = (
        "Accuracy in %, by the stored tokens attended to, a step, layer and head; bars are 95 % intervals. "
        "The dotted line is chance."
    )
    return [paragraph(note), pictures(figures, styles, band=True)] if figures else []


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
    return (
        [paragraph(note), table_of("Budgets that suffice", ["task", *families], groups)] if families else []
    )


def _reached(cells: Mapping[str, Cell | None], family: str) -> str:
    if family not in cells:
        return "–"
    cell = cells[family]
    return "none" if cell is None else budget_of(cell.way) or count(cell.attended)


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
                *(grid_cell(scores.get((way, length, part))) for length in lengths),
            ]
            for part in range(_DEPTHS)
        ]
        if lengths:
            grids.append(table_of(f"Needles, {way}", ["depth", *map(label, lengths)], [("", rows)], way))
    note = (
        "Accuracy in % of all questions about one place of the text, by length in tokens and depth, with "
        f"95 % intervals: {', '.join(tasks)}."
    )
    return [paragraph(note), {"kind": "grids", "tables": grids}] if grids else []


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
            moved = byte_size(fmean(cell.bytes_moved for cell in cells))
            rows.append([way, took, faster, moved, count(attended), share])
        groups.append((f"{label(length)} tokens", rows))
    heading = ["way of answering", "ms a token", "dense’s speed", "bytes moved a token", "tokens attended"]
    note = (
        "Medians over answers of a generated token’s time, means over tasks. They were taken in the course "
        "of the evaluation, on the machine below, and compare with nothing that was measured elsewhere."
    )
    return [paragraph(note), table_of("Speed", [*heading, "of the store"], groups, ways=True)]


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
    return [paragraph("Drawn at random."), {"kind": "examples", "tasks": tasks}] if tasks else []


def _example(asked: Asked, said: Said) -> Block:
    texts = {"asked": asked.asked, "expected": ", ".join(asked.expected), f"{said.way} said": said.said}
    depth = "" if asked.depth is None else f", at {100 * asked.depth:.0f} % of the text"
    scores = f"score {said.score:.2g}, string match {said.ruler_score:.2g}"
    return {
        "lines": [(name, cut(text)) for name, text in texts.items()],
        "foot": f"{label(asked.length)} tokens{depth}; {scores}",
    }
