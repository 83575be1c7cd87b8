"""`offload-decode prefill`: corpus to store."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli import output
from cli.options import Device, Json, Quiet
from cli.progress import Progress

if TYPE_CHECKING:
    from prefill_jobs.corpus import Skipped

_SHOWN = 5


def prefill(
    corpus: Annotated[
        str, typer.Argument(metavar="CORPUS", help="A text file, a folder of them, or - for standard input.")
    ],
    model: Annotated[
        str, typer.Option(metavar="M", help="'demo' (shipped), a transformers id, or a model's folder.")
    ],
    out: Annotated[
        Path, typer.Option(metavar="STORE", help="Where the store is to be; nothing may be there.")
    ],
    chunk: Annotated[int, typer.Option(metavar="N", help="Tokens in one forward pass.", min=1)] = 512,
    query_samples: Annotated[
        int, typer.Option(metavar="N", help="Prefill queries to keep for each KV head.", min=1)
    ] = 1024,
    device: Device = "auto",
    dtype: Annotated[
        str, typer.Option(metavar="T", help="auto (as the model has it), float16, bfloat16 or float32.")
    ] = "auto",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run a corpus through a model, once.

    Its keys and values are kept on disk. Text, Markdown, reStructuredText, HTML and source code are read;
    what is not text in a folder is skipped and named.

    The same command resumes a prefill that was interrupted.
    """
    from prefill_jobs.job import prefill as run

    with Progress(quiet) as progress:
        report = run(
            corpus,
            model=model,
            out=out,
            chunk=chunk,
            query_samples=query_samples,
            device=device,
            dtype=dtype,
            progress=progress,
        )
    if as_json:
        output.answer_json(asdict(report) | {"skipped": [skipped._asdict() for skipped in report.skipped]})
    if report.skipped:
        output.note(_skipped(report.skipped), quiet)
    resumed = f", resumed after {report.resumed_from:,}" if report.resumed_from else ""
    output.note(
        f"{report.store}: {report.n_tokens:,} tokens{resumed}, {output.count(report.documents, 'document')}, "
        f"{output.size(report.bytes)}, in {output.duration(report.seconds)} "
        f"({report.tokens_per_second:,.0f} tokens/s, peak memory {output.size(report.peak_memory)})\n"
        f'ask it something: offload-decode ask {report.store} "…"',
        quiet,
    )


def _skipped(skipped: tuple[Skipped, ...]) -> str:
    named = "; ".join(f"{name} ({reason})" for name, reason in skipped[:_SHOWN])
    more = f"; and {len(skipped) - _SHOWN} more" if len(skipped) > _SHOWN else ""
    return f"skipped {output.count(len(skipped), 'file')}: {named}{more}"
