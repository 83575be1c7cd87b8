"""Accuracy by length and by where in the text the answer stands."""

from __future__ import annotations

from collections.abc import Sequence

from offload_decode.evals.intervals import Share, wilson
from offload_decode.evals.lengths import label
from offload_decode.evals.records import Asked, Said
from offload_decode.evals.report.html import Markup, Part, join, tag
from offload_decode.evals.report.numbers import interval
from offload_decode.evals.report.tables import table, tinted, way_name
from offload_decode.evals.summary import Summary

PARTS = 5

Answers = Sequence[tuple[Asked, list[Said]]]
"""Questions and all answers to each."""
Depths = dict[tuple[str, int, int], list[float]]
"""Scores by way, length and part of the text, of questions about one place."""


def by_depth(asked: Answers) -> Depths:
    """Of questions with the answers to them."""
    found: Depths = {}
    for question, answers in asked:
        if question.depth is not None:
            part = min(PARTS - 1, int(question.depth * PARTS))
            for said in answers:
                if not said.control:
                    found.setdefault((said.way, question.length, part), []).append(said.score)
    return found


def grids(depths: Depths, summary: Summary, tasks: Sequence[str]) -> Markup:
    """One grid for each way; `tasks` are those of the questions."""
    names = [f"{100 * part // PARTS}–{100 * (part + 1) // PARTS} %" for part in range(PARTS)]
    found = []
    for way in summary.ways:
        scores = {place[1:]: wilson(values) for place, values in depths.items() if place[0] == way}
        lengths = [length for length in summary.lengths if any(place[0] == length for place in scores)]
        rows: list[list[Part]] = [
            [names[part], *(grid_cell(scores.get((length, part))) for length in lengths)]
            for part in range(PARTS)
        ]
        if lengths:
            heading: list[Part] = ["depth", *map(label, lengths)]
            found.append(table(way_name(way), heading, [(None, rows)], f"Needles, {way}"))
    note = (
        "Accuracy in % of all questions about one place of the text, by length in tokens and depth, with "
        f"95 % intervals: {', '.join(tasks)}."
    )
    return join([tag("p", note, class_="note"), tag("div", found, class_="grids")])


def grid_cell(share: Share | None) -> Markup:
    """An accuracy with its interval below it."""
    if share is None:
        return tag("td", "–")
    return tinted(
        share.mean, tag("strong", f"{100 * share.mean:.0f}"), tag("small", interval(share), class_="below")
    )
