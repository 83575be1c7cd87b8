"""A needle grid as a picture: one panel each for dense attention, the selector and the control."""

from __future__ import annotations

import importlib
import io
from pathlib import Path
from textwrap import fill
from typing import Any

from indexes import durable
from offload_decode.errors import ConfigError
from offload_decode.evals.lengths import label
from offload_decode.evals.needle_grid import PANELS, NeedleGrid, Panel

_LOW, _MIDDLE, _HIGH, _INK = "#f4ece4", "#7fb8ad", "#0f5c5c", "#22302f"
_FAINT = "#66736f"
_CELL_INCHES = 0.62
_STYLE = {
    "font.family": "DejaVu Sans",
    "text.color": _INK,
    "text.parse_math": False,  # a $ in a file's name is a $
    "axes.labelcolor": _INK,
}


def check_matplotlib() -> None:
    """ConfigError where matplotlib is missing: to be called before hours of measuring."""
    _matplotlib()


def save_png(grid: NeedleGrid, path: Path) -> None:
    """Draw the grid: lengths across, depths down, accuracy as colour and in percent. Replaces `path`."""
    matplotlib = _matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure

    columns, rows = len(grid.plan.lengths), len(grid.plan.depths)
    width, height = max(2.6, _CELL_INCHES * columns), max(2.2, _CELL_INCHES * rows)
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(3 * width + 1.9, height + 1.9), layout="constrained")
        FigureCanvasAgg(figure)
        colours = LinearSegmentedColormap.from_list("accuracy", [_LOW, _MIDDLE, _HIGH])
        axes = figure.subplots(1, len(PANELS), sharey=True)
        for axis, panel in zip(axes, PANELS, strict=True):
            image = _draw(axis, grid, panel, colours)
        axes[0].set_yticks(range(rows), [f"{100 * depth:.4g} %" for depth in grid.plan.depths])
        axes[0].set_ylabel("depth of the needle")
        bar = figure.colorbar(image, ax=axes, shrink=0.9, aspect=24, pad=0.015)
        bar.set_label("accuracy in %")
        bar.outline.set_visible(False)
        bar.ax.tick_params(length=0, colors=_INK)
        figure.suptitle(fill(_title(grid), round(8 * figure.get_figwidth())), fontsize=13, fontweight="bold")
        figure.supxlabel(_footnote(grid), fontsize=9, color=_FAINT)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=160, facecolor="white")
    durable.write(path, buffer.getvalue())


def _draw(axis: Any, grid: NeedleGrid, panel: Panel, colours: Any) -> Any:
    values = [[100 * share for share in row] for row in grid.accuracy(panel)]
    image = axis.imshow(values, vmin=0, vmax=100, cmap=colours, aspect="auto")
    for row, line in enumerate(values):
        for column, value in enumerate(line):
            ink = "white" if value > 55 else _INK
            axis.text(column, row, f"{value:.0f}", ha="center", va="center", color=ink, fontsize=11)
    axis.set_title(f"{_name(grid, panel)}\nmean {100 * grid.mean(panel):.0f} %", fontsize=10.5)
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


def _name(grid: NeedleGrid, panel: Panel) -> str:
    selected = f"{grid.plan.selector}, budget {grid.plan.options['budget']}"
    return {"dense": "dense attention", "selected": selected, "control": "control: needle taken out"}[panel]


def _title(grid: NeedleGrid) -> str:
    options = [f"{name} {value}" for name, value in grid.plan.options.items()]
    model = Path(grid.configuration["model"]).name
    return ", ".join([f"Needle in a haystack: {model}", grid.plan.selector, *options])


def _footnote(grid: NeedleGrid) -> str:
    needles = "1 needle" if grid.plan.trials == 1 else f"{grid.plan.trials} needles"
    return f"accuracy in %, {needles} in each cell, hidden in: {grid.configuration['text']}"


def _matplotlib() -> Any:
    try:
        return importlib.import_module("matplotlib")
    except ImportError as error:
        raise ConfigError(
            f"the picture of the grid needs matplotlib, which cannot be imported ({error}): "
            "pip install 'offload-decode[eval]'"
        ) from error
