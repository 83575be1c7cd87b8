"""What the commands that ask questions share: their options, and the run itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli import output
from cli.counts import token_count
from cli.eval.asked import checked_selector, index_of, read_contenders, read_haystack
from cli.progress import Progress
from offload_decode.config import split_pairs
from offload_decode.demo_models import QUOTED
from offload_decode.errors import ConfigError
from offload_decode.evals.contender import DENSE, Contender

if TYPE_CHECKING:
    from offload_decode.evals.answering import Answering
    from offload_decode.evals.haystack import Haystack
    from offload_decode.evals.results import Results
    from offload_decode.evals.runs import Stores as StoresOf
    from offload_decode.evals.tasks import Task
    from offload_decode.models.loading import LoadedModel
    from prefill_jobs.job import Settings

_REHEARSED = 64  # tokens

EvalModel = Annotated[
    str,
    typer.Option("--model", metavar="M", help=f"{QUOTED} (shipped), a transformers id, or a model's folder."),
]
Text = Annotated[
    str | None,
    typer.Option(
        "--text",
        metavar="FILE",
        help="The text around what is asked for: a file, a folder, or - for standard input.  "
        "[default: the Python documentation topics]",
        show_default=False,
    ),
]
Tasks = Annotated[
    str | None,
    typer.Option("--tasks", metavar="NAME,…", help="Tasks to ask.  [default: all]", show_default=False),
]
Lengths = Annotated[
    str, typer.Option("--lengths", metavar="N,…", help="Tokens of each text, in the model's own tokens.")
]
Selectors = Annotated[
    list[str] | None,
    typer.Option(
        "-s",
        "--selector",
        metavar="NAME[:KEY=VALUE,…]",
        help="A selector beside dense attention, with options of its own as in quest:page_size=32; "
        "repeatable.  [default: topk]",
        show_default=False,
    ),
]
Budgets = Annotated[
    str,
    typer.Option(
        "--budgets",
        metavar="K,…",
        help="Stored tokens that each selector may attend to: counts, or shares of the store like 2%.",
    ),
]
CommonOptions = Annotated[
    list[str] | None,
    typer.Option(
        "-o",
        "--option",
        metavar="KEY=VALUE",
        help="An option for all selectors, such as tail=clusters; repeatable.",
        show_default=False,
    ),
]
Limit = Annotated[
    int, typer.Option("--limit", metavar="N", help="Questions for each task, length and seed.", min=1)
]
Seeds = Annotated[
    str,
    typer.Option(
        "--seeds",
        metavar="N,…",
        help="Numbers, such as 0,1,2, that decide what is drawn: with each, --limit questions are asked for "
        "each task and length.",
    ),
]
PrefillMethod = Annotated[
    str,
    typer.Option(
        "--prefill",
        metavar="NAME[:KEY=VALUE,…]",
        help="How stores are prefilled: dense, or a sparse method as in quoka:budget=25%.",
    ),
]
Stores = Annotated[
    Path | None,
    typer.Option(
        "--stores",
        metavar="FOLDER",
        help="Keep the stores there, and use those that are there of the same text, model and prefill.  "
        "[default: each is removed when it was asked]",
        show_default=False,
    ),
]
Begin = Annotated[
    bool,
    typer.Option(
        "--begin/--no-begin",
        help="Let answers begin as the task has it ('The special magic number for … is'), or not.",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="FILE",
        help="Where results are written, line by line; the same command goes on with what is there.  "
        "[default: the command's name and .jsonl]",
        show_default=False,
    ),
]


@dataclass(frozen=True)
class Wanted:
    """What the options of a command say; each field is the option of its name."""

    suite: str
    tasks: str | None
    model: str
    text: str | None
    lengths: str
    contenders: tuple[Contender, ...]
    limit: int
    seeds: str
    prefill: str
    stores: Path | None
    begins: bool
    out: Path | None
    device: str
    as_json: bool
    quiet: bool


def contenders_of(
    selectors: Sequence[str] | None, budgets: str, option: list[str] | None
) -> tuple[Contender, ...]:
    """Every selector at every budget, with the options that all have in common; one that has a budget of its
    own keeps it. Raises `ConfigError` for what a selector would refuse.
    """
    common = split_pairs(option or [])
    if "budget" in common:
        raise ConfigError("a budget for all selectors is given with --budgets, not with -o")
    amounts = list(dict.fromkeys(amount.strip() for amount in budgets.split(",")))
    found: dict[str, Contender] = {}
    for named in read_contenders(selectors or ["topk"]):
        if named.selector == DENSE:
            continue
        own = "budget" in named.options
        for amount in [named.options["budget"]] if own else amounts:
            way = Contender(named.selector, {**common, **named.options, "budget": amount})
            checked_selector(way.selector, way.options)
            found[way.label] = way
    return tuple(found.values())


def tasks_named(names: str | None, known: Sequence[str]) -> list[str]:
    """The tasks of a list with commas; all that are known where there is none."""
    if names is None:
        return list(known)
    wanted = list(dict.fromkeys(name.strip() for name in names.split(",")))
    for name in wanted:
        if name not in known:
            raise ConfigError(f"there is no task '{name}' here; choose from: {', '.join(known)}")
    return wanted


def numbers(text: str) -> tuple[int, ...]:
    """Seeds, separated by commas."""
    from offload_decode.evals.records import MOST

    try:
        seeds = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError as error:
        raise ConfigError(
            f"'{text:.40}' are no seeds: write numbers separated by commas, like 0,1,2"
        ) from error
    if large := [seed for seed in seeds if abs(seed) > MOST]:
        raise ConfigError(f"the seed {large[0]} is too large: results hold numbers of up to {MOST}")
    return seeds


def ask_all(wanted: Wanted, tasks: Sequence[Task]) -> None:
    """Ask every question of the tasks, print the table, and say where the results are."""
    from offload_decode.evals.answering import Answering

    show(measured(wanted, tasks, Answering), wanted.as_json, wanted.quiet)


def measured(wanted: Wanted, tasks: Sequence[Task], evaluated: type[Answering]) -> Results:
    """The results of asking every question of the tasks."""
    from cli.compiling import tell_of_compiling
    from cli.eval.stores import PrefilledStores
    from offload_decode.evals.answering import AnswerPlan
    from offload_decode.evals.extra import STATISTICS, require
    from offload_decode.evals.runs import run
    from offload_decode.models.loading import load

    require(*STATISTICS)
    tell_of_compiling()
    lengths = tuple(dict.fromkeys(map(token_count, wanted.lengths.split(","))))
    settings = prefill_settings(wanted.prefill)
    haystack = read_haystack(wanted.text)
    out = wanted.out or Path(f"{wanted.suite}.jsonl")
    if wanted.stores is not None and wanted.stores.exists() and not wanted.stores.is_dir():
        raise ConfigError(
            f"--stores {wanted.stores} is no folder: name one, which is made where there is none"
        )
    plan = AnswerPlan(
        wanted.suite,
        lengths,
        wanted.contenders,
        wanted.limit,
        numbers(wanted.seeds),
        wanted.begins,
        {"method": settings.method, **settings.options},
    )
    loaded = load(wanted.model, wanted.device)
    kinds = [kind for way in wanted.contenders if (kind := index_of(way.options)) is not None]
    stores = PrefilledStores(loaded, haystack.name, settings, kinds, wanted.stores)
    rehearse(wanted.contenders, loaded, haystack, PrefilledStores(loaded, haystack.name, settings, kinds))
    evaluation = evaluated(plan, tasks, loaded, haystack, stores)
    with Progress(wanted.quiet) as progress:
        unfit = evaluation.unfit(lambda done, total: progress("draw texts", done, total))
        if unfit and (wanted.tasks is not None or len(unfit) == len(tasks)):
            raise next(iter(unfit.values()))
        for name, why in unfit.items():
            output.note(f"{name} is left out: {why}")
        if unfit:
            evaluation = evaluated(
                plan, [task for task in tasks if task.name not in unfit], loaded, haystack, stores
            )
        return run(evaluation, loaded, out, lambda done, total: progress("prefill", done, total))


def prefill_settings(text: str) -> Settings:
    """How stores are prefilled, as users write it: `quoka:budget=25%`."""
    from prefill_jobs.job import Settings

    (named,) = read_contenders([text])
    return Settings(named.selector, dict(named.options))


def rehearse(
    contenders: Sequence[Contender], loaded: LoadedModel, haystack: Haystack, stores: StoresOf
) -> None:
    """Open a store of a few words in every way, so that what cannot be done shows before anything long."""
    from offload_decode.engine.engine import Engine

    with stores(haystack.cut(loaded.tokenizer, _REHEARSED), lambda done: None) as store:
        for way in contenders:
            Engine.open(store, loaded, selector=way.selector, options=way.options)


def show(
    results: Results,
    as_json: bool,
    quiet: bool,
    told: Callable[[Results], str] | None = None,
) -> None:
    """What is `told` of a run, its table and what it comes to, or all of it as JSON; then where it is."""
    if as_json:
        output.answer_json({**asdict(results.header), "records": results.records})
    else:
        output.answer((told or _judged)(results))
    output.note(f"{results.path}: see it with `offload-decode eval report {results.path}`", quiet)


def _judged(results: Results) -> str:
    from offload_decode.evals.summary import summarize
    from offload_decode.evals.summary_table import rows
    from offload_decode.evals.verdict import verdict

    summary = summarize(results)
    return "\n".join([output.table(rows(summary)), *verdict(summary)])
