"""Pictures by matplotlib (extra `eval`): needle grids and fidelity as PNG, the report's plots as SVG."""

import base64
import io
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from textwrap import fill
from typing import Any

from offload_decode.common import files
from offload_decode.evals.contender import DENSE, label
from offload_decode.evals.extra import library
from offload_decode.evals.fidelity import CONTROLS, Entry, FidelityReport
from offload_decode.evals.needle_grid import PANELS, NeedleGrid, Panel
from offload_decode.evals.runs import grouped
from offload_decode.evals.stats import Share

_INK, _FAINT, _GRID, _CHANCE = "#22302f", "#66736f", "#e4e8e7", "#9d2b22"
_LOW, _MIDDLE, _HIGH = "#f4ece4", "#7fb8ad", "#0f5c5c"
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
}
_SMALL = {"font.size": 9, "axes.linewidth": 0.6}
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
    with _figure((5.2, 2.6) if wide else (3.4, 2.4), _SMALL) as figure:
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


def shares_svg(rows: Sequence[tuple[str, Share, Share | None]]) -> str:
    """The worst task (a diamond) and the mean (a dot) of every way, from 0 to 100 %, as a data URI."""
    with _figure((6.4, 0.9 + 0.34 * len(rows)), _SMALL) as figure:
        axis = figure.subplots()
        for place, (_, worst, mean) in enumerate(rows):
            for share, colour, marker in ((mean, _COLOURS[2], "o"), (worst, _COLOURS[1], "D")):
                if share is not None:
                    reach = [[share.mean - share.low], [share.high - share.mean]]
                    shown = {"color": colour, "marker": marker, "markersize": 5}
                    axis.errorbar([share.mean], [place], xerr=reach, **shown)
        axis.set_yticks(range(len(rows)), [visible(fill(name, 34)) for name, _, _ in rows], fontsize=8)
        axis.set_ylim(len(rows) - 0.5, -0.5)
        axis.set_xlim(-0.02, 1.02)
        axis.set_xticks(**_PERCENT)
        axis.set_xlabel("accuracy in %")
        axis.grid(axis="x", color=_GRID, linewidth=0.8)
        return _svg(figure)


