"""`offload-decode push` and `pull`: stores and collections to buckets and back."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from offload_decode.cli import output
from offload_decode.cli.options import Json, Quiet, StoreOrCollection, a_path, argument, option
from offload_decode.cli.output import Progress

if TYPE_CHECKING:
    from offload_decode.prefill_jobs.buckets import Transfer
    from offload_decode.prefill_jobs.buckets.collections import Moved


def push(
    store: StoreOrCollection,
    url: Annotated[
        str,
        argument("URL", "Destination: s3://BUCKET/NAME, gs://BUCKET/NAME or file:///FOLDER/NAME."),
    ],
    drop: Annotated[
        bool,
        option(
            None,
            "Allow more than half of the documents there to be removed, where this collection no longer has "
            "them.",
            "--drop",
        ),
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Put a store, or a collection, into a bucket.

    The indexes beside it go to URL.indexes/. The same command resumes an interrupted push and updates a
    collection: unchanged files are not sent again, and documents that the collection no longer has are
    removed there. Needs pip install 'offload-decode[buckets]'; credentials and endpoints come from AWS_...
    and GOOGLE_... variables.
    """
    from offload_decode.collections.collection import is_collection
    from offload_decode.prefill_jobs.buckets import push as push_store
    from offload_decode.prefill_jobs.buckets.collections import push_collection

    moved: Transfer | Moved
    with Progress(quiet) as progress:
        if is_collection(store):
            kind, follow_up = "collection", f'ask it something: offload-decode ask {url} "…"'
            moved = push_collection(store, url, progress, drop)
        else:
            kind, follow_up = "store", f"fetch it: offload-decode pull {url} STORE"
            moved = push_store(store, url, progress=progress)
    if as_json:
        output.answer_json({kind: str(store), "url": url} | asdict(moved))
    output.note(f"{url}: {summary(moved, 'sent')}\n{follow_up}", quiet)


def pull(
    url: Annotated[
        str,
        argument("URL", "Where `push` put it: s3://BUCKET/NAME, gs://BUCKET/NAME or file:///FOLDER/NAME."),
    ],
    store: Annotated[
        Path,
        argument(
            "STORE", "Where to write the store, or the collection; nothing may be there yet.", parser=a_path
        ),
    ],
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Fetch a store, or a collection, from a bucket.

    The indexes in URL.indexes/ go to STORE.indexes/. Every byte is checked as it arrives, and STORE appears
    when it is complete. The same command resumes an interrupted pull, and keeps a store that is the same as
    in the bucket. `ask` and `batch` take the URL of a collection too, and fetch the stores that they ask.
    Needs pip install 'offload-decode[buckets]'; credentials and endpoints come from AWS_... and GOOGLE_...
    variables.
    """
    from offload_decode.prefill_jobs.buckets import pull as pull_store
    from offload_decode.prefill_jobs.buckets.collections import is_collection_at, pull_collection

    moved: Transfer | Moved
    kind = "collection" if is_collection_at(url) else "store"
    with Progress(quiet) as progress:
        if kind == "collection":
            moved = pull_collection(url, store, progress)
        else:
            moved = pull_store(url, store, progress=progress)
    if as_json:
        output.answer_json({"url": url, kind: str(store)} | asdict(moved))
    done = f'{summary(moved, "fetched")}\nask it something: offload-decode ask {store} "…"'
    output.note(f"{store}: {done}", quiet)


def summary(moved: Transfer | Moved, verb: str) -> str:
    from offload_decode.prefill_jobs.buckets import Transfer

    if isinstance(moved, Transfer):
        what, kept = output.count(moved.files, "file"), output.count(moved.skipped_files, "file")
        left = [f"{kept} ({output.size(moved.skipped_bytes)}) there already"] if moved.skipped_files else []
    else:
        what = output.count(moved.moved, "document")
        counts = {"there already": moved.kept, "removed": moved.gone}
        left = [f"{number:,} {done}" for done, number in counts.items() if number]
    speed = f" ({output.size(moved.bytes / moved.seconds)}/s)" if moved.bytes else ""
    took = f"in {output.duration(moved.seconds)}{speed}"
    return ", ".join([f"{what} {verb}", output.size(moved.bytes), took, *left])
