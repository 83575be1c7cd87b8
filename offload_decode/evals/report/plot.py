"""Plots as SVG that takes its colours from the page: lines with intervals, and strips of one dimension."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from offload_decode.evals.intervals import Share
from offload_decode.evals.report.html import Markup, tag

STYLES = 8
"""Colours and marks, by the class `s0` to `s7`; the page's style sheet has the colours."""
_MARKS = (
    (-3.2, 0.0, "a3.2,3.2 0 1,0 6.4,0a3.2,3.2 0 1,0 -6.4,0z"),
    (-2.9, -2.9, "h5.8v5.8h-5.8z"),
    (0.0, -3.9, "l3.6,6.6h-7.2z"),
    (0.0, -4.1, "l4.1,4.1l-4.1,4.1l-4.1,-4.1z"),
    (0.0, 3.9, "l3.6,-6.6h-7.2z"),
    (-3.4, -1.2, "h2.2v-2.2h2.4v2.2h2.2v2.4h-2.2v2.2h-2.4v-2.2h-2.2z"),
    (-3.8, -1.5, "h7.6v3h-7.6z"),
    (-1.5, -3.8, "h3v7.6h-3z"),
)
_LEFT, _RIGHT, _TOP, _BOTTOM = 38, 10, 8, 34
_DIGIT = 6.6  # how wide one is
SMALL, WIDE = (300, 210), (460, 230)
"""Width and height of a plot beside others, and of one by itself."""


@dataclass(frozen=True)
class Point:
    """A value with its interval, at a place."""

    x: float
    y: float
    low: float
    high: float


@dataclass(frozen=True)
class Line:
    """Points that belong together, in the style of a number; `level`: one value at every place, as a band."""

    name: str
    style: int
    points: tuple[Point, ...]
    level: bool = False


@dataclass(frozen=True)
class Axis:
    """What is shown from `low` to `high`, with ticks where they are."""

    name: str
    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    log: bool = False

    def at(self, value: float, start: float, end: float) -> float:
        """Where a value stands between two places of the page."""
        low, high, value = self.low, self.high, min(max(value, self.low), self.high)
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return start + (end - start) * ((value - low) / (high - low) if high > low else 0.5)


PERCENT = Axis("accuracy in %", 0.0, 1.0, tuple((tick / 4, f"{25 * tick}") for tick in range(5)))


