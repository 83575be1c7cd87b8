"""`offload-decode eval fidelity`: how close every selector comes to exact attention."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offload_decode.cli import output
from offload_decode.cli.errors import FAILURE
from offload_decode.cli.eval.run import read_contenders
from offload_decode.cli.options import Device, Json, Model, Quiet, Store, key_values, option, question_from
from offload_decode.cli.output import Progress
from offload_decode.common.errors import ConfigError
from offload_decode.config import split_pairs
from offload_decode.evals.contender import Contender

if TYPE_CHECKING:
    from offload_decode.evals.fidelity import Entry, FidelityReport

RESULT = "fidelity.json"
_QUESTION = "What is this text about?"


def fidelity(
    store: Store,
    selector: Annotated[
        list[str] | None,
        option(
            "NAME[:KEY=VALUE,…]",
            "A selector, with options of its own as in topk:index=faiss-ivf or "
            "quest:page_size=32,metadata=int8; repeatable.  [default: every built-in one]",
            "-s",
            "--selector",
        ),
    ] = None,
    budgets: Annotated[
        str, option("K,…", "Stored tokens for each query: counts, or shares of the store like 2%.")
    ] = "64,256,1024",
    option: Annotated[
        list[str] | None, key_values("An option for all selectors, such as dense_layers=0,1")
    ] = None,
    question: Annotated[
        list[str] | None,
        option("TEXT", f'A question whose queries are measured; repeatable.  [default: "{_QUESTION}"]'),
    ] = None,
    tokens: Annotated[int, option("N", "Tokens to generate for each question.", min=2)] = 64,
    out: Annotated[Path, option("FOLDER", f"Where {RESULT} is written.")] = Path("fidelity"),
    model: Model = None,
    device: Device = "auto",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure how close selectors come to exact attention.

    Every selector gets the same budgets and the same queries: those of the questions, answered with dense
    attention, and the last ones that prefill kept.

    The table shows the share of the exact top-k that was found (recall), the share of the attention that the
    selection holds (mass), and the error of the attention to stored tokens, relative to dense attention: in
    all, of exact top-k with that budget (appr.), and of the selection against exact top-k (search). Then the
    tokens of the dense answer are run through each selector, and the probabilities of the next token are
    compared: KL in nats, how many nats more each of these tokens takes, and how often the likeliest token is
    the same.

    dense, random and streaming are always measured too. A selector that cannot run is refused at the start;
    one that fails later is named at the end, and the other results are kept. h2o and tova count question and
    answer in their budget, so they attend to fewer stored tokens: see the column `tokens`.
    """
    questions = tuple(map(question_from, question or [_QUESTION]))
    amounts = tuple(dict.fromkeys(amount.strip() for amount in budgets.split(",")))
    common = split_pairs(option or [])
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out} is no folder: name one, which is made where there is none")
    if (out / RESULT).exists():
        raise ConfigError(f"{out / RESULT} exists already: choose another --out, or remove it first")

    from offload_decode.cli.compiling import announce_compiling, exit_on_bus_error
    from offload_decode.common import files
    from offload_decode.engine.engine import Engine
    from offload_decode.evals.fidelity import FidelityPlan, check, measure
    from offload_decode.store.reader import KVStore

    plan = FidelityPlan(_contenders(selector or []), amounts, questions, tokens, common)
    announce_compiling()
    exit_on_bus_error()
    opened = KVStore.open(store)
    check(opened, plan)
    loaded = Engine.open(opened, model, selector="dense", device=device).loaded
    out.mkdir(parents=True, exist_ok=True)
    pairs, asked = output.count(len(plan.jobs), "pair"), tokens * len(questions)
    output.note(
        f"measuring {pairs} of a selector and a budget on {asked:,} tokens that are generated first", quiet
    )
    with Progress(quiet) as progress:
        report = measure(loaded, opened, plan, lambda done, total: progress("fidelity", done, total))
    result = report.to_json()
    files.write(out / RESULT, json.dumps(result).encode())
    if as_json:
        output.answer_json(result)
    else:
        output.answer(output.table(_rows(report)))
    output.note(f"{out / RESULT}: see it with `offload-decode eval report {out / RESULT}`", quiet)
    for failure in report.failures:
        output.note(f"error: {failure.label} at budget {failure.budget} was not measured: {failure.error}")
    if report.failures:
        raise typer.Exit(FAILURE)


def _contenders(given: Sequence[str]) -> tuple[Contender, ...]:
    from offload_decode.evals.contender import DENSE
    from offload_decode.evals.fidelity import CONTROLS
    from offload_decode.selectors.registry import built_in

    # A model's own indexer goes by queries of its own, which no store keeps.
    contenders = read_contenders(given or [name for name in built_in() if name != "own"])
    labels = [contender.label for contender in contenders]
    missing = [name for name in (DENSE, *CONTROLS) if name not in labels]
    return (*contenders, *map(Contender, missing))


def _rows(report: FidelityReport) -> list[list[str]]:
    errors = ["p50", "p95", "p99", "appr. p95", "search p95"]
    live = ["recall", "mass", *(f"error {name}" if name[0] == "p" else name for name in errors)]
    stored = ["stored: recall", "mass", "error p50"]
    rows = [["selector", "budget", "tokens", "moved", *live, "worst", "KL", "nats", "top-1", *stored]]
    return rows + [_row(entry) for entry in report.entries]


def _row(entry: Entry) -> list[str]:
    live, stored = entry.live, entry.stored
    shares = [live.recall, live.mass, live.error.p50, live.error.p95, live.error.p99]
    shares += [live.approximation.p95, live.search.p95]
    worst = f"{live.worst.layer}/{live.worst.head} {_percent(live.worst.error.mean)}"
    sampled = [] if stored is None else [stored.recall, stored.mass, stored.error.p50]
    return [
        entry.label,
        entry.budget,
        f"{entry.attended:,.0f}",
        output.size(entry.bytes_moved),
        *map(_percent, shares),
        worst,
        f"{entry.agreement.kl_mean:.2g}",
        f"{entry.agreement.nats:+.2g}",
        _percent(entry.agreement.top1),
        *(map(_percent, sampled) if sampled else ["-"] * 3),
    ]


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"
