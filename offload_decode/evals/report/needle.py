"""The part of a page about a `needle.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offload_decode.errors import ConfigError
from offload_decode.evals.intervals import Share, wilson
from offload_decode.evals.lengths import label
from offload_decode.evals.report.depths import grid_cell
from offload_decode.evals.report.html import Markup, Part, join, tag
from offload_decode.evals.report.numbers import interval, percent
from offload_decode.evals.report.tables import table
from offload_decode.evals.verdict import of_needles

TITLE = "needle in a haystack"
_WAYS = ("dense", "selected", "control")


def parts(found: Mapping[str, Any]) -> list[tuple[str, Markup]] | None:
    """Grids of length and depth; None where the file is none. Raises `ConfigError` for other cells."""
    if "cells" not in found:
        return None
    try:
        return [("Needles by length and depth", _grids(found["cells"], found["configuration"]))]
    except (KeyError, TypeError, AttributeError, ValueError, ZeroDivisionError) as error:
        raise ConfigError(
            f"this is no needle.json of this release: its cells are not whole ({error!r:.80})"
        ) from error


def verdict(found: Mapping[str, Any]) -> list[str]:
    """Whether the needles found mean anything, of a file that `parts` could show."""
    scores = {way: [float(cell[way]["score"]) for cell in found["cells"]] for way in _WAYS}
    return of_needles([scores["dense"], scores["selected"]], scores["control"])


def _grids(cells: list[Mapping[str, Any]], configuration: Mapping[str, Any]) -> Markup:
    scores: dict[tuple[str, int, float], list[float]] = {}
    for cell in cells:
        for way in _WAYS:
            score = float(cell[way]["score"])
            if not 0 <= score <= 1:
                raise ValueError(f"a score of {score}")
            scores.setdefault((way, int(cell["length"]), float(cell["depth"])), []).append(score)
    lengths = sorted({length for _, length, _ in scores})
    depths = sorted({depth for _, _, depth in scores})
    names = {"dense": "dense", "selected": _selector(configuration), "control": "control: needle taken out"}
    grids = []
    for way in _WAYS:
        rows: list[list[Part]] = []
        for depth in depths:
            shares = [_share(scores.get((way, length, depth))) for length in lengths]
            rows.append([f"{100 * depth:.4g} %", *map(grid_cell, shares)])
        means = [
            wilson([score for depth in depths for score in scores.get((way, length, depth), ())])
            for length in lengths
        ]
        rows.append(
            ["all", *(tag("td", percent(mean.mean), " ", tag("small", interval(mean))) for mean in means)]
        )
        grids.append(
            table(names[way], ["depth", *map(label, lengths)], [(None, rows)], f"Needles, {names[way]}")
        )
    note = "Accuracy in %, by length in tokens and depth, with 95 % intervals."
    return join([tag("p", note, class_="note"), tag("div", grids, class_="grids")])


def _share(scores: list[float] | None) -> Share | None:
    return wilson(scores) if scores else None


def _selector(configuration: Mapping[str, Any]) -> str:
    options = configuration.get("options", {})
    return ", ".join(
        [str(configuration["selector"]), *(f"{name} {value}" for name, value in options.items())]
    )
