"""Accuracy against the stored tokens that are attended to, and budgets that suffice."""

from __future__ import annotations

from collections.abc import Sequence

from offload_decode.evals.contender import DENSE
from offload_decode.evals.lengths import label
from offload_decode.evals.report import plot
from offload_decode.evals.report.html import Markup, Part, join, tag
from offload_decode.evals.report.numbers import count
from offload_decode.evals.report.tables import table
from offload_decode.evals.summary import Cell, Summary, budget_of


def against_tokens(summary: Summary) -> Markup | None:
    families = summary.families()
    if not families:
        return None
    styles = {family: style for style, family in enumerate(families)}
    legend = tag(
        "ul", [plot.key(style, family) for family, style in styles.items()], _dense_key(), class_="legend"
    )
    figures = []
    for task in summary.tasks:
        for length in summary.lengths:
            drawn: list[plot.Line] = []
            dense = summary.by_place.get((task, length, DENSE))
            if dense is not None:
                drawn.append(plot.Line(DENSE, 0, (_point(dense),), level=True))
            for family, ways in families.items():
                cells = [cell for way in ways if (cell := summary.by_place.get((task, length, way)))]
                if cells:
                    cells.sort(key=lambda cell: cell.attended)
                    drawn.append(plot.Line(family, styles[family], tuple(map(_point, cells))))
            if drawn:
                figures.append(_figure(task, length, drawn, dense or cells[0]))
    note = (
        "Accuracy in %, by the stored tokens attended to, a step, layer and head; bars are 95 % intervals. "
        "The dotted line is chance."
    )
    return join([tag("p", note, class_="note"), legend, tag("div", figures, class_="figures")])


def _figure(task: str, length: int, drawn: Sequence[plot.Line], any_cell: Cell) -> Markup:
    places = [point.x for line in drawn if not line.level for point in line.points]
    title = f"{task}, {label(length)} tokens"
    told = "; ".join(
        f"{line.name}: " + ", ".join(f"{100 * point.y:.0f} % at {count(point.x)}" for point in line.points)
        for line in drawn
    )
    across = plot.log_axis("tokens attended", places or [1.0])
    picture = plot.lines(title, told, across, plot.PERCENT, drawn, [(any_cell.chance.mean, "chance")])
    return tag("figure", tag("figcaption", tag("strong", task), f" {label(length)}"), picture)


def _point(cell: Cell) -> plot.Point:
    return plot.Point(max(1.0, cell.attended), cell.score.mean, cell.score.low, cell.score.high)


def _dense_key() -> Markup:
    sample = tag("path", d="M0,2H22V12H0z", class_="band") + tag("path", d="M0,7H22", class_="level")
    return tag(
        "li", tag("svg", Markup(sample), viewBox="0 0 22 14", class_="key dense", aria_hidden="true"), "dense"
    )


def reaching(summary: Summary) -> Markup | None:
    found = summary.reaching()
    families = list(dict.fromkeys(family for reached in found.values() for family in reached))
    if not families:
        return None
    groups: list[tuple[Part, list[list[Part]]]] = []
    for length in summary.lengths:
        rows: list[list[Part]] = []
        for task in summary.tasks:
            if (task, length) in found:
                cells = found[task, length]
                rows.append(
                    [task, *(_reached(cells[family]) if family in cells else "–" for family in families)]
                )
        if rows:
            groups.append((f"{label(length)} tokens", rows))
    note = (
        "The smallest budget from which on every budget that was measured scores at least 99 % of dense "
        "attention, for tasks in which that is at least 90 %. A few hundred questions do not tell 99 % from "
        "97 %: look at the intervals."
    )
    return join(
        [tag("p", note, class_="note"), table(None, ["task", *families], groups, "Budgets that suffice")]
    )


def _reached(cell: Cell | None) -> Part:
    return "none" if cell is None else budget_of(cell.way) or count(cell.attended)
