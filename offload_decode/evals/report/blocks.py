"""What parts of the report are made of: notes, tables, figures and numbers, for `page.html.jinja`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from offload_decode.evals import plots
from offload_decode.evals.contender import DENSE
from offload_decode.evals.plots import Line
from offload_decode.evals.runs import flat
from offload_decode.evals.stats import Estimate, Share, wilson
from offload_decode.evals.summary import percent

Block = dict[str, Any]
Part = tuple[str, list[Block]]


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


def paragraph(text: str, dagger: bool = False) -> Block:
    return {"kind": "note", "text": text, "dagger": dagger}


def table_of(
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


def picture(caption: str, told: str, source: str) -> dict[str, str]:
    return {"caption": caption, "alt": f"{caption}: {told}", "src": source}


def pictures(figures: Sequence[Block], styles: dict[str, int] | None = None, band: bool = False) -> Block:
    legend = None
    if styles:
        told = f"Legend: {', '.join([*styles, *([DENSE] if band else [])])}"
        legend = {"alt": told, "src": plots.legend_svg(styles, band)}
    return {"kind": "figures", "figures": figures, "legend": legend}


def described(lines: Iterable[Line], point: Any) -> str:
    return "; ".join(f"{line.name}: {', '.join(map(point, line.points))}" for line in lines)


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


def limits(value: Estimate, shown: Any) -> str:
    if value.low is None or value.high is None:
        return "–"
    return f"{shown(value.low)} to {shown(value.high)}"


def signed(number: float) -> str:
    """With a sign in front, `−` for minus; nothing is +0."""
    text = f"{abs(number):.4f}"
    return text if float(text) == 0 else ("+" if number > 0 else "−") + text


def count(number: float) -> str:
    return f"{number:,.0f}"


def byte_size(amount: float) -> str:
    """Bytes in decimal units."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:,.0f} {unit}" if unit == "bytes" or amount >= 100 else f"{amount:.3g} {unit}"
        amount /= 1000
    return f"{amount:,.3g} TB"


def grid_cell(scores: Sequence[float] | None) -> Value | str:
    if not scores:
        return "–"
    share = wilson(scores)
    return Value(f"{100 * share.mean:.0f}", below=(interval(share),), strong=True, share=share.mean)


def share_cell(share: Share | None) -> Value | str:
    return "not asked" if share is None else Value(percent(share.mean), interval(share))
