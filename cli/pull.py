"""`offload-decode pull`: bucket to store."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from offload_decode.cli import output
from offload_decode.cli.options import Json, Quiet, a_path
from offload_decode.cli.progress import Progress
from offload_decode.cli.push import summary, summary_of_all


def pull(
    url: Annotated[
        str,
        typer.Argument(
            metavar="URL",
            help="Where `push` put it: s3://BUCKET/NAME, gs://BUCKET/NAME or file:///FOLDER/NAME.",
            show_default=False,
        ),
    ],
    store: Annotated[
        Path,
        typer.Argument(
            metavar="STORE",
            help="Where to write the store, or the collection; nothing may be there yet.",
            show_default=False,
            parser=a_path,
        ),
    ],
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Fetch a store, or a collection, from a bucket.

    The indexes in URL.indexes/ come along, to STORE.indexes/. Every byte is checked as it arrives, and STORE
    appears when all of it is there. `ask` and `batch` take the URL of a collection too, and fetch the
    stores that they ask. The same command resumes a pull that was interrupted, and keeps a store that is
    there as it is in the bucket. Needs pip install 'offload-decode[buckets]'; credentials and endpoints
    come from AWS_... and GOOGLE_... variables.
    """
    from offload_decode.prefill_jobs.buckets.collections import pull_collection
    from offload_decode.prefill_jobs.buckets.far_collection import lies_at

    if lies_at(url):
        with Progress(quiet) as progress:
            all_moved = pull_collection(url, store, progress)
        if as_json:
            output.answer_json({"url": url, "collection": str(store)} | asdict(all_moved))
        told = summary_of_all(all_moved, "fetched")
        output.note(f'{store}: {told}\nask it something: offload-decode ask {store} "…"', quiet)
        return
    from offload_decode.prefill_jobs.buckets import pull as run

    with Progress(quiet) as progress:
        moved = run(url, store, progress=progress)
    if as_json:
        output.answer_json({"url": url, "store": str(store)} | asdict(moved))
    output.note(
        f'{store}: {summary(moved, "fetched")}\nask it something: offload-decode ask {store} "…"', quiet
    )
