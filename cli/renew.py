"""`offload-decode renew`: a store from its corpus as it is now."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from offload_decode.cli import index, output
from offload_decode.cli import options as opts
from offload_decode.cli.append import discarded_lines, earlier_parts
from offload_decode.cli.options import Folders, argument, with_groups
from offload_decode.cli.output import Progress
from offload_decode.cli.prefill import RunOptions, exit_on_failures, of_reading
from offload_decode.common import files

if TYPE_CHECKING:
    from offload_decode.prefill_jobs.renew import Renewal, RenewReport


@with_groups
def renew(
    store: opts.Store,
    corpus: Annotated[
        str, argument("CORPUS", "All of the corpus: a file, a folder, or - for standard input.")
    ],
    *,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what has changed and how many tokens would be run.")
    ] = False,
    drop: Annotated[
        bool,
        typer.Option(
            "--drop", help="Drop missing documents even if they are more than half, or all of a base."
        ),
    ] = False,
    model: opts.Model = None,
    adapter: opts.Adapter = "",
    folders: Folders,
    device: opts.Device = "auto",
    weights: opts.StoredWeights = "auto",
    gpu_memory: opts.GpuMemory = None,
    ram: opts.Ram = None,
    no_sync: opts.NoSync = False,
    as_json: opts.Json = False,
    quiet: opts.Quiet = False,
) -> None:
    """Bring a store up to date with its corpus.

    CORPUS is the whole corpus as it is now: edited, reordered, grown or with documents gone. Everything
    before the first changed token stays, the rest is prefilled with the store's model, method and settings,
    and the result is that of a prefill of CORPUS. Until it is done the store is unchanged and can be asked.
    Indexes are extended, or built again where stored keys changed.

    The same command resumes an interrupted renewal, or begins it anew where CORPUS has changed since. Where
    nothing has changed nothing is done.
    """
    from offload_decode.prefill_jobs.folders import check_corpus

    rules = folders.rules([corpus])
    check_corpus(corpus)

    from offload_decode.cli.compiling import exit_on_bus_error
    from offload_decode.prefill_jobs.continuing import load_for
    from offload_decode.prefill_jobs.renew import RenewReport, plan_renewal, renew_as

    exit_on_bus_error()
    with Progress(quiet) as progress, files.synced(not no_sync):
        plan = plan_renewal(store, corpus, model=model, rules=rules, drop=drop, progress=progress)
        report, loaded = RenewReport(store, plan, None), None
        for line in _plan_lines(plan, store):
            output.note(line, quiet)
        if plan.start and not dry_run:
            run_with = RunOptions(device, weights=weights, gpu_memory=gpu_memory, ram=ram)
            run_with.admit_further(plan.earlier, model)
            loaded = load_for(plan.earlier, model, device, weights, adapter)
        if not dry_run:
            report = renew_as(plan, loaded, store, progress)
    if as_json:
        output.answer_json(report.summary())
    for line in _report_lines(report):
        output.note(line, quiet)
    exit_on_failures(plan.failed)


def _plan_lines(plan: Renewal, store: object) -> list[str]:
    lines = of_reading(plan.skipped, plan.notes)
    named = (("added", plan.added), ("changed", plan.changed), ("gone", plan.gone))
    lines += [f"{what}: {output.some(names)}" for what, names in named if names]
    total = len(plan.tokens)
    if plan.start is None:
        return [*lines, f"{store}: kept as it is, with {total:,} tokens: nothing has changed"]
    again = f", {plan.start.again:,} of them for their queries alone" if plan.start.again else ""
    return [*lines, f"{plan.kept_tokens:,} of {total:,} tokens stay, {plan.run_tokens:,} are run{again}"]


def _report_lines(report: RenewReport) -> list[str]:
    discarded = discarded_lines(report.discarded)
    if (done := report.done) is None:
        return discarded
    after = f", resumed after {done.resumed_from:,}" if done.resumed_from > done.kept_tokens else ""
    lines = [
        *discarded,
        f"{report.store}: renewed{after}, in {output.duration(done.seconds)} "
        f"({done.tokens_per_second:,.0f} tokens/s, peak memory {output.size(done.peak_memory)}); "
        f"now {done.n_tokens:,} tokens, {output.count(len(report.plan.documents), 'document')}, "
        f"{output.size(done.bytes)}",
        *earlier_parts(done.shared, done.copied),
    ]
    lines += [index.summary(kind) for kind in done.indexes]
    return [*lines, *done.left, f'ask it something: offload-decode ask {report.store} "…"']
