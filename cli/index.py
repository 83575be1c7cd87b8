"""`offload-decode index`: store to vector indexes."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from cli import completion, output
from cli.options import Json, NoSync, Quiet, Store
from cli.progress import Progress
from indexes import durable

if TYPE_CHECKING:
    from prefill_jobs.build import BuildReport


def index(
    store: Store,
    kind: Annotated[
        str,
        typer.Option(
            metavar="K",
            help="clusters (4-bit scan, exact scores), flat (exact, needs no building), faiss-ivf, "
            "faiss-hnsw, hnswlib, or an extension's.",
            autocompletion=completion.index_kinds,
        ),
    ] = "clusters",
    recall: Annotated[
        float,
        typer.Option(metavar="R", help="Recall to tune each index to, measured on stored queries.", max=1),
    ] = 0.98,
    k: Annotated[
        int, typer.Option("--k", metavar="K", help="Measure the recall of the K best keys.", min=1)
    ] = 100,
    no_sync: NoSync = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Build vector indexes over the stored keys.

    There is one for every layer and KV head, in STORE.indexes/ beside the store. Heads that are indexed
    already are kept: the same command resumes a build that was interrupted. `ask`, `chat` and `batch` search
    the clusters from then on; any other kind with -o index=KIND.
    """
    from cli.compiling import tell_of_compiling
    from cli.faults import end_with_a_sentence
    from prefill_jobs.build import build_indexes

    tell_of_compiling()
    end_with_a_sentence()

    with Progress(quiet) as progress, durable.synced(not no_sync):
        report = build_indexes(store, kind, recall=recall, k=k, progress=progress)
    if as_json:
        output.answer_json(asdict(report))
    output.note(f"{made(report)}{recalled(report)}", quiet)
    if report.full_scans:
        some = "every head" if report.full_scans == report.heads else output.count(report.full_scans, "head")
        output.note(
            f"{some} reached that recall by a full scan of the keys alone, as index=flat does: a lower "
            "--recall, or another kind, may be faster",
            quiet,
        )
    if report.lowest_recall < recall:
        output.note(f"some heads stay below the recall of {recall} that was asked for", quiet)


def made(report: BuildReport, verb: str = "built") -> str:
    """Which indexes were made, for people."""
    kept = f", {report.reused:,} kept" if report.reused else ""
    return (
        f"{report.folder}: {report.heads:,} heads ({report.built:,} {verb}{kept}), "
        f"{output.size(report.bytes)}, in {output.duration(report.seconds)}"
    )


def recalled(report: BuildReport) -> str:
    """Their recall, and what it took."""
    at = f"@{report.k}" if report.k else ""
    tuned = "; ".join(f"{name} {_span(value)}" for name, value in report.parameters.items())
    return (
        f"; recall{at} {report.recall:.3f} on average, {report.lowest_recall:.3f} for the worst head"
        f"{f'; {tuned}' if tuned else ''}"
    )


def _span(value: object) -> str:
    lowest, highest = value if isinstance(value, tuple) else (value, value)
    return str(lowest) if lowest == highest else f"{lowest} to {highest}"
