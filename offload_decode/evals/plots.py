"""The report's plots as SVG, by matplotlib (extra `eval`)."""

import base64
import io
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from offload_decode.evals.contender import DENSE
from offload_decode.evals.extra import library
from offload_decode.evals.stats import Share

_INK, _FAINT, _GRID, _CHANCE = "#22302f", "#66736f", "#e4e8e7", "#9d2b22"
# Twelve colours that stay apart on white; with the markers, which turn in another period, 132 lines do.
_COLOURS = (
    "#0f5c5c", "#d1495b", "#3066be", "#e09f3e", "#6a4c93", "#43aa8b",
    "#8c510a", "#e377c2", "#1b1b1b", "#7f9c1b", "#17becf", "#b5179e",
)  # fmt: skip
_MARKERS = "osD^vPX<>hp"
_STYLE = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "text.color": _INK,
    "text.parse_math": False,  # a $ in a file's name is a $
    "axes.labelcolor": _INK,
    "axes.edgecolor": _FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "svg.fonttype": "none",
    "svg.hashsalt": "offload-decode",
    "font.size": 9,
    "axes.linewidth": 0.6,
}
_PERCENT = {"ticks": [0, 0.25, 0.5, 0.75, 1], "labels": ["0", "25", "50", "75", "100"]}
# Control characters but tabs and newlines, those that turn the direction of what follows, halves.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)


def visible(text: str) -> str:
    """Text in which what cannot be seen is spelled out, as `\\u202e`: models and files may write anything."""
    return _UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


@dataclass(frozen=True)
class Point:
    """A value with its interval, at a place."""

    x: float
    y: float
    low: float
    high: float


@dataclass(frozen=True)
class Line:
    """Points that belong together, in the colour and with the marker of a number."""

    name: str
    style: int
    points: tuple[Point, ...]


def lines_svg(
    lines: Sequence[Line],
    across: str,
    *,
    log_x: bool = False,
    log_y: bool = False,
    percent: bool = False,
    band: Share | None = None,
    rule: float | None = None,
    wide: bool = False,
) -> str:
    """A plot of lines with intervals as a data URI. `percent`: values are shares, shown from 0 to 100 %;
    `band`: a share at every place; `rule`: a value that a dotted line marks.
    """
    with _figure((5.2, 2.6) if wide else (3.4, 2.4)) as figure:
        axis = figure.subplots()
        for one, scale, logarithmic in (
            (axis.xaxis, axis.set_xscale, log_x),
            (axis.yaxis, axis.set_yscale, log_y),
        ):
            if logarithmic:
                scale("log", base=2)
                one.set_major_formatter(lambda number, _: _short(number))
                one.set_minor_locator(library("matplotlib.ticker").NullLocator())
        if rule is not None:
            axis.axhline(rule, color=_CHANCE, linestyle=":", linewidth=1.3)
        if band is not None:
            axis.axhspan(band.low, band.high, color=_INK, alpha=0.1, linewidth=0)
            axis.axhline(band.mean, color=_INK, linestyle="--", linewidth=1.1)
        for number, line in enumerate(lines):
            # Side by side, so that intervals at one place can be told apart.
            aside = (1 + 0.02 * (number - (len(lines) - 1) / 2)) if log_x else 1.0
            below = [max(0.0, point.y - point.low) for point in line.points]
            above = [max(0.0, point.high - point.y) for point in line.points]
            x, y = [aside * point.x for point in line.points], [point.y for point in line.points]
            axis.errorbar(x, y, yerr=[below, above], elinewidth=0.9, linewidth=1.3, **_style(line.style))
        places = sorted({point.x for line in lines for point in line.points})
        if places and not log_x and all(float(at).is_integer() for at in places) and len(places) <= 8:
            axis.set_xticks(places)
        if percent:
            axis.set_ylim(-0.02, 1.02)
            axis.set_yticks(**_PERCENT)
        axis.tick_params(length=0)
        axis.set_xlabel(across)
        axis.grid(axis="y", color=_GRID, linewidth=0.8)
        axis.set_axisbelow(True)
        return _svg(figure)


def legend_svg(names: dict[str, int], band: bool = False) -> str:
    """The names of lines by their style, and of the band of dense attention, as a data URI."""
    with _figure((6.4, 0.25 + 0.22 * ((len(names) + band + 1) // 2))) as figure:
        line = library("matplotlib.lines").Line2D
        handles = [line([], [], label=visible(name), **_style(style)) for name, style in names.items()]
        if band:
            handles.append(line([], [], color=_INK, linestyle="--", label=DENSE))
        figure.legend(handles=handles, loc="center left", ncols=2, frameon=False, fontsize=8)
        return _svg(figure)


def _style(number: int) -> dict[str, Any]:
    colour, marker = _COLOURS[number % len(_COLOURS)], _MARKERS[number % len(_MARKERS)]
    return {"color": colour, "marker": marker, "markersize": 4}


def _short(number: float) -> str:
    """`64`, `4K`, `1M`: powers of two as tokens are counted."""
    for unit, size in (("M", 2**20), ("K", 2**10)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


@contextmanager
def _figure(size: tuple[float, float]) -> Iterator[Any]:
    """A figure to draw and save in the project's style."""
    matplotlib, figures = library("matplotlib"), library("matplotlib.figure")
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # the font lacks a character: it is drawn as a box
        yield figures.Figure(figsize=size, layout="constrained")


def _svg(figure: Any) -> str:
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(buffer := io.BytesIO(), format="svg", transparent=True, metadata=nothing)
    drawn = buffer.getvalue()
    # A page may hold a hundred: no indentation, names of groups and turns by nothing, two decimals.
    picture = re.sub(rb"\n +", b"\n", drawn[drawn.index(b"<svg") :])
    picture = re.sub(rb'(?<=<g) id="[^"]*"| transform="rotate\(-?0 [^"]*"', b"", picture)
    picture = re.sub(rb"<[^>]*>", lambda tag: re.sub(rb"(\d\.\d\d)\d+", rb"\1", tag[0]), picture)
    return f"data:image/svg+xml;base64,{base64.b64encode(picture).decode()}"
