"""`offload-decode ask`: one question, one answer."""

from __future__ import annotations

import time
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from offload_decode.cli import output
from offload_decode.cli.client import (
    Manner,
    Reached,
    Received,
    Server,
    asked,
    check_left_to_server,
    reaching,
    report,
)
from offload_decode.cli.collections import Choosing, Collected, choosing, collected_of
from offload_decode.cli.errors import exit_code, sentence
from offload_decode.cli.limits import Asking, asking, check_here, open_engine, opener
from offload_decode.cli.options import (
    Asked,
    Cite,
    From,
    Json,
    MaxNewTokens,
    Seed,
    Temperature,
    TopP,
    WorkerCount,
    check_worker_count,
    question_from,
    with_groups,
)
from offload_decode.cli.output import Progress
from offload_decode.common.errors import ConfigError, OffloadDecodeError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from offload_decode.collections.journal import Entry
    from offload_decode.engine.engine import Engine
    from offload_decode.prefill_jobs.on_ray.workers import Cluster
    from offload_decode.store.format import Manifest
    from offload_decode.types import CitedDocument, StepStats


@with_groups
def ask(
    store: Asked,
    question: Annotated[
        str, typer.Argument(metavar="QUESTION", help="The question; - reads standard input.")
    ],
    how: Annotated[Asking, From(asking)],
    reached: Annotated[Reached | None, From(reaching)],
    choosing: Annotated[Choosing, From(choosing)],
    max_new_tokens: MaxNewTokens = 128,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    as_json: Json = False,
    cites: Cite = False,
    workers: Annotated[
        str | None,
        typer.Option(
            metavar="W",
            help="ray (this machine, or the cluster of RAY_ADDRESS) or ray://HOST:PORT: deal the tokens of "
            "one store out to Ray workers, each of which attends to its own, or the documents of a "
            "collection, which are asked there. Their machines have the store, or the collection, at its "
            "path; of one in a bucket they fetch what they ask.",
            show_default=False,
        ),
    ] = None,
    worker_count: WorkerCount = None,
    stats: Annotated[bool, typer.Option("--stats", help="Show on stderr what the answer cost.")] = False,
) -> None:
    """Answer one question from a store, or from documents of a collection.

    The answer is printed as it is written. From a collection, the documents that --top, --all and --where
    choose are asked, and each answer follows the name of its document.

    With --workers ray, a store may be larger than the memory of one machine, and every worker keeps to
    the budget for its own tokens. Of a collection, answers are printed as they come.
    """
    check_worker_count(workers, worker_count)
    if workers is not None and reached is not None:
        raise ConfigError("--workers and --server do not go together: leave one of them out")
    cluster = _cluster(workers, worker_count, how)
    text = question_from(question)
    manner = Manner(how.config.selector, how.config.options, max_new_tokens, temperature, top_p, seed, cites)
    with collected_of([store], reached, choosing, Progress) as collected:
        if collected is not None:
            _ask_collection(collected, text, how, cluster, manner, as_json, stats)
            return
    if cluster is not None and cites:
        raise ConfigError("--workers and --cite do not go together for one store: leave one of them out")
    if reached is not None:
        check_left_to_server(how)
        _ask_server(reached, str(store), text, manner, as_json, stats)
        return
    with _opened(store, how, cluster) as engine:
        _answer(engine, store, text, manner, as_json, stats)


def _cluster(workers: str | None, count: int | None, how: Asking) -> Cluster | None:
    if workers is None:
        return None

    from offload_decode.prefill_jobs.on_ray.workers import Cluster

    return Cluster(workers, count, how.caps)


@contextmanager
def _opened(store: Path, how: Asking, cluster: Cluster | None) -> Iterator[Engine]:
    if cluster is None:
        yield open_engine(store, how)
        return

    from offload_decode.prefill_jobs.on_ray.attending import scattered

    with scattered(open_engine(store, how), cluster, how.config) as engine:
        yield engine


