"""What the commands that ask questions share: their options, and the run itself."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

from offload_decode.cli import options as opts
from offload_decode.cli import output
from offload_decode.cli.options import Device, From, Json, Quiet, key_values, option, token_count
from offload_decode.cli.output import Progress
from offload_decode.common.errors import ConfigError
from offload_decode.config import parse_options, split_pairs
from offload_decode.evals.contender import DENSE, Contender

if TYPE_CHECKING:
    from offload_decode.evals.answering import Answering
    from offload_decode.evals.haystack import Haystack
    from offload_decode.evals.runs import Evaluation, Results
    from offload_decode.evals.tasks.base import Task
    from offload_decode.models.loading import LoadedModel
    from offload_decode.prefill_jobs.job import Settings
    from offload_decode.selectors.base import SelectorOptions
    from offload_decode.store.reader import KVStore

_REHEARSED = 64  # tokens


def text_option(what: str) -> Any:
    """--text: `what` says which text."""
    source = "a file, a folder, or - for standard input.  [default: the Python documentation topics]"
    return option("FILE", f"{what}: {source}")


Text = Annotated[str | None, text_option("The text around what is asked for")]
Tasks = Annotated[str | None, option("NAME,…", "Tasks to ask.  [default: all]")]
Lengths = Annotated[str, option("N,…", "Tokens of each text, in the model's own tokens.")]
Limit = Annotated[int, option("N", "Questions for each task, length and seed.", min=1)]
Adapter = Annotated[str, option("FOLDER", "A LoRA on the model, in PEFT's layout; see docs/models.md.")]
PrefillMethod = Annotated[
    str,
    option(
        "NAME[:KEY=VALUE,…]", "How stores are prefilled: dense, or a sparse method as in quoka:budget=25%."
    ),
]
Out = Annotated[
    Path | None,
    option(
        "FILE",
        "Where results are written, line by line; the same command goes on with what is there.  "
        "[default: the command's name and .jsonl]",
    ),
]


@dataclass(frozen=True)
class Asking:
    """The options of all commands that ask questions."""

    model: opts.ModelToLoad = "demo"
    seeds: Annotated[
        str,
        option(
            "N,…",
            "Numbers, such as 0,1,2, that decide what is drawn: with each, --limit questions are asked for "
            "each task and length.",
        ),
    ] = "0"
    prefill: PrefillMethod = "dense"
    rope: opts.Rope = ""
    adapter: Adapter = ""
    stores: Annotated[
        Path | None,
        option(
            "FOLDER",
            "Keep the stores there, and use those that are there of the same text, model and prefill.  "
            "[default: each is removed when it was asked]",
        ),
    ] = None
    begin: Annotated[
        bool,
        option(None, "Let answers begin as the task has it ('The special magic number for … is'), or not."),
    ] = True
    control: Annotated[
        bool,
        option(None, "Ask every fourth text without what is asked for too, as a control, or not."),
    ] = True
    out: Out = None
    device: Device = "auto"
    as_json: Json = False
    quiet: Quiet = False


def selectors_option(default: str) -> Any:
    """-s: which selectors are asked where none is named."""
    what = "A selector beside dense attention, with options of its own as in quest:page_size=32; repeatable."
    return option("NAME[:KEY=VALUE,…]", f"{what}  [default: {default}]", "-s", "--selector")


Selectors = Annotated[list[str] | None, selectors_option("topk")]
Budgets = Annotated[
    str,
    option("K,…", "Stored tokens that each selector may attend to: counts, or shares of the store like 2%."),
]
CommonOptions = Annotated[list[str] | None, key_values("An option for all selectors, such as tail=off")]


def contenders(
    selector: Selectors = None, budgets: Budgets = "64,256,1024", option: CommonOptions = None
) -> tuple[Contender, ...]:
    """Every selector at every budget, beside dense attention, with the options that all have in common; one
    that has a budget of its own, or an error to keep to, is taken once. Raises `ConfigError` for what a
    selector would refuse.
    """
    common = split_pairs(option or [])
    if "budget" in common:
        raise ConfigError("a budget for all selectors is given with --budgets, not with -o")
    amounts = list(dict.fromkeys(amount.strip() for amount in budgets.split(",")))
    found: dict[str, Contender] = {}
    for named in read_contenders(selector or ["topk"]):
        if named.selector == DENSE:
            continue
        own = {**common, **named.options}
        given = [own] if own.keys() & {"budget", "error"} else [{**own, "budget": one} for one in amounts]
        for options in given:
            way = Contender(named.selector, options)
            checked_selector(way.selector, way.options)
            found[way.label] = way
    return tuple(found.values())


Contenders = Annotated[tuple[Contender, ...], From(contenders)]


def tasks_named(names: str | None, known: Sequence[str]) -> list[str]:
    if names is None:
        return list(known)
    wanted = list(dict.fromkeys(name.strip() for name in names.split(",")))
    for name in wanted:
        if name not in known:
            raise ConfigError(f"there is no task '{name}' here; choose from: {', '.join(known)}")
    return wanted


def numbers(text: str) -> tuple[int, ...]:
    from offload_decode.evals.runs import MOST

    try:
        seeds = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError as error:
        raise ConfigError(
            f"'{text:.40}' are no seeds: write numbers separated by commas, like 0,1,2"
        ) from error
    if large := [seed for seed in seeds if abs(seed) > MOST]:
        raise ConfigError(f"the seed {large[0]} is too large: results hold numbers of up to {MOST}")
    return seeds


def token_counts(text: str) -> tuple[int, ...]:
    """Counts of tokens, separated by commas, each once."""
    return tuple(dict.fromkeys(map(token_count, text.split(","))))


def ask_all(
    suite: str,
    tasks: str | None,
    how: Asking,
    lengths: str,
    contenders: Sequence[Contender],
    limit: int,
    text: str | None = None,
    *,
    known: Sequence[str] | None = None,
    own: Mapping[str, Task] | None = None,
    evaluated: type[Answering] | None = None,
    told: Callable[[Results], str] | None = None,
) -> None:
    """Ask every question of the `tasks`, print the table, and say where the results are.

    `known`: the tasks that may be named, if not all; `own`: some that take the place of those of their names.
    A task that cannot be asked is left out, unless it was named.
    """
    from offload_decode.cli.compiling import announce_compiling
    from offload_decode.evals import tasks as every
    from offload_decode.evals.answering import CONTROL_EVERY, Answering, AnswerPlan
    from offload_decode.evals.extra import STATISTICS, require
    from offload_decode.evals.runs import run
    from offload_decode.models.loading import load

    names = tasks_named(tasks, known or every.names())
    chosen = [(own or {}).get(name) or every.get(name) for name in names]
    require(*STATISTICS)
    announce_compiling()
    counts = token_counts(lengths)
    settings = prefill_settings(how.prefill)
    haystack = read_haystack(text)
    if how.stores is not None and how.stores.exists() and not how.stores.is_dir():
        raise ConfigError(f"--stores {how.stores} is no folder: name one, which is made where there is none")
    out = results_file(how.out, suite)
    kinds = index_kinds(contenders)
    stored = how_stored(settings, kinds)
    controls, seeds = CONTROL_EVERY if how.control else 0, numbers(how.seeds)
    plan = AnswerPlan(suite, counts, tuple(contenders), limit, seeds, how.begin, stored, controls)
    loaded = load(how.model, how.device, rope=how.rope, adapter=how.adapter)
    stores = PrefilledStores(loaded, haystack.name, settings, kinds, how.stores)
    rehearse(contenders, loaded, haystack, settings)
    evaluated = evaluated or Answering
    evaluation = evaluated(plan, chosen, loaded, haystack, stores)
    with Progress(how.quiet) as progress:
        unfit = evaluation.unfit(lambda done, total: progress("draw texts", done, total))
        if unfit and (tasks is not None or len(unfit) == len(chosen)):
            raise next(iter(unfit.values()))
        for name, why in unfit.items():
            output.note(f"{name} is left out: {why}")
        if unfit:
            fit = [task for task in chosen if task.name not in unfit]
            evaluation = evaluated(plan, fit, loaded, haystack, stores)
        announce(evaluation, "text", how.quiet)
        results = run(evaluation, loaded, out, lambda done, total: progress("eval", done, total))
    show(results, how.as_json, how.quiet, told)


def announce(evaluation: Evaluation, noun: str, quiet: bool) -> None:
    """Say how much is measured, before anything long; `noun`: what a unit is."""
    units = evaluation.units()
    tokens = sum(unit.tokens for unit in units)
    output.note(f"measuring {output.count(len(units), noun)}: a prefill of {tokens:,} tokens in all", quiet)


def results_file(out: Path | None, command: str) -> Path:
    """Where results are written. Raises `ConfigError` before anything long where that is a folder."""
    file = out or Path(f"{command}.jsonl")
    if file.is_dir():
        raise ConfigError(f"{file} is a folder: give --out a file, such as {file / command}.jsonl")
    return file


def prefill_settings(text: str) -> Settings:
    """How stores are prefilled, as users write it: `quoka:budget=25%`."""
    from offload_decode.prefill_jobs.job import Settings

    (named,) = read_contenders([text])
    return Settings(named.selector, dict(named.options))


def how_stored(settings: Settings, kinds: Sequence[str]) -> dict[str, Any]:
    """What results say of their stores: how these were prefilled, and the indexes beside them."""
    return {"method": settings.method, **settings.options, "indexes": [*kinds]}


def rehearse(
    contenders: Sequence[Contender], loaded: LoadedModel, haystack: Haystack, settings: Settings
) -> None:
    """Open a store of a few words in every way, so that what cannot be done shows before anything long."""
    from offload_decode.engine.engine import Engine

    stores = PrefilledStores(loaded, haystack.name, settings, index_kinds(contenders))
    with stores(haystack.cut(loaded.tokenizer, _REHEARSED), lambda done: None) as store:
        for way in contenders:
            Engine.open(store, loaded, selector=way.selector, options=way.options)


def show(results: Results, as_json: bool, quiet: bool, told: Callable[[Results], str] | None = None) -> None:
    """What is `told` of a run, or its table, or all of it as JSON; then where it is."""
    from offload_decode.evals.summary import rows, summarize

    if as_json:
        output.answer_json({**asdict(results.header), "records": results.records})
    else:
        output.answer(output.table(rows(summarize(results))) if told is None else told(results))
    output.note(f"{results.path}: see it with `offload-decode eval report {results.path}`", quiet)


def read_haystack(text: str | None) -> Haystack:
    """The text to hide facts in; None: the Python documentation topics."""
    from offload_decode.evals.haystack import Haystack, python_topics
    from offload_decode.prefill_jobs.corpus import read_corpus

    if text is None:
        return python_topics()
    documents, _ = read_corpus(text)
    return Haystack(Path(text).name, "\n\n".join(document.text for document in documents))


def checked_selector(selector: str, options: Mapping[str, str]) -> SelectorOptions:
    """The parsed options: what the selector would refuse after the first prefill is refused before it."""
    from offload_decode.indexes import registry
    from offload_decode.kv.indexes import AUTO
    from offload_decode.selectors.registry import get

    if (kind := options.get("index", AUTO)) != AUTO:
        registry.get(kind)
    return parse_options(get(selector).options_type, options, f"selector '{selector}'")


def read_contenders(given: Sequence[str]) -> list[Contender]:
    """Selectors as users write them, `quest:page_size=32,metadata=int8`, each once."""
    contenders = []
    for text in given:
        name, _, options = text.partition(":")
        # A value may be a list itself: a comma parts two options only where a name follows it.
        pairs = re.split(r",(?=\w+=)", options) if options else []
        contenders.append(Contender(name, split_pairs(pairs)))
    label, times = Counter(one.label for one in contenders).most_common(1)[0]
    if times > 1:
        raise ConfigError(f"selector '{label}' is given twice")
    return contenders


def index_kinds(contenders: Iterable[Contender]) -> list[str]:
    """The indexes that are built for them, as users would: the default kind where none is named."""
    from offload_decode.selectors.registry import index_kind

    kinds = (index_kind(way.selector, way.options) for way in contenders)
    return sorted({kind for kind in kinds if kind is not None})


@dataclass(frozen=True)
class PrefilledStores:
    """Called with a text, gives its store (`evals.runs.Stores`), with the indexes of `kinds`.

    In `keep`, where a folder is given, stores stay and are found again by the text, the model and how it was
    prefilled; a prefill that was interrupted goes on, and one that another process is at is waited for.
    Otherwise they are gone when they were asked.
    """

    loaded: LoadedModel
    name: str
    settings: Settings
    kinds: Iterable[str] = ()
    keep: Path | None = None

    @contextmanager
    def __call__(self, text: str, report: Callable[[int], None]) -> Iterator[KVStore]:
        """The store of a text; `report` is told the tokens that are prefilled."""
        from offload_decode.prefill_jobs.corpus import TextDocument
        from offload_decode.prefill_jobs.job import prefill_texts
        from offload_decode.prefill_jobs.many import cached_store_name, kept

        def progress(stage: str, done: int, total: int) -> None:
            if stage == "prefill":
                report(done)

        if self.keep is not None:
            self.keep.mkdir(parents=True, exist_ok=True)
        keep = None if self.keep is None else nullcontext(str(self.keep))
        with keep or TemporaryDirectory(prefix="offload-decode-eval-") as folder:
            path = Path(folder, cached_store_name(self.loaded, self.settings, text, self.name))
            given = self.loaded, [TextDocument(self.name, text)], path, self.settings
            yield kept(path, lambda: prefill_texts(*given, progress=progress), sorted(set(self.kinds)))
