"""`offload-decode eval passkey`: a pass key among sentences that repeat, by Quest's protocol."""

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
    Wanted,
    ask_all,
    contenders_of,
)
from cli.options import Device, Json, Quiet


def passkey(
    model: EvalModel = "demo",
    lengths: Lengths = "10000,100000",
    selector: Selectors = None,
    budgets: Budgets = "64,128,256,512,1024,2048,4096",
    option: CommonOptions = None,
    limit: Limit = 100,
    seeds: Seeds = "0",
    prefill: PrefillMethod = "dense",
    stores: Stores = None,
    begin: Begin = True,
    out: Out = None,
    device: Device = "auto",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Ask for a pass key, by Quest's protocol (arXiv 2406.10774).

    A number of five digits stands among sentences that repeat, at a place drawn afresh, in
    10,000 and in 100,000 tokens.
    """
    from offload_decode.evals.tasks.passkey import Passkey

    wanted = Wanted(
        "passkey",
        "passkey",
        model,
        None,
        lengths,
        contenders_of(selector or ["quest", "topk"], budgets, option),
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
    ask_all(wanted, [Passkey()])
