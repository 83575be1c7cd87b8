"""`offload-decode push`: store to bucket."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offload_decode.cli import output
from offload_decode.cli.options import Json, Quiet, StoreOrCollection, a_path
from offload_decode.cli.output import Progress

if TYPE_CHECKING:
    from offload_decode.prefill_jobs.buckets import Transfer
    from offload_decode.prefill_jobs.buckets.collections import Moved


def push(
    store: StoreOrCollection,
    url: Annotated[
        str,
        typer.Argument(
            metavar="URL",
            help="Where to put it: s3://BUCKET/NAME, gs://BUCKET/NAME or file:///FOLDER/NAME.",
            show_default=False,
        ),
    ],
    drop: Annotated[
        bool,
        typer.Option(
            "--drop", help="Leave less than half of the documents there, where this collection has no more."
        ),
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Put a store, or a collection, into a bucket.

    The indexes beside it go to URL.indexes/. What is already there and unchanged is not sent again: the same
    command resumes a push that was interrupted, and renews a collection; what the collection no longer
    has is removed there. Needs pip install 'offload-decode[buckets]'; credentials and endpoints come from
    AWS_... and GOOGLE_... variables.
    """
    from offload_decode.collections.collection import is_collection

    if is_collection(store):
        from offload_decode.prefill_jobs.buckets.collections import push_collection

        with Progress(quiet) as progress:
            all_moved = push_collection(store, url, progress, drop)
        if as_json:
            output.answer_json({"collection": str(store), "url": url} | asdict(all_moved))
        output.note(
            f'{url}: {summary_of_all(all_moved, "sent")}\nask it something: offload-decode ask {url} "…"',
            quiet,
        )
        return
    from offload_decode.prefill_jobs.buckets import push as run

    with Progress(quiet) as progress:
        moved = run(store, url, progress=progress)
    if as_json:
        output.answer_json({"store": str(store), "url": url} | asdict(moved))
    output.note(f"{url}: {summary(moved, 'sent')}\nfetch it: offload-decode pull {url} STORE", quiet)


def summary(moved: Transfer, verb: str) -> str:
    """What a transfer did, for people."""
    kept = (
        f", {output.count(moved.skipped_files, 'file')} ({output.size(moved.skipped_bytes)}) there already"
        if moved.skipped_files
        else ""
    )
    speed = f" ({output.size(moved.bytes / moved.seconds)}/s)" if moved.bytes else ""
    return (
        f"{output.count(moved.files, 'file')} {verb}, {output.size(moved.bytes)}, "
        f"in {output.duration(moved.seconds)}{speed}{kept}"
    )


def summary_of_all(moved: Moved, verb: str) -> str:
    """What became of a collection, for people."""
    kept = f", {moved.kept:,} there already" if moved.kept else ""
    gone = f", {moved.gone:,} removed" if moved.gone else ""
    speed = f" ({output.size(moved.bytes / moved.seconds)}/s)" if moved.bytes else ""
    return (
        f"{output.count(moved.moved, 'document')} {verb}, {output.size(moved.bytes)}, "
        f"in {output.duration(moved.seconds)}{speed}{kept}{gone}"
    )


# `offload-decode pull`: bucket to store.


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
    from offload_decode.prefill_jobs.buckets.collections import lies_at, pull_collection

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
