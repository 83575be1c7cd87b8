"""Options that several commands share, and how they are read."""

from __future__ import annotations

import functools
import inspect
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand

from offload_decode.common.errors import ConfigError, CorpusError
from offload_decode.demo_models import QUOTED
from offload_decode.prefill_jobs.documents.files import read_bounded

if TYPE_CHECKING:
    from offload_decode.prefill_jobs.folders import Rules

EVERYDAY, RETRIEVAL, MODEL, OUTPUT = "Everyday", "Retrieval", "Model and machine", "Output"


class PanelledCommand(TyperCommand):
    """A command whose help lists its options by their `rich_help_panel`, as plain text."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Arguments first; an option that names no panel is among those of the output."""
        sections: dict[str, list[Any]] = {
            name: [] for name in ("Arguments", EVERYDAY, RETRIEVAL, MODEL, OUTPUT)
        }
        for parameter in self.get_params(ctx):
            if (record := parameter.get_help_record(ctx)) is not None:
                kind = "Arguments" if parameter.param_type_name == "argument" else None
                sections[kind or getattr(parameter, "rich_help_panel", None) or OUTPUT].append(record)
        for name, records in sections.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records)


class From:
    """`Annotated[T, From(make)]`: a parameter whose value `make` builds from the options it takes."""

    def __init__(self, make: Callable[..., Any]):
        self.make = make


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the options of each group in its place, as Typer reads them. A group is a parameter of
    a dataclass, whose fields are options, or one `From(make)`.
    """
    groups: dict[str, tuple[Callable[..., Any], list[str]]] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in _parameters(command):
        kind: Any = parameter.annotation
        extras = getattr(kind, "__metadata__", ())
        make = next((extra.make for extra in extras if isinstance(extra, From)), None)
        if isinstance(kind, type) and is_dataclass(kind):
            make = kind
        members = [parameter] if make is None else _parameters(make)
        parameters.extend(members)
        if make is not None:
            groups[parameter.name] = make, [member.name for member in members]

    @functools.wraps(command)
    def flat(**given: Any) -> None:
        made = {
            name: make(**{option: given.pop(option) for option in names})
            for name, (make, names) in groups.items()
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


_PREFIXES = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
# More than any machine has; the system refuses limits of 2**63 bytes and more.
_MOST_TOKENS, _MOST_BYTES = 1 << 40, 1 << 60
_SHOWN = 40


def token_count(text: str) -> int:
    """A count such as `2048`, `32K` (32,768) or `1M`. Raises `ConfigError` for anything else."""
    found = re.fullmatch(r"(\d{1,15})([KM]?)", text.strip().upper())
    count = 0 if found is None else int(found[1]) * 1024 ** _PREFIXES[found[2]]
    if not 0 < count <= _MOST_TOKENS:
        raise ConfigError(f"'{text:.{_SHOWN}}' is no number of tokens: write one like 2048, 32K or 1M")
    return count


def byte_count(text: str) -> int:
    """Bytes such as `16GiB`, `1.5 GB`, `512MB`; `16G` is 16GiB. Raises `ConfigError` for anything else."""
    found = re.fullmatch(r"(\d{1,18}(?:\.\d+)?)\s*([KMGT]?)(|I?B)", text.strip().upper())
    base = 1000 if found and found[3] == "B" else 1024
    size = 0 if found is None else round(float(found[1]) * base ** _PREFIXES[found[2]])
    if not 0 < size <= _MOST_BYTES:
        raise ConfigError(f"'{text:.{_SHOWN}}' is no size: write one like 16GiB, 64GB or 512MB")
    return size


def a_share(text: str) -> float:
    """A share such as `0.5`. Raises `ConfigError` for what is not from 0 to 1."""
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if not 0 <= share <= 1:
        raise ConfigError(f"'{text:.{_SHOWN}}' is no share: write one from 0 to 1, like 0.5")
    return share


# Shell completion; Typer leaves out what does not begin as the word does.


def selector_names() -> list[str]:
    from offload_decode.selectors.registry import names

    return names()


def index_kinds() -> list[str]:
    from offload_decode.indexes.registry import kinds

    return list(kinds())


def prefill_methods() -> list[str]:
    from offload_decode.prefill_jobs.methods.registry import names

    return names()


def selector_options() -> list[str]:
    tails = [f"tail={kind}" for kind in ("off", "auto", "clusters", "sample")]
    indexes = [f"index={kind}" for kind in index_kinds()]
    return ["budget=", "error=0.05@0.95", "schedule=linear", "dense_layers=", *tails, *indexes]


def stores(incomplete: str) -> Iterator[str]:
    """Stores whose path begins with `incomplete`, and folders, which may hold some."""
    folder, slash, name = incomplete.rpartition("/")
    try:
        found = sorted(Path(folder + slash or ".").expanduser().iterdir())
    except OSError:
        return
    for path in found:
        if path.name.startswith(name) and (name or not path.name.startswith(".")) and path.is_dir():
            is_store = (path / "zarr.json").is_file()
            yield f"{folder}{slash}{path.name}{'' if is_store else '/'}"


def a_path(text: str) -> Path:
    """A path as it was written; an empty one is not the current folder."""
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
    """The path of a store; raises `ConfigError` for the URL of one."""
    if url := url_of(store):
        raise ConfigError(
            f"{url} is in a bucket: pull it first, with `offload-decode pull {url} {store.name}`"
        )
    return store


def argument(metavar: str, help: str, **more: Any) -> Any:
    return typer.Argument(metavar=metavar, help=help, **more)


def store_argument(help: str, callback: Callable[[Any], Any] | None = on_this_machine) -> Any:
    """One store or several; the `callback` refuses URLs, for a command that takes none."""
    return argument("STORE", help, parser=a_path, callback=callback, autocompletion=stores)


def option(metavar: str | None, help: str, *names: str, panel: str | None = None, **more: Any) -> Any:
    """A Typer option of a panel; its name is the parameter's where no `names` are given."""
    return typer.Option(*names, metavar=metavar, help=help, rich_help_panel=panel, **more)


