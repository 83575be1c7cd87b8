"""What parts of the report are made of: notes (plain texts), tables, figures, for `page.html.jinja`."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from offload_decode.evals import plots
from offload_decode.evals.contender import DENSE, label
from offload_decode.evals.plots import Line, Point
from offload_decode.evals.runs import flat
from offload_decode.evals.stats import Share, wilson
from offload_decode.evals.summary import percent

Block = dict[str, Any] | str
Part = tuple[str, list[Block]]
Rows = Sequence[Sequence[Any]]


@dataclass(frozen=True)
class Value:
    """A cell of a table: its text, smaller text `beside` and `below` it, and the `share` that tints it."""

    text: str
    beside: str = ""
    below: tuple[str, ...] = ()
    strong: bool = False
    share: float | None = None
    left: bool = False


def table(
    name: str, heading: Sequence[str], rows: Rows | Mapping[str, Rows], caption: str = "", ways: bool = False
) -> Block:
    """Rows, or groups of them by their titles; the first cell of a row names it, and may break behind its
    commas where it is one of the `ways`. `name` is what a screen reader calls the table.
    """
    groups = list(rows.items()) if isinstance(rows, Mapping) else [("", rows)]
    shown = {"heading": heading, "groups": groups, "caption": caption, "ways": ways}
    return {"kind": "table", "name": name, **shown}


def grid(
    way: str, scores: Mapping[tuple[int, Any], Sequence[float]], places: Mapping[Any, str], below: Rows = ()
) -> Block:
    """Accuracies of scores by length and place, lengths across, and named places down."""
    lengths = sorted({length for length, _ in scores})
    rows = [
        [name, *(_grid_cell(scores.get((length, place))) for length in lengths)]
        for place, name in places.items()
    ]
    return table(f"Needles, {way}", ["depth", *map(label, lengths)], [*rows, *below], way)


def _grid_cell(scores: Sequence[float] | None) -> Value | str:
    if not scores:
        return "–"
    share = wilson(scores)
    return Value(f"{100 * share.mean:.0f}", below=(interval(share),), strong=True, share=share.mean)


def share_cell(share: Share | None) -> Value | str:
    return "not asked" if share is None else Value(percent(share.mean), interval(share))


def plot(
    caption: str, lines: Sequence[Line], said: Callable[[Point], str], across: str, more: str = "", **how: Any
) -> dict[str, str]:
    """A picture of lines, told to a screen reader point by point; `how` as `plots.lines_svg` has it."""
    told = "; ".join(f"{line.name}: {', '.join(map(said, line.points))}" for line in lines)
    source = plots.lines_svg(lines, across, **how)
    return {"caption": caption, "alt": f"{caption}: {told}{more}", "src": source}


def pictures(
    figures: Sequence[Mapping[str, str]], styles: dict[str, int] | None = None, band: bool = False
) -> Block:
    legend = None
    if styles:
        told = f"Legend: {', '.join([*styles, *([DENSE] if band else [])])}"
        legend = {"alt": told, "src": plots.legend_svg(styles, band)}
    return {"kind": "figures", "figures": figures, "legend": legend}


def styles_of(names: Iterable[str]) -> dict[str, int]:
    """A style for each name."""
    return {name: style for style, name in enumerate(dict.fromkeys(names))}


def pairs(*parts: Mapping[str, Any]) -> Block:
    """Plain values by their names; names of objects within each other are joined."""
    rows = []
    for names, value in (row for part in parts for row in flat(part, lambda each: _plain(each.values()))):
        if isinstance(value, list) and _plain(value):
            text = ", ".join(map(str, value))
        else:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        rows.append((" ".join(names).removeprefix("versions ").replace("_", " "), cut(text, 1200)))
    return {"kind": "pairs", "pairs": rows}


def _plain(values: Iterable[Any]) -> bool:
    return all(isinstance(each, str | int | float) for each in values)


def cut(text: str, most: int = 400) -> str:
    """The beginning of a long text, and how much more there is."""
    return text if len(text) <= most else f"{text[:most]} … ({len(text) - most:,} more characters)"


def interval(share: Share) -> str:
    return f"{100 * share.low:.0f}–{100 * share.high:.0f}"


def count(number: float) -> str:
    return f"{number:,.0f}"