def _answer(engine: Engine, store: Path, question: str, manner: Manner, as_json: bool, stats: bool) -> None:
    from offload_decode.engine.citations import cite
    from offload_decode.engine.sampler import Sampler
    from offload_decode.hf import cuda_graphs

    sampler = Sampler(manner.temperature, manner.top_p, manner.seed)
    if as_json:
        given = engine.answer(question, manner.max_new_tokens, sampler, manner.cite)
        cost = given.stats
        output.answer_json(
            {
                "question": question,
                **_told(given.text, len(given.tokens), given.finish, given.citations),
                "selector": engine.selector.name,
                "options": asdict(engine.selector.options),
                "search": engine.selector.report(),
                "placement": engine.prefix.host.placement.report(),
                "graphs": cuda_graphs.report(engine.loaded.model.base_model),
                "store": str(store),
                "model": engine.loaded.model_id,
                "stored_tokens": engine.prefix.length,
                "prefill": engine.store.manifest.prefill,
                "kv": engine.store.manifest.kv,
                "weights": engine.loaded.weights,
                "stats": asdict(cost),
            }
        )
    else:
        with engine.watched() if manner.cite else nullcontext() as watch:
            show(engine.stream(question, manner.max_new_tokens, sampler))
        cost = engine.prefix.take_stats()
        if watch is not None:
            output.note(attended(cite(watch, engine.store, engine.tokenizer)))
    if inexact := approximations(engine.store.manifest):
        output.note(f"The store's keys and values are approximate: {output.one_line(inexact)}.")
    if quantised := other_weights(engine.store.manifest, engine.loaded.weights):
        output.note(quantised)
    if cost.tail_rows:
        output.note(
            f"The sampled tail leaves the denominator of the attention uncertain by {cost.tail_error:.2%} "
            "(standard error, mean)."
        )
    if stats:
        output.note(describe(cost, engine))


def _ask_server(
    reached: Reached, store: str, question: str, manner: Manner, as_json: bool, stats: bool
) -> None:
    began, received = time.monotonic(), Received()
    with Server(reached) as server:
        served = server.served(store)
        pieces = server.stream(served.name, asked(question), manner, received)
        if as_json:
            for _ in pieces:
                pass
            output.answer_json(report(server, served, question, manner, received))
        else:
            show(pieces)
    if manner.cite and not as_json:
        output.note(attended(received.cited))
    if stats:
        output.note(received.describe(time.monotonic() - began))


def _told(
    text: str, tokens: int, finish: str, citations: Sequence[CitedDocument] | None
) -> dict[str, object]:
    """An answer for programs."""
    cited = {} if citations is None else {"citations": list(map(asdict, citations))}
    return {"answer": text, "tokens": tokens, "finish": finish, **cited}


def approximations(manifest: Manifest) -> str:
    """What keeps a store's keys and values from being those of exact attention; empty for nothing."""
    options = dict(manifest.prefill)
    method = options.pop("method")
    options.pop("weights", None)  # `other_weights` tells of them
    given = ", ".join(f"{name}={value}" for name, value in options.items())
    parts = [f"prefilled with {method} ({given})"] if method != "dense" else []
    parts += [f"{kind} are {form}" for kind, form in manifest.kv.items() if manifest.encoding(kind)]
    return ", ".join(parts)


def other_weights(manifest: Manifest, asked: str) -> str:
    """A sentence where the store was prefilled with quantised weights; empty for the model's own."""
    if manifest.weights == "auto":
        return ""
    made = (
        f"The store was prefilled with {manifest.weights} weights: its keys and values are those of the "
        "quantised model"
    )
    if asked == manifest.weights:
        return f"{made}."
    return f"{made}, and it was asked with {'full' if asked == 'auto' else asked} weights."


def show(pieces: Iterable[str]) -> None:
    """Print an answer as it comes, without the white space that models begin with."""
    begun = False
    for piece in pieces:
        shown = piece if begun else piece.lstrip()
        begun = begun or bool(shown)
        output.generated(shown)
    output.generated("", end="\n")


def attended(citations: Sequence[CitedDocument]) -> str:
    """What an answer attended to, for people."""
    if not citations:
        return "attended to no passage in particular"
    lines = []
    for document in citations:
        lines.append(f"{document.share:4.0%}  {output.one_line(document.name)}")
        lines += [f"{span.share:10.0%}  {' '.join(span.text.split())}" for span in document.spans]
    return "\n".join(lines)


