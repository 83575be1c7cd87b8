"""Options that several commands share, and what they mean."""

from __future__ import annotations

import functools
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

import typer

from offload_decode.common.errors import ConfigError, CorpusError
from offload_decode.prefill_jobs.plain_files import read_bounded

if TYPE_CHECKING:
    from offload_decode.prefill_jobs.folders import Rules


# Groups of options: a command takes what a group makes of its options, and Typer sees the options.


class From:
    """`Annotated[T, From(make)]`: a parameter that `make`, a function of options, gives the value of."""

    def __init__(self, make: Callable[..., Any]):
        self.make = make


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the options of its groups in their place."""
    groups: dict[str, tuple[Callable[..., Any], list[str]]] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in _parameters(command):
        make = _maker(parameter.annotation)
        if make is None:
            parameters.append(parameter)
            continue
        own = _parameters(make)
        groups[parameter.name] = make, [one.name for one in own]
        parameters.extend(own)

    @functools.wraps(command)
    def flat(**given: Any) -> None:
        made = {
            name: make(**{option: given.pop(option) for option in own})
            for name, (make, own) in groups.items()
        }
        command(**given, **made)

    flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what Typer reads
    flat.__annotations__ = {one.name: one.annotation for one in parameters}
    del flat.__wrapped__
    return flat


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    hints = get_type_hints(function, include_extras=True)
    found = inspect.signature(function).parameters.values()
    # By name alone: an option without a default may follow one that has it.
    return [one.replace(annotation=hints[one.name], kind=inspect.Parameter.KEYWORD_ONLY) for one in found]


def _maker(annotation: Any) -> Callable[..., Any] | None:
    if get_origin(annotation) is not Annotated:
        return None
    return next((extra.make for extra in get_args(annotation)[1:] if isinstance(extra, From)), None)


# Numbers as people write them: `32K` tokens are 32,768, `16GiB` are 2**34 bytes.

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20}
_PREFIXES = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
# More than any machine has; the system takes no limit of 2**63 bytes and more.
_MOST_TOKENS, _MOST_BYTES = 1 << 40, 1 << 60
_SHOWN = 40


def token_count(text: str) -> int:
    """A count such as `2048`, `2K` or `1M`; raises `ConfigError` for anything else, for 0 and for
    more than there can be.
    """
    found = re.fullmatch(r"(\d{1,15})([KM]?)", text.strip().upper())
    count = 0 if found is None else int(found[1]) * _UNITS[found[2]]
    if not 0 < count <= _MOST_TOKENS:
        raise ConfigError(f"'{text:.{_SHOWN}}' is no number of tokens: write one like 2048, 32K or 1M")
    return count


def byte_count(text: str) -> int:
    """Bytes such as `16GiB`, `1.5 GB`, `512MB`; `16G` is 16GiB. Raises `ConfigError` for anything else."""
    found = re.fullmatch(r"(\d{1,18}(?:\.\d+)?)\s*([KMGT]?)(|I?B)", text.strip().upper())
    size = (
        0
        if found is None
        else round(float(found[1]) * (1000 if found[3] == "B" else 1024) ** _PREFIXES[found[2]])
    )
    if not 0 < size <= _MOST_BYTES:
        raise ConfigError(f"'{text:.{_SHOWN}}' is no size: write one like 16GiB, 64GB or 512MB")
    return size


# What the shell offers when Tab is pressed: names that are known without heavy imports.

_STORE = "zarr.json"


def selector_names(incomplete: str) -> list[str]:
    """Selectors whose names begin with `incomplete`."""
    from offload_decode.selectors.registry import names

    return [name for name in names() if name.startswith(incomplete)]


def index_kinds(incomplete: str) -> list[str]:
    """Index kinds whose names begin with `incomplete`."""
    from offload_decode.indexes.registry import kinds

    return [kind for kind in kinds() if kind.startswith(incomplete)]


def prefill_methods(incomplete: str) -> list[str]:
    """Prefill methods whose names begin with `incomplete`."""
    from offload_decode.prefill_jobs.methods.registry import names

    return [name for name in names() if name.startswith(incomplete)]


def selector_options(incomplete: str) -> list[str]:
    """KEY= of the options that most selectors have, and index=KIND."""
    keys = ("budget=", "schedule=linear", "dense_layers=", "tail=clusters", "tail=sample")
    known = [*keys, *(f"index={kind}" for kind in index_kinds(""))]
    return [option for option in known if option.startswith(incomplete)]


def stores(incomplete: str) -> Iterator[str]:
    """Stores whose path begins with `incomplete`, and folders, which may hold some."""
    folder, slash, name = incomplete.rpartition("/")
    try:
        there = sorted(Path(folder + slash or ".").expanduser().iterdir())
    except OSError:
        return
    for path in there:
        if path.name.startswith(name) and (name or not path.name.startswith(".")) and path.is_dir():
            whole = (path / _STORE).is_file()
            yield f"{folder}{slash}{path.name}{'' if whole else '/'}"


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
        autocompletion=stores,
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
        autocompletion=selector_names,
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
        autocompletion=selector_options,
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
