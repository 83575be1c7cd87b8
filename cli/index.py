"""`offload-decode index`: store to vector indexes."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offload_decode.cli import options as opts
from offload_decode.cli import output
from offload_decode.cli.errors import FAILURE, sentence
from offload_decode.cli.limits import cluster_of
from offload_decode.cli.options import on_this_machine, option, store_argument, workers_option
from offload_decode.cli.output import Progress
from offload_decode.common import files
from offload_decode.common.errors import ConfigError, OffloadDecodeError

if TYPE_CHECKING:
    from offload_decode.prefill_jobs.indexing import BuildReport


def index(
    stores: Annotated[
        list[Path],
        store_argument(
            "Stores made by `prefill`, or collections made by `collect`, whose stores are all indexed.",
            lambda stores: [on_this_machine(store) for store in stores],
        ),
    ],
    kind: Annotated[
        str,
        option(
            "K",
            "clusters (4-bit scan, exact scores), flat (exact, needs no building), faiss-ivf, faiss-hnsw, "
            "hnswlib, or an extension's.",
            autocompletion=opts.index_kinds,
        ),
    ] = "clusters",
    recall: Annotated[
        float, option("R", "Recall to which each index is tuned, measured on stored queries.", max=1)
    ] = 0.98,
    k: Annotated[int, option("K", "Measure the recall of the K best keys.", "--k", min=1)] = 100,
    workers: Annotated[
        str | None,
        workers_option(
            "spread the stores over a Ray cluster; each is indexed on a machine that has it at the same path."
        ),
    ] = None,
    worker_count: opts.WorkerCount = None,
    no_sync: opts.NoSync = False,
    as_json: opts.Json = False,
    quiet: opts.Quiet = False,
) -> None:
    """Build vector indexes over the stored keys.

    There is one for every layer and KV head, in STORE.indexes/ beside the store. The same command resumes an
    interrupted build: heads already indexed are kept. `ask`, `chat` and `batch` then search the clusters by
    default, and any other kind with -o index=KIND.

    If one of several stores fails, the others continue and it is named at the end.
    """
    from offload_decode.cli.compiling import announce_compiling, exit_on_bus_error
    from offload_decode.prefill_jobs.indexing import build_indexes, check_target

    cluster = cluster_of(workers, worker_count, no_sync=no_sync)
    check_target(recall, k)
    given, several = _of_collections(stores)
    announce_compiling()
    exit_on_bus_error()
    with Progress(quiet) as progress, files.synced(not no_sync):
        if cluster is not None:
            from offload_decode.prefill_jobs.on_ray.jobs import index_on_ray

            results = index_on_ray(given, cluster, kind, recall=recall, k=k, progress=progress)
        elif several:
            results = _one_by_one(given, kind, recall, k, progress)
        else:
            report = build_indexes(given[0], kind, recall=recall, k=k, progress=progress)
    if several or cluster is not None:
        _report_all(results, recall, as_json, quiet)
        return
    if as_json:
        output.answer_json(asdict(report))
    _tell(report, recall, quiet)


Results = dict[Path, "BuildReport | OffloadDecodeError"]


def _of_collections(stores: list[Path]) -> tuple[list[Path], bool]:
    """The stores, collections replaced by theirs, and whether they are reported as several."""
    from offload_decode.collections.collection import Collection, is_collection

    given: list[Path] = []
    for store in stores:
        if is_collection(store):
            collection = Collection(store)
            given += [collection.store(entry) for entry in collection.entries]
        else:
            given.append(store)
    if not given:
        raise ConfigError(f"the collection {stores[0]} has no documents, so there is nothing to index")
    return list(dict.fromkeys(given)), given != stores or len(stores) > 1


def _one_by_one(stores: list[Path], kind: str, recall: float, k: int, progress: Progress) -> Results:
    from offload_decode.indexes import registry
    from offload_decode.prefill_jobs.indexing import build_indexes

    registry.get(kind)  # an unknown kind fails at once, not once per store
    results: Results = {}
    for number, store in enumerate(stores, start=1):
        shown = partial(progress, about=f"store {number:,} of {len(stores):,}")
        try:
            results[store] = build_indexes(store, kind, recall=recall, k=k, progress=shown)
        except OffloadDecodeError as error:
            results[store] = error
    return results


def _report_all(results: Results, recall: float, as_json: bool, quiet: bool) -> None:
    """Report what was built and what failed; raises `typer.Exit` if anything failed."""
    failures = {store: found for store, found in results.items() if isinstance(found, OffloadDecodeError)}
    reports = [found for found in results.values() if not isinstance(found, OffloadDecodeError)]
    if as_json:
        failed = [{"store": str(store), "error": sentence(error)} for store, error in failures.items()]
        output.answer_json({"indexes": list(map(asdict, reports)), "failures": failed})
    for report in reports:
        _tell(report, recall, quiet)
    for store, error in failures.items():
        output.note(f"error: {output.one_line(str(store))}: {sentence(error)}")
    if failures:
        raise typer.Exit(FAILURE)


def _tell(report: BuildReport, recall: float, quiet: bool) -> None:
    output.note(summary(report), quiet)
    if report.full_scans:
        whole = report.full_scans == report.heads
        heads = "every head" if whole else output.count(report.full_scans, "head")
        output.note(
            f"{heads} reached that recall only by a full scan of the keys, as index=flat does: a lower "
            "--recall, or another kind, may be faster",
            quiet,
        )
    if report.lowest_recall < recall:
        output.note(f"some heads stay below the requested recall of {recall}", quiet)


def summary(report: BuildReport) -> str:
    heads = {"extended": report.extended, "built": report.built - report.extended, "kept": report.reused}
    done = ", ".join(f"{count:,} {what}" for what, count in heads.items() if count)
    at = f"@{report.k}" if report.k else ""
    tuned = "; ".join(f"{name} {_span(value)}" for name, value in report.parameters.items())
    return (
        f"{report.folder}: {report.heads:,} heads ({done}), "
        f"{output.size(report.bytes)}, in {output.duration(report.seconds)}"
        f"; recall{at} {report.recall:.3f} on average, {report.lowest_recall:.3f} for the worst head"
        f"{_attention(report)}{f'; {tuned}' if tuned else ''}"
    )


def _attention(report: BuildReport) -> str:
    """What is found of the attention to the exact top-k, where it was measured."""
    if report.mass is None:
        return ""
    low = "" if report.low is None else f" ({report.low:.1%} at the 1st percentile)"
    return (
        f"; {report.mass:.2%} of the attention to them{low}, over a tenth lost for {report.lost:.2%} of the "
        f"queries ({report.most_lost:.2%} for the worst head), the best key found for {report.best:.2%} "
        f"({report.least_best:.2%})"
    )


def _span(value: object) -> str:
    lowest, highest = value if isinstance(value, tuple) else (value, value)
    return str(lowest) if lowest == highest else f"{lowest} to {highest}"
