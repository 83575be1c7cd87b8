"""`offload-decode append`: more documents for a store."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from offload_decode.cli import index, output
from offload_decode.cli import options as opts
from offload_decode.cli.options import Folders, argument, with_groups
from offload_decode.cli.output import Progress
from offload_decode.cli.prefill import RunOptions, exit_on_failures, of_reading
from offload_decode.common import files

if TYPE_CHECKING:
    from offload_decode.prefill_jobs.append import AppendReport


@with_groups
def append(
    store: opts.Store,
    corpus: Annotated[str, argument("CORPUS", "A text file, a folder of them, or - for standard input.")],
    *,
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
    """Add documents to a store.

    The prefill continues where the store ends, with its model, method and settings, and gives the same result
    as one prefill of everything. Until it is done the store is unchanged and can be asked. Indexes are
    extended, and their recall is measured again.

    The same command resumes an interrupted append, or begins it anew where its documents have changed since.
    Documents already in the store are skipped; one whose text in the store is another is refused, because a
    store only grows. CORPUS is as for `prefill`.
    """
    from offload_decode.prefill_jobs.folders import check_corpus

    rules = folders.rules([corpus])
    check_corpus(corpus)

    from offload_decode.cli.compiling import exit_on_bus_error
    from offload_decode.prefill_jobs.append import append as run
    from offload_decode.prefill_jobs.continuing import opened

    exit_on_bus_error()
    run_with = RunOptions(device, weights=weights, gpu_memory=gpu_memory, ram=ram)
    run_with.admit_further(opened(store), model)
    with Progress(quiet) as progress, files.synced(not no_sync):
        report = run(
            store,
            corpus,
            model=model,
            adapter=adapter,
            device=device,
            weights=weights,
            rules=rules,
            progress=progress,
        )
    if as_json:
        output.answer_json(asdict(report) | {"kept": report.kept})
    for line in _report_lines(report):
        output.note(line, quiet)
    exit_on_failures(report.failed)


def _report_lines(report: AppendReport) -> list[str]:
    lines = of_reading(report.skipped, report.notes)
    if report.known:
        lines.append(f"in the store already: {output.some(report.known)}")
    if report.kept:
        return [*lines, f"{report.store}: kept as it is, with {report.n_tokens:,} tokens: nothing is new"]
    added = f"{report.added_tokens:,} tokens more, in {output.count(len(report.added), 'document')}"
    if report.resumed_from:
        added += f", resumed after {report.resumed_from:,}"
    lines.append(
        f"{report.store}: {added}, in {output.duration(report.seconds)} "
        f"({report.tokens_per_second:,.0f} tokens/s, peak memory {output.size(report.peak_memory)}); "
        f"now {report.n_tokens:,} tokens, {output.count(report.documents, 'document')}, "
        f"{output.size(report.bytes)}"
    )
    lines += discarded_lines(report.discarded)
    lines += earlier_parts(report.shared, report.copied)
    lines += [index.summary(kind) for kind in report.indexes]
    return [*lines, *report.left, f'ask it something: offload-decode ask {report.store} "…"']


def discarded_lines(tokens: int) -> list[str]:
    """That an interrupted run had run some `tokens` of another text, if it had."""
    note = f"an interrupted run was for another text: the {tokens:,} tokens it ran were discarded"
    return [note] if tokens else []


def earlier_parts(shared: int, copied: int) -> list[str]:
    """How many bytes of the earlier store are in the new one, if any."""
    with_it = f"{output.size(shared)} are shared with it, " if shared else ""
    return [f"of the earlier store {with_it}{output.size(copied)} were copied"] if shared or copied else []
