"""`offload-decode collect`: a folder of texts to a collection with a store for each."""

from __future__ import annotations

import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offload_decode.cli import options as opts
from offload_decode.cli import output
from offload_decode.cli.options import Folders, a_path, argument, on_this_machine, option, with_groups
from offload_decode.cli.output import Progress
from offload_decode.cli.prefill import (
    RunOptions,
    StoreOptions,
    exit_on_failures,
    of_reading,
)
from offload_decode.common import files

if TYPE_CHECKING:
    from offload_decode.prefill_jobs.collect import CollectReport


@with_groups
def collect(
    folder: Annotated[str, argument("FOLDER", "A folder of documents.")],
    model: opts.ModelToLoad,
    out: Annotated[
        Path, option("COLLECTION", "The folder of the collection, which is made or updated.", parser=a_path)
    ],
    made: StoreOptions,
    run_with: RunOptions,
    *,
    metadata: Annotated[
        Path | None,
        option(
            "FILE.jsonl",
            'Metadata of the documents for --where, one per line: {"name": "2020/a.txt", "author": "…"}. '
            "Without this option, earlier metadata stay.",
            parser=a_path,
        ),
    ] = None,
    drop: Annotated[
        bool, typer.Option("--drop", help="Drop missing documents even if they are more than half.")
    ] = False,
    folders: Folders,
    no_sync: opts.NoSync = False,
    as_json: opts.Json = False,
    quiet: opts.Quiet = False,
) -> None:
    """Keep a collection: a store for each document of a folder.

    New and changed documents are prefilled; those that are gone, or that --glob and --exclude now leave out,
    are dropped and named, more than half of them only with --drop. The same command updates a collection, and
    resumes an interrupted one. A document that cannot be read does not stop the others: it is named at the
    end, and keeps its earlier store. `ask` and `batch` take a collection.
    """
    on_this_machine(out)
    rules = folders.rules([folder], _metadata_pattern(folder, metadata))

    from offload_decode.prefill_jobs.collect import collect as run
    from offload_decode.prefill_jobs.collect import read_metadata

    settings = made.settings
    described = None if metadata is None else read_metadata(metadata)
    run_with.admit(model, settings.chunk)
    maker = run_with.maker(model, settings)
    with Progress(quiet) as progress, files.synced(not no_sync):
        report = run(folder, out, maker, rules=rules, metadata=described, drop=drop, progress=progress)
    if as_json:
        output.answer_json({"collection": out} | asdict(report))
    for line in of_reading(report.skipped, report.notes):
        output.note(line, quiet)
    if report.unknown:
        output.note(
            f"the metadata name {output.count(len(report.unknown), 'document')} that the collection does not "
            f"have, such as {output.one_line(report.unknown[0])}",
            quiet,
        )
    if report.copies:
        pairs = [f"{name} (of {first})" for name, first in report.copies]
        output.note(f"copies: {output.some(pairs)}; --together asks one document of the same bytes", quiet)
    if report.lost:
        pairs = [f"{name} ({kind})" for name, kind in report.lost]
        output.note(
            f"indexes of changed documents that `index` is to build again: {output.some(pairs)}", quiet
        )
    if report.gone:
        output.note(f"dropped, because the folder no longer has them: {output.some(report.gone)}", quiet)
    output.note(f"{out}: {_summary(report)}", quiet)
    exit_on_failures(report.failed)
    output.note(f'ask it something: offload-decode ask {out} "…"', quiet)


def _summary(report: CollectReport) -> str:
    gone, failed = len(report.gone), len(report.failed)
    counts = {"made": report.made, "kept": report.kept, "gone": gone, "failed": failed}
    speed = f", {report.prefilled / report.seconds:,.0f} tokens/s" if report.prefilled else ""
    return (
        f"{', '.join(f'{number:,} {what}' for what, number in counts.items() if number)}; it holds "
        f"{output.count(report.documents, 'document')} of {report.tokens:,} tokens "
        f"({output.duration(report.seconds)}{speed})"
    )


def _metadata_pattern(folder: str, metadata: Path | None) -> list[str]:
    """The pattern that excludes the metadata file, where it is in the folder of documents."""
    if metadata is None:
        return []
    below = os.path.relpath(os.path.realpath(metadata), os.path.realpath(folder))
    return [] if below.startswith("..") else ["/" + re.sub(r"([\\*?\[\]!# ])", r"\\\1", below)]
