"""`offload-decode eval aggregate`: what no small part of a text can tell."""

from __future__ import annotations

from cli.eval.running import (
    Begin,
    Budgets,
    CommonOptions,
    EvalModel,
    Lengths,
    Limit,
    Out,
    PrefillMethod,
    Seeds,
    Selectors,
    Stores,
    Tasks,
    Text,
    Wanted,
    ask_all,
    contenders_of,
    tasks_named,
)
from cli.options import Device, Json, Quiet


def aggregate(
    model: EvalModel = "demo",
    text: Text = None,
    lengths: Lengths = "4K,16K",
    tasks: Tasks = None,
    selector: Selectors = None,
    budgets: Budgets = "64,256,1024",
    option: CommonOptions = None,
    limit: Limit = 20,
    seeds: Seeds = "0",
    prefill: PrefillMethod = "dense",
    stores: Stores = None,
    begin: Begin = True,
    out: Out = None,
    device: Device = "auto",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Ask for what no small part of a text can tell.

    Counting mentions, joining the facts of a story, extracting every record as JSON, classifying and tallying
    lines: methods that attend to few tokens are known to break
    here. Every question is answered with dense attention and with each selector at each budget.
    """
    from offload_decode.evals import tasks as known
    from offload_decode.evals.tasks.aggregate import SUITE

    chosen = [known.get(name) for name in tasks_named(tasks, SUITE)]
    wanted = Wanted(
        "aggregate",
        tasks,
        model,
        text,
        lengths,
        contenders_of(selector, budgets, option),
        limit,
        seeds,
        prefill,
        stores,
        begin,
        out,
        device,
        as_json,
        quiet,
    )
    ask_all(wanted, chosen)