def legend_svg(names: dict[str, int], band: bool = False) -> str:
    """The names of lines by their style, and of the band of dense attention, as a data URI."""
    with _figure((6.4, 0.25 + 0.22 * ((len(names) + band + 1) // 2)), _SMALL) as figure:
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
def _figure(size: tuple[float, float], style: dict[str, Any] | None = None) -> Iterator[Any]:
    """A figure to draw and save in the project's style."""
    matplotlib, figures = library("matplotlib"), library("matplotlib.figure")
    with matplotlib.rc_context(_STYLE | (style or {})), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # the font lacks a character: it is drawn as a box
        yield figures.Figure(figsize=size, layout="constrained")


def _svg(figure: Any) -> str:
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    drawn = _saved(figure, format="svg", transparent=True, metadata=nothing)
    # A page may hold a hundred: no indentation, names of groups and turns by nothing, two decimals.
    picture = re.sub(rb"\n +", b"\n", drawn[drawn.index(b"<svg") :])
    picture = re.sub(rb'(?<=<g) id="[^"]*"| transform="rotate\(-?0 [^"]*"', b"", picture)
    picture = re.sub(rb"<[^>]*>", lambda tag: re.sub(rb"(\d\.\d\d)\d+", rb"\1", tag[0]), picture)
    return f"data:image/svg+xml;base64,{base64.b64encode(picture).decode()}"


def _saved(figure: Any, **how: Any) -> bytes:
    figure.savefig(buffer := io.BytesIO(), **how)
    return buffer.getvalue()


def save_needles(grid: NeedleGrid, path: Path) -> None:
    """Draw a needle grid, one panel each for dense attention, the selector and the control: lengths across,
    depths down, accuracy as colour and in percent. Replaces `path`.
    """
    columns, rows = len(grid.plan.lengths), len(grid.plan.depths)
    width, height = max(2.6, 0.62 * columns), max(2.2, 0.62 * rows)  # inches of a panel
    colour_map = library("matplotlib.colors").LinearSegmentedColormap
    colours = colour_map.from_list("accuracy", [_LOW, _MIDDLE, _HIGH])
    with _figure((3 * width + 1.9, height + 1.9)) as figure:
        axes = figure.subplots(1, len(PANELS), sharey=True)
        for axis, panel in zip(axes, PANELS, strict=True):
            image = _panel(axis, grid, panel, colours)
        axes[0].set_yticks(range(rows), [f"{100 * depth:.4g} %" for depth in grid.plan.depths])
        axes[0].set_ylabel("depth of the needle")
        bar = figure.colorbar(image, ax=axes, shrink=0.9, aspect=24, pad=0.015)
        bar.set_label("accuracy in %")
        bar.outline.set_visible(False)
        bar.ax.tick_params(length=0, colors=_INK)
        options = [f"{name} {value}" for name, value in grid.plan.options.items()]
        model = Path(grid.configuration["model"]).name
        title = ", ".join([f"Needle in a haystack: {model}", grid.plan.selector, *options])
        figure.suptitle(fill(title, round(8 * figure.get_figwidth())), fontsize=13, fontweight="bold")
        needles = "1 needle" if grid.plan.trials == 1 else f"{grid.plan.trials} needles"
        foot = f"accuracy in %, {needles} in each cell, hidden in: {grid.configuration['text']}"
        figure.supxlabel(foot, fontsize=9, color=_FAINT)
        files.write(path, _saved(figure, format="png", dpi=160, facecolor="white"))


def _panel(axis: Any, grid: NeedleGrid, panel: Panel, colours: Any) -> Any:
    values = [[100 * share for share in row] for row in grid.accuracy(panel)]
    image = axis.imshow(values, vmin=0, vmax=100, cmap=colours, aspect="auto")
    for row, line in enumerate(values):
        for column, value in enumerate(line):
            ink = "white" if value > 55 else _INK
            axis.text(column, row, f"{value:.0f}", ha="center", va="center", color=ink, fontsize=11)
    selected = f"{grid.plan.selector}, budget {grid.plan.options['budget']}"
    names = {"dense": "dense attention", "selected": selected, "control": "control: needle taken out"}
    axis.set_title(f"{names[panel]}\nmean {100 * grid.mean(panel):.0f} %", fontsize=10.5)
    axis.set_xticks(range(len(grid.plan.lengths)), [label(length) for length in grid.plan.lengths])
    axis.set_xlabel("tokens of text")
    # White lines between the cells, and nothing else around them.
    axis.set_xticks([place - 0.5 for place in range(1, len(values[0]))], minor=True)
    axis.set_yticks([place - 0.5 for place in range(1, len(values))], minor=True)
    axis.grid(which="minor", color="white", linewidth=2)
    axis.tick_params(which="both", length=0, colors=_INK)
    for spine in axis.spines.values():
        spine.set_visible(False)
    return image


# What a panel of a fidelity report shows, and whether on a logarithmic scale; else they are in percent.
_FIDELITY: tuple[tuple[str, Callable[[Entry], float], bool], ...] = (
    ("relative output error in %, median", lambda entry: 100 * entry.live.error.p50, True),
    ("attention mass captured in %", lambda entry: 100 * entry.live.mass, False),
    ("recall@k in %", lambda entry: 100 * entry.live.recall, False),
    ("KL(dense ‖ selector) in nats, mean", lambda entry: entry.agreement.kl_mean, True),
)


def save_fidelity(report: FidelityReport, path: Path) -> None:
    """Draw error, mass, recall and KL by budget: a line a selector, controls dashed grey. Replaces `path`."""
    given = report.configuration
    title = f"{Path(given['model']).name}, {given['stored_tokens']:,} stored tokens"
    foot = (
        f"live decode queries of {given['live_query_tokens']:,} tokens after {Path(given['store']).name}, "
        f"searched layers {', '.join(map(str, given['searched_layers']))}; "
        f"KL over {given['tokens'] * len(given['questions']):,} generated tokens; controls dashed"
    )
    with _figure((12.5, 8.4)) as figure:
        lines = _fidelity_lines(report)
        axes = figure.subplots(2, 2, sharex=True).flatten()
        for axis, (name, value, logarithmic) in zip(axes, _FIDELITY, strict=True):
            for style, entries in lines:
                axis.plot([entry.budget_tokens for entry in entries], [*map(value, entries)], **style)
            _fidelity_axes(axis, logarithmic, {entry.budget_tokens for _, own in lines for entry in own})
            axis.set_title(name, fontsize=10.5, loc="left")
        for axis in axes[2:]:
            axis.set_xlabel("budget: stored tokens for each layer and head in a step")
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize=9.5)
        figure.suptitle(f"Fidelity to dense attention: {title}", fontsize=13, fontweight="bold")
        figure.supxlabel(foot, fontsize=9, color=_FAINT)
        files.write(path, _saved(figure, format="png", dpi=130, facecolor="white"))


def _fidelity_lines(report: FidelityReport) -> list[tuple[dict[str, Any], list[Entry]]]:
    """The entries of each label with the style of its line, the controls last; dense attention is none."""
    by_label = grouped((e for e in report.entries if e.selector != DENSE), lambda entry: entry.label)
    # Empty markers: equal selectors lie on each other, and both are seen.
    shown = {"linewidth": 1.5, "markersize": 6, "markerfacecolor": "none", "markeredgewidth": 1.2}
    styles, controls = zip(cycle(_COLOURS), cycle(_MARKERS), strict=False), cycle("x+")
    lines = []
    for name, entries in sorted(by_label.items(), key=lambda item: item[1][0].selector in CONTROLS):
        control = entries[0].selector in CONTROLS
        colour, marker = ("#8a9391", next(controls)) if control else next(styles)
        style = {"color": colour, "marker": marker, "linestyle": "--" if control else "-", "label": name}
        entries.sort(key=lambda entry: entry.budget_tokens)
        lines.append(({**style, **shown, "clip_on": False}, entries))
    return lines


def _fidelity_axes(axis: Any, logarithmic: bool, budgets: set[float]) -> None:
    ticker = library("matplotlib.ticker")
    axis.set_xscale("log")
    places = sorted(set(map(round, budgets)))
    axis.xaxis.set_ticks(places, labels=[f"{place:,}" for place in places])
    axis.xaxis.set_minor_locator(ticker.NullLocator())
    if logarithmic:
        axis.set_yscale("log", nonpositive="mask")
        low, high = axis.get_ylim()
        # Numbers without mathtext: of every decade 1, 2 and 5 where there are few decades, else 1.
        if high < 100 * low:
            axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(lambda number, _: f"{number:g}")
        axis.yaxis.set_minor_formatter(ticker.NullFormatter())
    else:
        axis.set_ylim(0, 102)
    axis.grid(color=_GRID, linewidth=0.8)
    axis.set_axisbelow(True)