Store = Annotated[Path, store_argument("A store made by `prefill`.")]
StoreOrCollection = Annotated[
    Path, store_argument("A store made by `prefill`, or a collection made by `collect`.")
]

MaxNewTokens = Annotated[int, option("N", "Maximum number of tokens in an answer.", min=1, panel=EVERYDAY)]
Cite = Annotated[
    bool, option(None, "Show which documents and passages the answer attended to.", "--cite", panel=EVERYDAY)
]
Check = Annotated[
    bool,
    option(
        None,
        "Put the answer through the model once more, with attention to everything, and say how many of its "
        "tokens stay the likeliest.",
        "--check",
        panel=EVERYDAY,
    ),
]
OnlyGrounded = Annotated[
    float | None,
    option(
        "SHARE",
        "Answer 'not in the text' where the answer is grounded less than this, such as 0.5.",
        parser=a_share,
        panel=EVERYDAY,
    ),
]

Selector = Annotated[
    str,
    option(
        "NAME",
        "Method that chooses the stored tokens to attend to; auto is topk, or own where the model has it.",
        "-s",
        "--selector",
        panel=RETRIEVAL,
        autocompletion=selector_names,
    ),
]


def key_values(help: str, **more: Any) -> Any:
    """-o KEY=VALUE, which may be repeated."""
    return option("KEY=VALUE", f"{help}; repeatable.", "-o", "--option", **more)


_SELECTOR_OPTION = "Selector option, such as budget=2% or index=faiss-ivf"
Options = Annotated[
    list[str] | None, key_values(_SELECTOR_OPTION, panel=RETRIEVAL, autocompletion=selector_options)
]
Attend = Annotated[
    str,
    option(
        "WHERE",
        "Where to attend to stored tokens: host, device, pinned (the device reads host memory), or auto "
        "(the fastest of them, measured).",
        panel=RETRIEVAL,
    ),
]
DeviceCache = Annotated[
    str | None,
    option("SIZE", "GPU memory for a cache of recently used stored tokens, such as 2GiB.", panel=RETRIEVAL),
]

