"""The part of a page about a run that asked questions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean

from offload_decode.evals.lengths import label
from offload_decode.evals.records import questions_and_answers
from offload_decode.evals.report import plot
from offload_decode.evals.report.depths import by_depth, grids
from offload_decode.evals.report.html import Markup, Part, join, tag
from offload_decode.evals.report.numbers import (
    count,
    interval,
    percent,
)
from offload_decode.evals.report.speed import speed
from offload_decode.evals.report.tables import table, tinted, way_name
from offload_decode.evals.report.tokens_loaded import against_tokens, reaching
from offload_decode.evals.report.wrong import wrong_answers
from offload_decode.evals.results import Results
from offload_decode.evals.summary import Cell, Summary
from offload_decode.evals.verdict import at_chance, verdict

_COLUMNS = 6  # tasks side by side: as many as a sheet of paper is wide
CHANCE = tag("abbr", "†", title="no better than chance")


def opening(summary: Summary) -> Markup:
    """What must be said first, and the worst task and the mean of every way."""
    return join(
        [warnings(verdict(summary), len(at_chance(summary)) == len(summary.tasks)), _headline(summary)]
    )


def sections(results: Results, summary: Summary) -> list[tuple[str, Markup]]:
    """The rest, each part with its title."""
    answers = list(questions_and_answers(results))
    depths = by_depth(answers)
    placed = list(dict.fromkeys(asked.task for asked, _ in answers if asked.depth is not None))
    parts = [
        ("Accuracy by task and budget", _by_task(summary)),
        ("Accuracy against tokens loaded", against_tokens(summary)),
        ("Budgets that do as well as dense attention", reaching(summary)),
        ("Accuracy by length and depth", grids(depths, summary, placed) if depths else None),
        ("Speed", speed(summary)),
        ("Answers that were wrong", wrong_answers(answers)),
    ]
    return [(title, part) for title, part in parts if part]


def warnings(sentences: Sequence[str], grave: bool) -> Markup | None:
    """What has to be said before any figure; None where there is nothing."""
    if not sentences:
        return None
    return tag(
        "ul", [tag("li", sentence) for sentence in sentences], class_="verdict grave" if grave else "verdict"
    )


def _headline(summary: Summary) -> Markup:
    several = len(summary.tasks) > 1
    heading: list[Part] = ["way of answering", "worst, %" if several else "%", "95 %", _left("task")]
    heading += ["mean, %", "95 %"] if several else []
    heading += [_strip_key(several), "tokens attended"]
    groups: list[tuple[Part, list[list[Part]]]] = []
    heads = summary.headlines()
    for length in summary.lengths:
        rows: list[list[Part]] = []
        for head in (head for head in heads if head.length == length):
            worst, mean = head.worst.score, head.mean if several else None
            row: list[Part] = [way_name(head.way)]
            row += [tag("td", tag("strong", percent(worst.mean)), _chance(head.worst)), interval(worst)]
            row.append(tag("td", head.worst.task, class_="name"))
            row += [percent(mean.mean), interval(mean)] if mean else []
            row.append(tag("td", plot.strip(worst, mean), class_="wide"))
            rows.append([*row, count(fmean(cell.attended for cell in summary.at(length, head.way)))])
        groups.append((f"{label(length)} tokens", rows))
    questions = sorted({cell.score.count for cell in summary.cells})
    asked = f"{questions[0]:,}" if len(questions) == 1 else f"{questions[0]:,} to {questions[-1]:,}"
    tasks = f"{len(summary.tasks)} tasks, " if several else ""
    note = f"{tasks}{asked} questions for each task and length. {_seeds(summary)}"
    return join(
        [
            table(None, heading, groups, "The worst task and the mean"),
            tag("p", note, " ", CHANCE, " no better than chance.", class_="note"),
        ]
    )


def _left(name: str) -> Markup:
    return tag("span", name, class_="left")


def _strip_key(several: bool) -> Markup:
    return tag(
        "span", "0 to 100 %", tag("small", "◆ worst  ● mean") if several else None, class_="key-of-strip"
    )


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


def _by_task(summary: Summary) -> Markup:
    parts: list[Markup] = []
    for length in summary.lengths:
        tasks = _worst_first(summary, length)
        sheets = -(-len(tasks) // _COLUMNS)
        for sheet in range(sheets):
            first, last = (len(tasks) * place // sheets for place in (sheet, sheet + 1))
            shown = tasks[first:last]
            rows: list[list[Part]] = []
            for way in summary.ways:
                cells = [summary.by_place.get((task, length, way)) for task in shown]
                if any(cells):
                    rows.append([way_name(way), *(_accuracy(cell) for cell in cells)])
            rows += [*_baselines(summary, length, shown)]
            which = f", tasks {first + 1} to {last}" if sheets > 1 else ""
            title = f"{label(length)} tokens{which}"
            parts.append(table(title, ["", *shown], [(None, rows)], f"Accuracy at {title}"))
    legend = (
        "Accuracy in %, the worst task first, with its 95 % interval (Wilson); below it, of the same "
        "answers, RULER’s string match and SQuAD’s exact match and F1, and the share of dense attention’s "
        "accuracy where that is at least 90 %. "
    )
    return join([tag("p", legend, CHANCE, " no better than chance.", class_="note"), *parts])


def _worst_first(summary: Summary, length: int) -> list[str]:
    means = {
        task: fmean(cell.score.mean for cell in cells)
        for task in summary.tasks
        if (cells := [cell for cell in summary.cells if (cell.task, cell.length) == (task, length)])
    }
    return sorted(means, key=lambda task: means[task])


def _accuracy(cell: Cell | None) -> Markup:
    if cell is None:
        return tag("td", "–")
    return tinted(
        cell.score.mean,
        tag("strong", percent(cell.score.mean)),
        _chance(cell),
        " ",
        tag("small", interval(cell.score)),
        tag("small", f"string match {percent(cell.ruler.mean)}", class_="below"),
        tag("small", f"exact {percent(cell.exact)}, F1 {percent(cell.f1)}", class_="below")
        if cell.exact is not None and cell.f1 is not None
        else None,
        tag("small", f"{100 * cell.ratio:.0f} % of dense", class_="below")
        if cell.ratio is not None
        else None,
    )


def _chance(cell: Cell) -> Markup | None:
    return CHANCE if cell.at_chance else None


def _baselines(summary: Summary, length: int, tasks: Sequence[str]) -> Iterator[list[Part]]:
    cells = [
        next(cell for cell in summary.cells if (cell.task, cell.length) == (task, length)) for task in tasks
    ]
    yield [
        "control: facts taken out",
        *(
            "not asked"
            if cell.control is None
            else tag("td", percent(cell.control.mean), " ", tag("small", interval(cell.control)))
            for cell in cells
        ),
    ]
    yield ["guess from the question alone", *(percent(cell.guess) for cell in cells)]
