"""A fidelity report as a picture: error, mass, recall and KL against the budget."""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

from indexes import durable
from offload_decode.evals.contender import DENSE
from offload_decode.evals.fidelity import CONTROLS
from offload_decode.evals.fidelity_report import Entry, FidelityReport
from offload_decode.evals.plot import check_matplotlib

_INK, _FAINT, _CONTROL = "#22302f", "#66736f", "#8a9391"
# Twelve colours that stay apart on white; with the markers, which turn in another period, 132 lines do.
_COLOURS = (
    "#0f5c5c", "#d1495b", "#3066be", "#e09f3e", "#6a4c93", "#43aa8b",
    "#8c510a", "#e377c2", "#1b1b1b", "#7f9c1b", "#17becf", "#b5179e",
)  # fmt: skip
_MARKERS = "osD^vPX<>hp"
_CONTROL_MARKERS = "x+"
_STYLE = {
    "font.family": "DejaVu Sans",
    "text.color": _INK,
    "text.parse_math": False,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": _INK,
    "ytick.color": _INK,
}

# What a panel shows, and whether its values are shares, in percent, or on a logarithmic scale.
_PANELS: tuple[tuple[str, Callable[[Entry], float], bool], ...] = (
    ("relative output error in %, median", lambda entry: 100 * entry.live.error.p50, True),
    ("attention mass captured in %", lambda entry: 100 * entry.live.mass, False),
    ("recall@k in %", lambda entry: 100 * entry.live.recall, False),
    ("KL(dense ‖ selector) in nats, mean", lambda entry: entry.agreement.kl_mean, True),
)


def save_png(report: FidelityReport, path: Path) -> None:
    """Draw the report: one line a selector, controls dashed and grey. Replaces `path`."""
    check_matplotlib()
    matplotlib = importlib.import_module("matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = _lines(report)
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(12.5, 8.4), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(2, 2, sharex=True).flatten()
        for axis, (title, value, logarithmic) in zip(axes, _PANELS, strict=True):
            _draw(axis, lines, value, logarithmic)
            axis.set_title(title, fontsize=10.5, loc="left")
        for axis in axes[2:]:
            axis.set_xlabel("budget: stored tokens for each layer and head in a step")
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize=9.5)
        figure.suptitle(_title(report), fontsize=13, fontweight="bold")
        figure.supxlabel(_footnote(report), fontsize=9, color=_FAINT)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=130, facecolor="white")
    durable.write(path, buffer.getvalue())


def _lines(report: FidelityReport) -> list[tuple[dict[str, Any], list[Entry]]]:
    """The entries of each label with the style of its line, the controls last; dense attention is none."""
    by_label: dict[str, list[Entry]] = {}
    for entry in report.entries:
        if entry.selector != DENSE:
            by_label.setdefault(entry.label, []).append(entry)
    styles, controls = zip(cycle(_COLOURS), cycle(_MARKERS), strict=False), cycle(_CONTROL_MARKERS)
    lines = []
    for label, entries in sorted(by_label.items(), key=lambda item: item[1][0].selector in CONTROLS):
        if entries[0].selector in CONTROLS:
            style = {"color": _CONTROL, "marker": next(controls), "linestyle": "--"}
        else:
            colour, marker = next(styles)
            style = {"color": colour, "marker": marker, "linestyle": "-"}
        lines.append(({**style, "label": label}, sorted(entries, key=lambda entry: entry.budget_tokens)))
    return lines


def _draw(
    axis: Any,
    lines: list[tuple[dict[str, Any], list[Entry]]],
    value: Callable[[Entry], float],
    logarithmic: bool,
) -> None:
    for style, entries in lines:
        axis.plot(
            [entry.budget_tokens for entry in entries],
            [value(entry) for entry in entries],
            linewidth=1.5,
            markersize=6,
            markerfacecolor="none",  # equal selectors lie on each other: both markers are seen
            markeredgewidth=1.2,
            clip_on=False,
            **style,
        )
    axis.set_xscale("log")
    _plain_ticks(axis.xaxis, sorted({round(entry.budget_tokens) for _, own in lines for entry in own}))
    if logarithmic:
        axis.set_yscale("log", nonpositive="mask")
        low, high = axis.get_ylim()
        _plain_decades(axis.yaxis, few=high < 100 * low)
    else:
        axis.set_ylim(0, 102)
    axis.grid(color="#e4e8e7", linewidth=0.8)
    axis.set_axisbelow(True)


def _plain_ticks(axis: Any, places: list[int]) -> None:
    axis.set_ticks(places, labels=[f"{place:,}" for place in places])
    axis.set_minor_locator(importlib.import_module("matplotlib.ticker").NullLocator())


def _plain_decades(axis: Any, few: bool) -> None:
    """Numbers without mathtext: of every decade 1, 2 and 5 where there are few decades, else 1."""
    ticker = importlib.import_module("matplotlib.ticker")
    if few:
        axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(lambda number, _: f"{number:g}")
    axis.set_minor_formatter(ticker.NullFormatter())


def _title(report: FidelityReport) -> str:
    given = report.configuration
    return (
        f"Fidelity to dense attention: {Path(given['model']).name}, {given['stored_tokens']:,} stored tokens"
    )


def _footnote(report: FidelityReport) -> str:
    given = report.configuration
    return (
        f"live decode queries of {given['live_query_tokens']:,} tokens after {Path(given['store']).name}, "
        f"searched layers {', '.join(map(str, given['searched_layers']))}; "
        f"KL over {given['tokens'] * len(given['questions']):,} generated tokens; controls dashed"
    )
