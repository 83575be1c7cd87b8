"""Tables that scroll by themselves where a screen is narrow, and are whole on paper."""

from __future__ import annotations

from collections.abc import Sequence

from offload_decode.evals.report.html import Markup, Part, tag


def table(
    caption: Part, heading: Sequence[Part], groups: Sequence[tuple[Part, Sequence[Sequence[Part]]]], name: str
) -> Markup:
    """Rows in groups, each with a heading of its own (None: none); the first cell of a row names it. A cell
    that is a `td` already stays as it is. `name` is what a screen reader calls the table.
    """
    bodies = []
    for title, rows in groups:
        lines = [tag("tr", _named(row[0]), [_cell(cell) for cell in row[1:]]) for row in rows]
        if title is not None:
            head = tag("th", title, colspan=len(heading), scope="rowgroup", class_="group")
            lines.insert(0, tag("tr", head))
        bodies.append(tag("tbody", lines))
    head = tag("thead", tag("tr", [tag("th", cell, scope="col") if cell else tag("td") for cell in heading]))
    whole = tag("table", tag("caption", caption) if caption else None, head, bodies)
    return tag("div", whole, class_="scroll", role="group", tabindex="0", aria_label=name)


def _named(cell: Part) -> Markup:
    return tag("th", cell, scope="row")


def _cell(cell: Part) -> Markup:
    return cell if isinstance(cell, Markup) and cell.startswith("<td") else tag("td", cell)


def tinted(share: float, *parts: Part, **attributes: object) -> Markup:
    """A cell whose ground tells a share from 0 to 1, in eleven steps (`h0` to `h10` of the style sheet)."""
    return tag("td", *parts, class_=f"h{round(10 * share)}", **attributes)


def pairs(rows: Sequence[tuple[Part, Part]]) -> Markup:
    """Names and what they stand for."""
    return tag("dl", [tag("div", tag("dt", name), tag("dd", value)) for name, value in rows])


def way_name(way: str) -> Markup:
    """A label that may break behind its commas."""
    parts: list[Part] = []
    for piece in way.replace(":", ":\0").replace(",", ",\0").split("\0"):
        parts += [piece, tag("wbr")]
    return tag("span", parts[:-1], class_="way")