def describe(cost: StepStats, engine: Engine) -> str:
    """What an answer cost, for people."""
    stored = engine.prefix.length
    attended = cost.selected / max(1, cost.rows)
    other = cost.total_s - cost.search_s - cost.gather_s - cost.attend_s
    attentions = sum(cost.attended.values())
    where = ", ".join(f"{times / attentions:.0%} on the {place}" for place, times in cost.attended.items())
    kept = cost.cache_hits + cost.cache_misses
    found = f"; {cost.cache_hits / kept:.1%} of the rows were in the device cache" if kept else ""
    bus = f", {output.size(cost.bus_bytes)} over the bus" if cost.bus_bytes else ""
    return "\n".join(
        [
            f"tokens    {cost.tokens:,} run (question and answer)",
            f"attended  {attended:,.1f} of {stored:,} stored tokens in each step and head "
            f"({attended / stored:.2%})",
            f"speed     {1000 * cost.total_s / max(1, cost.tokens):,.1f} ms for each token run",
            f"moved     {output.size(cost.bytes_moved)} of stored keys and values{bus}",
            *(f"{name:9} {value}" for name, value in engine.selector.report().items()),
            f"attention {where}{found}",
            f"time      {cost.total_s:.2f} s: search {cost.search_s:.2f}, gather {cost.gather_s:.2f}, "
            f"attend {cost.attend_s:.2f}, the rest of the model {other:.2f}",
        ]
    )


class Told(NamedTuple):
    """The answer of a document in a collection, and what it cost: `described` is that in words."""

    text: str
    tokens: int
    finish: str
    citations: Sequence[CitedDocument] | None
    stats: StepStats
    described: str = ""


def _ask_collection(
    collected: Collected,
    question: str,
    how: Asking,
    cluster: Cluster | None,
    manner: Manner,
    as_json: bool,
    stats: bool,
) -> None:
    """Ask document after document, one open at a time, or on the machines of a `cluster`, which answer in any
    order; one that fails does not stop the others.
    """
    if cluster is not None and (manner.temperature > 0 or stats):
        other = "--stats" if stats else "--temperature"
        raise ConfigError(f"--workers and {other} do not go together for a collection: leave one of them out")
    check_here(how, cluster is None)
    documents = collected.documents(question)
    if not documents:
        raise ConfigError("no document has a word of the question: put it otherwise, or give --all")
    if cluster is None:
        results = _here(collected, documents, question, how, manner)
    else:
        results = _there(collected, documents, question, how, cluster, manner)
    answers: dict[str, dict[str, object]] = {}
    failed: dict[str, OffloadDecodeError] = {}
    for entry, told in results:
        if isinstance(told, OffloadDecodeError):
            failed[entry.name] = told
            output.note(f"error: {output.one_line(entry.name)}: {sentence(told)}")
            continue
        if as_json:
            answers[entry.name] = {
                "document": entry.name,
                "store": collected.collection.address(entry),
                **_told(told.text, told.tokens, told.finish, told.citations),
                "stats": asdict(told.stats),
            }
        else:
            output.answer(output.one_line(entry.name), end=": ")
            output.generated(told.text, end="\n")
        if told.citations is not None and not as_json:
            output.note(attended(told.citations))
        if stats:
            output.note(told.described)
    if as_json:
        names = [entry.name for entry in documents]
        output.answer_json(
            {
                "question": question,
                "collection": collected.collection.name,
                "answers": [answers[name] for name in names if name in answers],
                "failed": [
                    {"document": name, "error": sentence(failed[name])} for name in names if name in failed
                ],
            }
        )
    if failed:
        raise typer.Exit(min(map(exit_code, failed.values())))


def _here(
    collected: Collected, documents: Sequence[Entry], question: str, how: Asking, manner: Manner
) -> Iterator[tuple[Entry, Told | OffloadDecodeError]]:
    from offload_decode.engine.sampler import Sampler

    open_engine = opener(how)
    for entry in documents:
        try:
            with collected.collection.held(entry) as store:
                engine = open_engine(str(store))
                sampler = Sampler(manner.temperature, manner.top_p, manner.seed)
                given = engine.answer(question, manner.max_new_tokens, sampler, manner.cite)
        except OffloadDecodeError as error:
            yield entry, error
            continue
        described = describe(given.stats, engine)
        yield (
            entry,
            Told(given.text, len(given.tokens), given.finish, given.citations, given.stats, described),
        )


def _there(
    collected: Collected,
    documents: Sequence[Entry],
    question: str,
    how: Asking,
    cluster: Cluster,
    manner: Manner,
) -> Iterator[tuple[Entry, Told | OffloadDecodeError]]:
    from offload_decode.prefill_jobs.on_ray.asking import Part, answer_on_ray

    stores = [collected.collection.address(entry) for entry in documents]
    far = collected.on_other_machines(stores)
    parts = [Part(store, (question,)) for store in stores]
    for number, result in answer_on_ray(parts, cluster, how.config, manner.max_new_tokens, manner.cite, far):
        if isinstance(result, OffloadDecodeError):
            yield documents[number], result
        else:
            (one,) = result
            yield documents[number], Told(one.text, one.tokens, one.finish, one.citations, one.stats)
