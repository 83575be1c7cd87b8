"""`offload-decode push`: store to bucket."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli import output
from cli.options import Json, Quiet, Store, a_path
from cli.progress import Progress

if TYPE_CHECKING:
    from prefill_jobs.buckets import Transfer


def push(
    store: Store,
    url: Annotated[
        str,
        typer.Argument(
            metavar="URL",
            help="Where to put it: s3://BUCKET/NAME, gs://BUCKET/NAME or file:///FOLDER/NAME.",
            show_default=False,
        ),
    ],
    sign: Annotated[
        Path | None,
        typer.Option(
            metavar="KEY",
            help="Sign what is pushed, with the private key in this file: "
            "openssl genpkey -algorithm ed25519 -out KEY.",
            show_default=False,
            parser=a_path,
        ),
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Put a store into a bucket.

    The indexes beside it go to URL.indexes/. What is already there and unchanged is not sent again: the same
    command resumes a push that was interrupted. Needs pip install 'offload-decode[buckets]', and [signatures]
    with --sign; credentials and endpoints come from AWS_... and GOOGLE_... variables.
    """
    from prefill_jobs.buckets import push as run
    from prefill_jobs.buckets import signer

    signs = None if sign is None else signer(sign)
    with Progress(quiet) as progress:
        moved = run(store, url, signer=signs, progress=progress)
    if as_json:
        output.answer_json({"store": str(store), "url": url, "signed": sign is not None} | asdict(moved))
    verify = "" if sign is None else " --verify KEY.pub"
    output.note(f"{url}: {summary(moved, 'sent')}\nfetch it: offload-decode pull {url} STORE{verify}", quiet)


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
