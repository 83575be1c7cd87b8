"""`offload-decode collect`: a folder of texts to a collection, a store for each."""

from __future__ import annotations

import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offload_decode.cli import output
from offload_decode.cli.errors import FAILURE
from offload_decode.cli.options import (
    Exclude,
    FollowLinks,
    From,
    Glob,
    Json,
    NoSync,
    Quiet,
    a_path,
    on_this_machine,
    rules_of,
    with_groups,
)
from offload_decode.cli.output import Progress
from offload_decode.cli.prefill import skipped_files
from offload_decode.cli.prefill_options import Making, Running, making, running
from offload_decode.common import files
from offload_decode.demo_models import QUOTED

if TYPE_CHECKING:
    from offload_decode.prefill_jobs.collect import CollectReport

_SHOWN = 5


@with_groups
def collect(
    folder: Annotated[
        str, typer.Argument(metavar="FOLDER", help="A folder of documents.", show_default=False)
    ],
    model: Annotated[
        str,
        typer.Option(
            metavar="M", help=f"{QUOTED} (shipped), a transformers id, a model's folder, or a .gguf file."
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            metavar="COLLECTION",
            help="The folder of the collection: made, or renewed.",
            parser=a_path,
        ),
    ],
    made: Annotated[Making, From(making)],
    run_as: Annotated[Running, From(running)],
    metadata: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.jsonl",
            help='What is known of the documents, a line each: {"name": "2020/a.txt", "author": "…"}; '
            "--where asks for it. Without it, what was said before stays.",
            show_default=False,
            parser=a_path,
        ),
    ] = None,
    drop: Annotated[
        bool, typer.Option("--drop", help="Drop documents that are gone though they are most of them.")
    ] = False,
    glob: Glob = None,
    exclude: Exclude = None,
    follow_links: FollowLinks = False,
    no_sync: NoSync = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Keep a collection: a store for each document of a folder.

    Documents that are new or whose bytes changed are prefilled, and those that are gone, or that --glob and
    --exclude leave out now, are dropped and named; more than half of them only with --drop. The same command
    renews a collection, and resumes one that was interrupted. A document that cannot be read does not
    stop the others: it is named at the end, and keeps the store that it had. `ask` and `batch` take a
    collection.
    """
    on_this_machine(out)
    rules = rules_of(glob, [*(exclude or []), *_itself(folder, metadata)], follow_links, [folder])

    from offload_decode.prefill_jobs.collect import Maker, read_metadata
    from offload_decode.prefill_jobs.collect import collect as run

    settings = made.settings
    described = None if metadata is None else read_metadata(metadata)
    run_as.admit(model, settings.chunk)
    maker = Maker(model, settings, run_as.device, run_as.dtype, run_as.weights)
    with Progress(quiet) as progress, files.synced(not no_sync):
        report = run(folder, out, maker, rules=rules, metadata=described, drop=drop, progress=progress)
    if as_json:
        output.answer_json({"collection": out} | _as_json(report))
    if report.skipped:
        output.note(skipped_files(tuple(report.skipped)), quiet)
    if report.unknown:
        output.note(
            f"the metadata name {output.count(len(report.unknown), 'document')} that the collection does not "
            f"have, such as {output.one_line(report.unknown[0])}",
            quiet,
        )
    if report.gone:
        names = ", ".join(map(output.one_line, report.gone[:_SHOWN]))
        more = f" and {len(report.gone) - _SHOWN:,} more" if len(report.gone) > _SHOWN else ""
        output.note(f"dropped, as the folder no longer has them: {names}{more}", quiet)
    for one in report.failed[:_SHOWN]:
        output.note(f"error: {output.one_line(one.name)}: {output.one_line(one.reason)}")
    if (unshown := len(report.failed) - _SHOWN) > 0:
        output.note(f"error: and {output.count(unshown, 'document')} more (--json lists them)")
    output.note(f"{out}: {_told(report)}", quiet)
    if report.failed:
        raise typer.Exit(FAILURE)
    output.note(f'ask it something: offload-decode ask {out} "…"', quiet)


def _as_json(report: CollectReport) -> dict[str, object]:
    lists = {
        "failed": [one._asdict() for one in report.failed],
        "skipped": [one._asdict() for one in report.skipped],
    }
    return asdict(report) | lists


def _told(report: CollectReport) -> str:
    gone, failed = len(report.gone), len(report.failed)
    counts = {"made": report.made, "kept": report.kept, "gone": gone, "failed": failed}
    speed = f", {report.prefilled / report.seconds:,.0f} tokens/s" if report.prefilled else ""
    return (
        f"{', '.join(f'{number:,} {what}' for what, number in counts.items() if number)}; it holds "
        f"{output.count(report.documents, 'document')} of {report.tokens:,} tokens "
        f"({output.duration(report.seconds)}{speed})"
    )


def _itself(folder: str, metadata: Path | None) -> list[str]:
    """The pattern that leaves the metadata out of the documents, where they lie among them."""
    if metadata is None:
        return []
    below = os.path.relpath(os.path.realpath(metadata), os.path.realpath(folder))
    return [] if below.startswith("..") else ["/" + re.sub(r"([\\*?\[\]!# ])", r"\\\1", below)]
