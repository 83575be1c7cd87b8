"""A summary as rows of text, for a terminal: the worst task first, then the mean, then every task."""

from __future__ import annotations

from offload_decode.evals.intervals import Share
from offload_decode.evals.lengths import label
from offload_decode.evals.summary import Cell, Headline, Summary

HEADING = [
    "accuracy in %",
    "way",
    "tokens",
    "",
    "95 %",
    "string match",
    "exact",
    "F1",
    "control",
    "guess",
    "attended",
    "of dense",
    "",
]


def headline_rows(summary: Summary) -> list[list[str]]:
    """Of every length and way, the worst task and the mean over tasks."""
    rows = [["accuracy in %", "tokens", "worst", "95 %", "its task", "mean", "95 %"]]
    for head in summary.headlines():
        worst, mean = head.worst.score, head.mean
        shown = [label(head.length), percent(worst.mean), interval(worst), head.worst.task]
        rows.append([head.way, *shown, percent(mean.mean), interval(mean)])
    return rows


def rows(summary: Summary) -> list[list[str]]:
    """Of every length and way, the worst task, the mean over tasks, and then each task."""
    found = [HEADING]
    for head in summary.headlines():
        where = [head.way, label(head.length)]
        if head.tasks > 1:
            found.append(_row(f"worst: {head.worst.task}", where, head.worst))
            found.append(_mean_row(where, head))
        for task in summary.tasks:
            if cell := summary.by_place.get((task, head.length, head.way)):
                found.append(_row(task, where, cell))
    return found


def _row(name: str, where: list[str], cell: Cell) -> list[str]:
    return [
        name,
        *where,
        percent(cell.score.mean),
        interval(cell.score),
        percent(cell.ruler.mean),
        "-" if cell.exact is None else percent(cell.exact),
        "-" if cell.f1 is None else percent(cell.f1),
        "-" if cell.control is None else percent(cell.control.mean),
        percent(cell.guess),
        f"{cell.attended:,.0f}",
        "-" if cell.ratio is None else percent(cell.ratio),
        "no better than chance" if cell.at_chance else "",
    ]


def _mean_row(where: list[str], head: Headline) -> list[str]:
    mean = head.mean
    return [f"mean of {head.tasks} tasks", *where, percent(mean.mean), interval(mean), *[""] * 8]


def percent(share: float) -> str:
    """A share in percent, with the digits that a few hundred questions give."""
    return f"{100 * share:.1f}"


def interval(share: Share) -> str:
    """Its limits in percent."""
    return f"{100 * share.low:.0f}-{100 * share.high:.0f}"