def log_axis(name: str, values: Sequence[float], most: int = 5) -> Axis:
    """From the smallest value to the largest, with a tick at powers of two; no value may be 0 or less."""
    low, high = min(values), max(values)
    if low == high:
        low, high = low / 2, high * 2
    first, last = math.ceil(math.log2(low) - 1e-9), math.floor(math.log2(high) + 1e-9)
    step = max(1, -(-(last - first) // (most - 1)))
    ticks = tuple((2.0**power, short(2.0**power)) for power in range(first, last + 1, step))
    return Axis(name, low * 0.86, high * 1.16, ticks, log=True)


def axis(name: str, low: float, high: float, most: int = 5) -> Axis:
    """Of plain numbers, with round ticks."""
    if high <= low:
        low, high = low - 0.5, high + 0.5
    raw = (high - low) / most
    scale = 10.0 ** math.floor(math.log10(raw))
    step = next(scale * nice for nice in (1, 2, 2.5, 5, 10) if scale * nice >= raw)
    ticks = tuple(
        (step * place, f"{step * place:.6g}")
        for place in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    )
    return Axis(name, low, high, ticks)


def steps(name: str, places: Sequence[int], most: int = 8) -> Axis:
    """Of things that are counted, such as layers: ticks at some of them, in their order, and at no other."""
    shown = places[:: -(-len(places) // most)]
    return Axis(name, places[0] - 0.5, places[-1] + 0.5, tuple((float(at), str(at)) for at in shown))


def short(number: float) -> str:
    """`64`, `4K`, `1M`: powers of two as tokens are counted."""
    for unit, size in (("M", 2**20), ("K", 2**10)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def lines(
    title: str,
    described: str,
    across: Axis,
    up: Axis,
    drawn: Sequence[Line],
    rules: Sequence[tuple[float, str]] = (),
    size: tuple[int, int] = SMALL,
) -> Markup:
    """A plot. `rules`: values that a dotted line marks, each with a name."""
    width, height = size
    left = max(_LEFT, round(8 + _DIGIT * max((len(name) for _, name in up.ticks), default=0)))

    def x(value: float) -> float:
        return round(across.at(value, left, width - _RIGHT), 1)

    def y(value: float) -> float:
        return round(up.at(value, height - _BOTTOM, _TOP), 1)

    frame = [
        tag("path", d="".join(f"M{left},{y(at)}H{width - _RIGHT}" for at, _ in up.ticks), class_="grid"),
        *(tag("text", name, x=left - 6, y=y(at) + 3.5, class_="tick end") for at, name in up.ticks),
        *(
            tag("text", name, x=x(at), y=height - _BOTTOM + 15, class_="tick mid")
            for at, name in across.ticks
        ),
        tag("text", across.name, x=(left + width - _RIGHT) / 2, y=height - 4, class_="axis mid"),
    ]
    frame += [
        tag("path", tag("title", name), d=f"M{left},{y(at)}H{width - _RIGHT}", class_="rule")
        for at, name in rules
    ]
    bands = [_level(line, y, left, width) for line in drawn if line.level]
    # Side by side, so that intervals at one place can be told apart.
    beside = [line for line in drawn if not line.level]
    step, middle = min(3.0, 9.0 / max(1, len(beside))), (len(beside) - 1) / 2
    shapes = [_line(line, x, y, step * (place - middle)) for place, line in enumerate(beside)]
    return figure(title, described, width, height, [*frame, *bands, *shapes])


def figure(title: str, described: str, width: int, height: int, parts: Sequence[str]) -> Markup:
    """An SVG that a screen reader names and describes."""
    head = [tag("title", title), tag("desc", described)]
    return tag("svg", head, parts, viewBox=f"0 0 {width} {height}", role="img", class_="plot")


def key(style: int, name: str) -> Markup:
    """A mark and its name, for a legend."""
    sample = tag("path", d="M1,7H21", class_="line") + tag("path", d=_placed(style, 11, 7), class_="mark")
    picture = tag(
        "svg", Markup(sample), viewBox="0 0 22 14", class_=f"key s{style % STYLES}", aria_hidden="true"
    )
    return tag("li", picture, name)


def _line(line: Line, x: Callable[[float], float], y: Callable[[float], float], aside: float) -> Markup:
    at = [(round(x(point.x) + aside, 1), y(point.y)) for point in line.points]
    ends = [(y(point.low), y(point.high)) for point in line.points]
    whiskers = "".join(f"M{left},{low}V{high}" for (left, _), (low, high) in zip(at, ends, strict=True))
    drawn = "M" + "L".join(f"{left},{top}" for left, top in at)
    marks = "".join(_placed(line.style, left, top) for left, top in at)
    return tag(
        "g",
        tag("path", d=whiskers, class_="whisker"),
        tag("path", d=drawn, class_="line") if len(at) > 1 else None,
        tag("path", d=marks, class_="mark"),
        class_=f"s{line.style % STYLES}",
    )


def _level(line: Line, y: Callable[[float], float], left: int, width: int) -> Markup:
    (point,) = line.points
    top, bottom = y(point.high), y(point.low)
    return tag(
        "g",
        tag("rect", x=left, y=top, width=width - _RIGHT - left, height=round(bottom - top, 1), class_="band"),
        tag("path", d=f"M{left},{y(point.y)}H{width - _RIGHT}", class_="level"),
        class_="dense",
    )


def _placed(style: int, left: float, top: float) -> str:
    """A mark's outline around a place."""
    across, down, outline = _MARKS[style % STYLES]
    return f"M{round(left + across, 1)},{round(top + down, 1)}{outline}"


def strip(worst: Share, mean: Share | None) -> Markup:
    """Two accuracies with their intervals on a line from 0 to 100 %, for a row of a table."""

    def x(share: float) -> float:
        return round(4 + 112 * share, 1)

    parts = [tag("path", d="M4,9H116M4,6V12M60,7V11M116,6V12", class_="grid")]
    for share, style in ((mean, 0), (worst, 3)):
        if share is not None:
            spread = tag("path", d=f"M{x(share.low)},9H{x(share.high)}", class_="spread")
            dot = tag("path", d=_placed(style, x(share.mean), 9), class_="mark")
            parts.append(tag("g", spread, dot, class_="worst" if share is worst else "mean"))
    return tag("svg", parts, viewBox="0 0 120 18", class_="strip", aria_hidden="true")
