"""`offload-decode eval needle`: a number hidden at every length and depth."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated

from offload_decode.cli import output
from offload_decode.cli.eval import run
from offload_decode.cli.eval.run import text_option
from offload_decode.cli.options import Device, Json, ModelToLoad, Options, Quiet, Rope, Selector, option
from offload_decode.cli.output import Progress
from offload_decode.common.errors import ConfigError
from offload_decode.config import split_pairs

if TYPE_CHECKING:
    from offload_decode.evals.needle_grid import NeedleGrid

RESULT, PICTURE = "needle.json", "needle.png"
_BUDGET = "64"


def needle(
    model: ModelToLoad = "demo",
    rope: Rope = "",
    text: Annotated[str | None, text_option("The text to hide needles in")] = None,
    lengths: Annotated[str, option("N,…", "Tokens of text, separated by commas.")] = "2K,8K,32K",
    depths: Annotated[
        str, option("P,…", "Where the needle is hidden, in percent of the text.")
    ] = "0,25,50,75,100",
    budget: Annotated[
        str | None, option("K", f"Stored tokens that the selector may attend to.  [default: {_BUDGET}]")
    ] = None,
    selector: Selector = "topk",
    option: Options = None,
    trials: Annotated[int, option("N", "Needles for each pair of length and depth.", min=1)] = 1,
    out: Annotated[Path, option("FOLDER", f"Where {RESULT} and {PICTURE} are written.")] = Path(
        "needle-grid"
    ),
    device: Device = "auto",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Find a needle at every length and depth.

    A number is hidden in a text and asked for: with dense attention, with the selector, and as a control with
    the selector in the same text without the needle, where nothing should be found. Only the generated text
    is scored. A text that is too short is repeated.
    """
    counts = run.token_counts(lengths)
    shares = tuple(dict.fromkeys(map(_share, depths.split(","))))
    options = split_pairs(option or [])
    if budget is not None and "budget" in options:
        raise ConfigError("the budget is given twice: use --budget or -o budget=…")
    options = {"budget": budget or _BUDGET, **options}
    run.refuse_existing(out, RESULT, PICTURE)

    from offload_decode.cli.compiling import announce_compiling
    from offload_decode.common import files
    from offload_decode.evals.contender import Contender
    from offload_decode.evals.extra import PICTURES, STATISTICS, require
    from offload_decode.evals.needle_grid import GridPlan, measure
    from offload_decode.evals.plots import save_needles
    from offload_decode.models.loading import load
    from offload_decode.prefill_jobs.job import Settings
    from offload_decode.selectors.budgets import Budget

    require(*PICTURES, *STATISTICS)
    announce_compiling()
    haystack = run.read_haystack(text)
    chosen = run.checked_selector(selector, options)
    loaded = load(model, device, rope=rope)
    budgets = Budget(chosen.budget, chosen.schedule, chosen.dense_layers)
    budgets.per_layer(counts[0], loaded.shape.full_layers, loaded.shape.kv_heads)
    plan = GridPlan(counts, shares, selector, options, trials)
    kinds = run.index_kinds([Contender(selector, options)])
    stores = run.PrefilledStores(loaded, haystack.name, Settings(), kinds)
    out.mkdir(parents=True, exist_ok=True)
    with Progress(quiet) as progress:
        grid = measure(loaded, haystack, plan, stores, lambda done, total: progress("prefill", done, total))
    files.write(out / RESULT, json.dumps(grid.to_json(), indent=1).encode())
    save_needles(grid, out / PICTURE)
    if as_json:
        output.answer_json(grid.to_json())
    else:
        output.answer(output.table(_rows(grid)))
    _notes(grid, out, quiet)


def _share(percent: str) -> float:
    try:
        share = float(percent.strip().removesuffix("%")) / 100
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise ConfigError(f"'{percent}' is no depth: write a percentage of the text from 0 to 100")
    return share


def _rows(grid: NeedleGrid) -> list[list[str]]:
    from offload_decode.evals.contender import label
    from offload_decode.evals.needle_grid import PANELS

    plan = grid.plan
    ways = {"dense": "dense", "selected": plan.selector, "control": "control"}
    rows = [["accuracy in %, depth:", *(f"{100 * depth:.4g} %" for depth in plan.depths), "mean"]]
    for column, length in enumerate(plan.lengths):
        for panel in PANELS:
            cells = [line[column] for line in grid.accuracy(panel)]
            shown = [f"{100 * cell:.0f}" for cell in [*cells, fmean(cells)]]
            rows.append([f"{label(length)} tokens, {ways[panel]}", *shown])
    return rows


def _notes(grid: NeedleGrid, out: Path, quiet: bool) -> None:
    from offload_decode.evals.contender import label
    from offload_decode.evals.summary import of_needles

    ways = [[getattr(cell, panel).score for cell in grid.cells] for panel in ("dense", "selected", "control")]
    for sentence in of_needles(ways[:2], ways[2]):
        output.note(sentence, quiet)
    if repeated := grid.configuration["text_repeated_at"]:
        lengths = ", ".join(map(label, repeated))
        output.note(f"the text is shorter than {lengths} tokens and was repeated there", quiet)
    if grid.mean("control") > 0:
        output.note(
            f"the control was answered in {grid.mean('control'):.0%} of the cells, although the needle was "
            "taken out: do not trust the accuracies",
            quiet,
        )
    output.note(f"{out / RESULT}, {out / PICTURE}", quiet)
