"""`offload-decode eval ruler`: the thirteen tasks of RULER (arXiv 2404.06654)."""

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


def ruler(
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
    """Ask RULER's thirteen tasks: needles, variables, word counts, and questions about documents.

    Every question is answered with dense attention and with each selector at each budget. Every fourth text
    is also asked without what is asked for, as a control. The worst task stands first, then the mean.
    """
    from offload_decode.evals import tasks as known
    from offload_decode.evals.tasks.ruler import SUITE

    chosen = [
        known.get(name) for name in tasks_named(tasks, [name for name in SUITE if name in known.names()])
    ]
    wanted = Wanted(
        "ruler",
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
