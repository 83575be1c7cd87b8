"""Tables and pictures of figures."""

from __future__ import annotations

import importlib
import io
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from offload_decode.common import files
from offload_decode.common.errors import ConfigError

Points = Sequence[tuple[float, float]]

_COLOURS = ("#1f6f78", "#c8553d", "#5b4b8a", "#d99a2b", "#3f7d20", "#a23b72", "#4a7fb5", "#7a5c3e")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns for people, which are a table in Markdown too; the first column to the left."""
    lines = [list(heads), *(list(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]

    def line(cells: Sequence[str]) -> str:
        first, *rest = zip(cells, widths, strict=True)
        return "| " + " | ".join([first[0].ljust(first[1]), *(c.rjust(w) for c, w in rest)]) + " |"

    rule = "|" + "|".join(["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])]) + "|"
    return "\n".join([line(heads), rule, *(line(row) for row in rows)])


def draw(
    path: Path,
    title: str,
    panels: Mapping[str, Mapping[str, Points]],
    *,
    across: str,
    up: str,
    footnote: str = "",
    log: str = "xy",
) -> None:
    """Lines of points, a panel for each title and a line for each label; one colour for a label in all
    panels. `log` names the axes that are logarithmic. Replaces `path`, a PNG.

    Raises ConfigError without matplotlib.
    """
    matplotlib = _matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    labels = list(dict.fromkeys(label for lines in panels.values() for label in lines))
    styles = dict(zip(labels, zip(cycle(_COLOURS), cycle(_MARKERS), strict=False), strict=False))
    with matplotlib.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(4.6 * len(panels) + 2.6, 4.6), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(1, len(panels), squeeze=False)[0]
        for axis, (name, lines) in zip(axes, panels.items(), strict=True):
            for label, points in lines.items():
                colour, marker = styles[label]
                xs, ys = zip(*sorted(points), strict=True)
                axis.plot(xs, ys, color=colour, marker=marker, markersize=5, linewidth=1.5, label=label)
            axis.set_title(name, fontsize=10.5, loc="left")
            axis.set_xlabel(across)
            for side, own in (("x", axis.set_xscale), ("y", axis.set_yscale)):
                if side in log:
                    own("log")
            axis.grid(color="#e4e8e7", linewidth=0.8)
            axis.set_axisbelow(True)
        axes[0].set_ylabel(up)
        drawn = {
            label: line
            for axis in axes
            for line, label in zip(*axis.get_legend_handles_labels(), strict=True)
        }
        figure.legend(drawn.values(), drawn.keys(), loc="outside right upper", frameon=False, fontsize=9)
        figure.suptitle(title, fontsize=12.5, fontweight="bold")
        if footnote:
            figure.supxlabel(footnote, fontsize=8.5, color="#667070")
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=130, facecolor="white")
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write(path, buffer.getvalue())


def _matplotlib() -> Any:
    try:
        return importlib.import_module("matplotlib")
    except ImportError as error:
        raise ConfigError(
            f"a picture needs matplotlib, which cannot be imported ({error}): "
            "pip install 'offload-decode[eval]'"
        ) from error
