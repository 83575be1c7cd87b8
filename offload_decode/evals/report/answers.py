"""The parts of the report about a run that asked questions."""

import random
from collections import defaultdict
from collections.abc import Sequence
from itertools import product
from statistics import fmean
from typing import Any

from offload_decode.evals.contender import DENSE, label
from offload_decode.evals.plots import Line, Point
from offload_decode.evals.report import blocks as show
from offload_decode.evals.report.blocks import Block, Part, Value, count, table
from offload_decode.evals.runs import AnswerRecord, QuestionRecord, grouped
from offload_decode.evals.summary import Cell, Summary, percent

_COLUMNS = 6  # tasks side by side: as many as a sheet of paper is wide
_DEPTHS = 5  # parts of a text
_EXAMPLES = 3  # wrong answers of a task
Answers = Sequence[tuple[QuestionRecord, list[AnswerRecord]]]


def headline(summary: Summary) -> list[Block]:
    """The worst task and the mean of every way."""
    several = len(summary.tasks) > 1
    heading = ["way of answering", "worst, %" if several else "%", "95 %", "task"]
    heading += ["mean, %", "95 %"] if several else []
    groups = {}
    for length, heads in grouped(summary.headlines(), lambda head: head.length).items():
        rows = []
        for head in heads:
            worst = head.worst.score
            row = [head.way, Value(percent(worst.mean), strong=True)]
            row += [show.interval(worst), Value(head.worst.task, left=True)]
            row += [percent(head.mean.mean), show.interval(head.mean)] if several else []
            rows.append([*row, count(fmean(cell.attended for cell in summary.at(length, head.way)))])
        groups[f"{label(length)} tokens"] = rows
    counts = sorted({cell.score.count for cell in summary.cells})
    asked = f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"
    tasks = f"{len(summary.tasks)} tasks, " if several else ""
    return [
        table("The worst task and the mean", [*heading, "tokens attended"], groups, ways=True),
        f"{tasks}{asked} questions for each task and length. {_seeds(summary)}",
    ]


def _seeds(summary: Summary) -> str:
    seeds = sorted({seed for cell in summary.cells for seed in cell.seeds})
    return f"Seed {seeds[0]}." if len(seeds) == 1 else f"Seeds {', '.join(map(str, seeds))} are pooled."


def answered(answers: Answers, summary: Summary) -> list[Part]:
    parts = [
        ("Accuracy by task and budget", _by_task(summary)),
        ("Accuracy against tokens loaded", _against_tokens(summary)),
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
    blocks: list[Block] = [legend]
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
            rows.append(["control: facts taken out", *(show.share_cell(cell.control) for cell in any_cells)])
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
    return Value(percent(score.mean), show.interval(score), tuple(below), True, score.mean)


def _against_tokens(summary: Summary) -> list[Block]:
    families = summary.families()
    styles = show.styles_of(families)
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
            chance = (dense or [*cells.values()][-1][0]).chance
            more, band = (f"; {DENSE}: {100 * dense.score.mean:.0f} %", dense.score) if dense else ("", None)
            how: dict[str, Any] = {"log_x": True, "percent": True, "band": band, "rule": chance}
            caption = f"{task}, {label(length)} tokens"
            figures.append(show.plot(caption, lines, _share_at, "tokens attended", more, **how))
    note = (
        "Accuracy in %, by the stored tokens attended to, a step, layer and head; bars are 95 % intervals. "
        "The dotted line is what guesses score, or the control where that is more."
    )
    return [note, show.pictures(figures, styles, band=True)] if figures else []


def _point(cell: Cell) -> Point:
    return Point(max(1.0, cell.attended), cell.score.mean, cell.score.low, cell.score.high)


def _share_at(point: Point) -> str:
    return f"{100 * point.y:.0f} % at {count(point.x)}"


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
    grids = [show.grid(way, scores[way], names) for way in summary.ways if way in scores]
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
    found = [
        (asked, wrong)
        for asked, replies in answers
        if (wrong := [said for said in replies if said.score < 1 and not said.control])
    ]
    rng, tasks = random.Random(0), []
    for task, own in grouped(found, lambda pair: pair[0].task).items():
        drawn = rng.sample(own, min(_EXAMPLES, len(own)))
        tasks.append((task, f"{len(own):,}", [_example(asked, rng.choice(wrong)) for asked, wrong in drawn]))
    return ["Drawn at random.", {"kind": "examples", "tasks": tasks}] if tasks else []


def _example(asked: QuestionRecord, said: AnswerRecord) -> Block:
    texts = {"asked": asked.asked, "expected": ", ".join(asked.expected), f"{said.way} said": said.said}
    depth = "" if asked.depth is None else f", at {100 * asked.depth:.0f} % of the text"
    scores = f"score {said.score:.2g}, string match {said.ruler_score:.2g}"
    return {
        "lines": [(name, show.cut(text)) for name, text in texts.items()],
        "foot": f"{label(asked.length)} tokens{depth}; {scores}",
    }
