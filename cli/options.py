"""Options that several commands share, and what they mean."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offload_decode.cli import completion
from offload_decode.cli.counts import byte_count
from offload_decode.errors import ConfigError, CorpusError
from offload_decode.prefill_jobs.plain_files import read_bounded

if TYPE_CHECKING:
    from offload_decode.prefill_jobs.folders import Rules


def a_path(text: str) -> Path:
    """A path as it was written; an empty one is not the folder that one happens to be in."""
    if not text:
        raise ConfigError("an empty path names nothing: give the path")
    return Path(text)


def url_of(store: Path) -> str | None:
    """The URL that was written as a path; None where it is a path."""
    scheme, colon, rest = str(store).partition(":")
    if colon and scheme in ("s3", "gs", "file"):
        return f"{scheme}:/{'/' if scheme == 'file' else ''}{rest}"  # a path keeps one slash of several
    return None


def on_this_machine(store: Path) -> Path:
    """The path of a store, unless it is the URL of one."""
    if url := url_of(store):
        raise ConfigError(
            f"{url} is in a bucket: pull it first, with `offload-decode pull {url} {store.name}`"
        )
    return store


def _a_store(told: str, callback: Callable[[Path], Path] | None = on_this_machine) -> Any:
    return typer.Argument(
        metavar="STORE",
        help=told,
        show_default=False,
        parser=a_path,
        callback=callback,
        autocompletion=completion.stores,
    )


Store = Annotated[Path, _a_store("A store that `prefill` made.")]
StoreOrCollection = Annotated[Path, _a_store("A store that `prefill` made, or a collection of `collect`.")]
Asked = Annotated[
    Path,
    _a_store("A store that `prefill` made, or a collection of `collect`, or its URL in a bucket.", None),
]
Model = Annotated[
    str | None,
    typer.Option(
        metavar="M",
        help="Model id, folder or .gguf file, if not the one that the store names.",
        show_default=False,
    ),
]
Selector = Annotated[
    str,
    typer.Option(
        "-s",
        "--selector",
        metavar="NAME",
        help="Method that chooses the stored tokens to attend to.",
        autocompletion=completion.selector_names,
    ),
]
Options = Annotated[
    list[str] | None,
    typer.Option(
        "-o",
        "--option",
        metavar="KEY=VALUE",
        help="Selector option, such as budget=2% or index=faiss-ivf; repeatable.",
        show_default=False,
        autocompletion=completion.selector_options,
    ),
]
MaxNewTokens = Annotated[int, typer.Option(metavar="N", help="Most tokens of an answer.", min=1)]
Temperature = Annotated[
    float, typer.Option(metavar="T", help="Sampling temperature; 0 always takes the likeliest token.", min=0)
]
TopP = Annotated[
    float,
    typer.Option(metavar="P", help="Sample from the likeliest tokens that together hold this probability."),
]
Seed = Annotated[int, typer.Option(metavar="N", help="Random seed for sampling.", min=0, max=2**63 - 1)]
Device = Annotated[str, typer.Option(metavar="D", help="auto, cpu, cuda or cuda:N.")]
Weights = Annotated[
    str,
    typer.Option(
        metavar="W",
        help="Weights of the model: auto (as prefilled), full (its own), or fewer bits, int8 or int4.",
    ),
]
GpuMemory = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Most GPU memory to use, such as 16GiB.", show_default=False),
]
Ram = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Most memory to use, such as 8GiB; mapped stores do not count.",
        show_default=False,
    ),
]
Attend = Annotated[
    str,
    typer.Option(
        metavar="WHERE",
        help="Where to attend to stored tokens: host, device, pinned (the device reads them in host memory), "
        "or auto (whichever measures fastest).",
    ),
]
DeviceCache = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="GPU memory, such as 2GiB, that keeps the stored rows used most recently.",
        show_default=False,
    ),
]
Glob = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATTERN",
        help="Of folders, read only the files that this names, as a .gitignore would: *.md, /docs/*.rst; "
        "repeatable.",
        show_default=False,
    ),
]
Exclude = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATTERN", help="Of folders, leave out what this names; repeatable.", show_default=False
    ),
]
FollowLinks = Annotated[bool, typer.Option("--follow-links", help="Of folders, read what links lead to.")]
Workers = Annotated[
    str | None,
    typer.Option(
        metavar="W",
        help="ray (this machine, or the cluster of RAY_ADDRESS) or ray://HOST:PORT: spread the questions "
        "over a Ray cluster; each store is asked on machines that have it at its path or, of a collection in "
        "a bucket, that fetch it.",
        show_default=False,
    ),
]
WorkerCount = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Number of Ray workers.  [default: one for each GPU, or for each machine without GPUs]",
        min=1,
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
NoSync = Annotated[
    bool,
    typer.Option(
        "--no-sync",
        help="Do not wait until what is done is on the disk: a power cut may then take all of it.",
    ),
]
Cite = Annotated[
    bool, typer.Option("--cite", help="Say which documents and passages the answer attended to.")
]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Show no progress and no notes on stderr.")]


def cache_size(size: str | None) -> int:
    """Bytes of a device cache as it was written; 0 for none. Raises `ConfigError`."""
    return 0 if size is None else byte_count(size)


def without_surrogates(text: str) -> str:
    """Text that UTF-8 can hold: JSON may spell half a surrogate pair, which no tokenizer takes."""
    return re.sub("[\ud800-\udfff]", "\N{REPLACEMENT CHARACTER}", text)


def question_from(text: str) -> str:
    """The question of an argument; `-` is standard input."""
    if text == "-":
        try:
            text = read_bounded(sys.stdin.buffer).decode("utf-8", "replace")
        except CorpusError as error:
            raise ConfigError(f"the question cannot be read, because {error}: ask a shorter one") from error
    question = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace").strip()
    if not question:
        raise ConfigError("the question is empty: give one, or - to read it from standard input")
    return question


def check_worker_count(workers: str | None, count: int | None) -> None:
    """Raise `ConfigError` for a number of workers where there are none."""
    if count and workers is None:
        raise ConfigError("--worker-count is of --workers: give --workers ray too, or leave it out")


def rules_of(
    glob: list[str] | None, exclude: list[str] | None, follow_links: bool, corpora: Sequence[str]
) -> Rules:
    """What is read of the folders among the corpora. Raises `ConfigError` where there are none to rule."""
    from offload_decode.prefill_jobs.folders import Rules

    if "" in corpora:
        raise ConfigError("an empty corpus names nothing: give a file, a folder, or - for standard input")
    rules = Rules(tuple(glob or ()), tuple(exclude or ()), follow_links)
    if rules != Rules() and not any(map(os.path.isdir, corpora)):
        raise ConfigError("--glob, --exclude and --follow-links are of folders, and none is given")
    return rules