MODEL_FOLDER = f"{QUOTED} (shipped), a transformers id, a model's folder, or a .gguf file."
ModelToLoad = Annotated[str, option("M", MODEL_FOLDER)]
MODEL_CONFIG = f"{QUOTED} (shipped), a transformers id, a folder or a .gguf file; only its config is read."
Model = Annotated[
    str | None,
    option("M", "Model id, folder or .gguf file, if not the one that the store names.", panel=MODEL),
]
Adapter = Annotated[
    str,
    option(
        "FOLDER",
        "A LoRA on the model, in PEFT's layout, if not the one that the store names; see docs/models.md.",
        panel=MODEL,
    ),
]
Weights = Annotated[
    str, option("W", "Weights of the model: auto (as prefilled), full (unpacked), int8 or int4.", panel=MODEL)
]
StoredWeights = Annotated[
    str, option("W", "Weights of the model: auto (as in the store), or streamed to a GPU layer by layer.")
]
Rope = Annotated[
    str,
    option(
        "KIND:N",
        "Scale RoPE for texts N times as long as those of the training: yarn:4, linear:2, dynamic:2.",
    ),
]
Device = Annotated[str, option("D", "auto, cpu, cuda or cuda:N.", panel=MODEL)]
GpuMemory = Annotated[str | None, option("SIZE", "Limit on GPU memory, such as 16GiB.", panel=MODEL)]
Ram = Annotated[
    str | None, option("SIZE", "Limit on memory, such as 8GiB; mapped stores do not count.", panel=MODEL)
]
Temperature = Annotated[
    float, option("T", "Sampling temperature; 0 always takes the likeliest token.", min=0, panel=MODEL)
]
TopP = Annotated[
    float, option("P", "Sample from the likeliest tokens whose probabilities add up to this.", panel=MODEL)
]
Seed = Annotated[int, option("N", "Random seed for sampling.", min=0, max=2**63 - 1, panel=MODEL)]
WorkerCount = Annotated[
    int | None,
    option(
        "N",
        "Number of Ray workers.  [default: one for each GPU, or for each machine without GPUs]",
        min=1,
        panel=MODEL,
    ),
]


def workers_option(help: str) -> Any:
    """--workers: `help` says what is spread over the cluster."""
    return option(
        "W", f"ray (this machine, or the cluster of RAY_ADDRESS) or ray://HOST:PORT: {help}", panel=MODEL
    )


Json = Annotated[bool, option(None, "Print one JSON object on stdout.", "--json")]
Quiet = Annotated[bool, option(None, "Show no progress and no notes on stderr.", "-q", "--quiet")]

NoSync = Annotated[
    bool,
    option(
        None, "Do not wait until everything is on the disk; a power cut may then lose all of it.", "--no-sync"
    ),
]


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


@dataclass(frozen=True)
class Folders:
    """Which files are read in folders of documents."""

    glob: Annotated[
        list[str] | None,
        option(
            "PATTERN",
            "In folders, read only files that match, in the syntax of .gitignore: *.md, /docs/*.rst; "
            "repeatable.",
        ),
    ] = None
    exclude: Annotated[
        list[str] | None, option("PATTERN", "In folders, skip files that match; repeatable.")
    ] = None
    follow_links: Annotated[bool, option(None, "In folders, follow symbolic links.", "--follow-links")] = (
        False
    )

    def rules(self, corpora: Sequence[str], also_excluded: Iterable[str] = ()) -> Rules:
        """Raises `ConfigError` for an empty corpus, and for options where no corpus is a folder."""
        from offload_decode.prefill_jobs.folders import Rules

        if "" in corpora:
            raise ConfigError("an empty corpus names nothing: give a file, a folder, or - for standard input")
        excluded = (*(self.exclude or ()), *also_excluded)
        rules = Rules(tuple(self.glob or ()), excluded, self.follow_links)
        if rules != Rules() and not any(map(os.path.isdir, corpora)):
            raise ConfigError("--glob, --exclude and --follow-links apply to folders, and none is given")
        return rules
