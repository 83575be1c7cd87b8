"""`offload-decode ask`: one question to a store, to documents of a collection, or to a server."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from offload_decode.cli import client, output
from offload_decode.cli import options as opts
from offload_decode.cli.client import AnswerOptions, ServerAddress
from offload_decode.cli.collections import AskedCollection, DocumentChoice, open_collection
from offload_decode.cli.errors import exit_code, sentence
from offload_decode.cli.limits import AskOptions, check_options, cluster_of, engine_opener, open_engine
from offload_decode.cli.options import From, option, question_from, with_groups, workers_option
from offload_decode.cli.output import Progress
from offload_decode.cli.together import Together, TogetherChoice, refuse_others
from offload_decode.common.errors import ConfigError, OffloadDecodeError

if TYPE_CHECKING:
    from offload_decode.collections.journal import Entry
    from offload_decode.config import EngineConfig
    from offload_decode.engine.conversation import Conversation
    from offload_decode.engine.engine import Engine
    from offload_decode.prefill_jobs.on_ray.workers import Cluster
    from offload_decode.store.format import Manifest
    from offload_decode.types import Answer, CitedDocument, StepStats

    DocumentAnswers = Iterator[tuple[Entry, Answer | OffloadDecodeError, str]]


@with_groups
def ask(
    stores: Annotated[
        list[Path],
        opts.store_argument(
            "A store made by `prefill` (with --together several), a collection made by `collect`, or a "
            "collection's URL in a bucket.",
            None,
        ),
    ],
    question: Annotated[str, opts.argument("QUESTION", "The question; - reads standard input.")],
    options: AskOptions,
    address: Annotated[ServerAddress | None, From(client.server_address)],
    choice: DocumentChoice,
    together: TogetherChoice,
    max_new_tokens: opts.MaxNewTokens = 128,
    temperature: opts.Temperature = 0.0,
    top_p: opts.TopP = 1.0,
    seed: opts.Seed = 0,
    as_json: opts.Json = False,
    cites: opts.Cite = False,
    check: opts.Check = False,
    only_grounded: opts.OnlyGrounded = None,
    workers: Annotated[
        str | None,
        workers_option(
            "split the tokens of one store over Ray workers, or spread the documents of a collection. The "
            "machines have the store or collection at the same path, or fetch what they need from the bucket."
        ),
    ] = None,
    worker_count: opts.WorkerCount = None,
    stats: Annotated[bool, option(None, "Show on stderr what the answer cost.", "--stats")] = False,
) -> None:
    """Answer one question from a store, or from documents of a collection.

    The answer is printed as it is generated. In a collection, --top, --all and --where choose the documents
    to ask, and each answer follows the name of its document. With --together they give one answer.

    With --workers ray, a store may be larger than the memory of one machine; every worker applies the budget
    to its own tokens. Answers from a collection are printed as they arrive.
    """
    server = address is not None
    refuse_others(together, server, workers is not None, only_grounded is not None, check)
    cluster = cluster_of(workers, worker_count, options.gpu_memory, options.ram, server=server)
    config = options.config
    how = temperature, top_p, seed, cites, check, only_grounded
    wanted = AnswerOptions(config.selector, config.options, max_new_tokens, *how)
    one = _Question(question_from(question), wanted, as_json, stats)
    with open_collection(stores, address, choice, Progress) as asked:
        together.check(stores, asked)
        if together.together is not None:
            check_options(options)
            _ask_together(Together(stores, asked, together, options, cites, only_grounded), one)
            return
        if asked is not None:
            _ask_collection(asked, one, options, cluster)
            return
    store = stores[0]
    if cluster is not None and (cites or check):
        other = "--cite" if cites else "--check"
        raise ConfigError(f"--workers and {other} do not go together for one store: leave one of them out")
    if address is not None:
        client.check_server_options(options)
        _ask_server(address, str(store), one)
        return
    engine = open_engine(store, options, only_grounded)
    if cluster is None:
        _ask_engine(engine, str(store), one)
    else:
        from offload_decode.prefill_jobs.on_ray.attending import scattered

        with scattered(engine, cluster, config) as on_workers:
            _ask_engine(on_workers, str(store), one)


def _ask_together(together: Together, question: _Question) -> None:
    wanted = question.wanted
    with together.opened(question.text) as talk:
        if question.as_json or wanted.cite:
            given = talk.answer(question.text, wanted.max_new_tokens, wanted.sampler)
            cost = given.stats
        else:
            pieces = talk.stream(question.text, wanted.max_new_tokens, wanted.sampler)
            show(held(pieces, lambda: talk.joint.grounded, wanted.least))
            cost = talk.joint.take_stats()
        if question.as_json:
            told = {"question": question.text} | answer_fields(given, wanted.least)
            told |= together.choice.settings
            output.answer_json(told | talk.fields() | {"stats": asdict(cost)})
        else:
            if wanted.cite:
                show([output.if_grounded(given.text, given.grounded, wanted.least)])
            tell_grounded(talk.joint.grounded)
            tell_cut(talk.joint.finish, wanted.max_new_tokens, talk.joint.most_new(1))
            tell_notes(talk.notes())
            if wanted.cite:
                output.note("\n".join(filter(None, (talk.carried(), cited_text(given.citations or ())))))
        if question.stats:
            output.note(describe(cost, talk.joint.talks[0], talk.joint.stored))


class _Question(NamedTuple):
    text: str
    wanted: AnswerOptions
    as_json: bool
    stats: bool


def _ask_engine(engine: Engine, store: str, question: _Question) -> None:
    from offload_decode.engine.second_pass import checked
    from offload_decode.hf import cuda_graphs

    wanted, manifest = question.wanted, engine.store.manifest
    if question.as_json:
        given = engine.answer(question.text, wanted.max_new_tokens, *wanted.how)
        cost, loaded, selector = given.stats, engine.loaded, engine.selector
        told = {"question": question.text, **answer_fields(given, wanted.least), "selector": selector.name}
        told |= {"options": asdict(selector.options), "search": selector.report()}
        told |= {"placement": engine.prefix.host.placement.report()}
        told |= {"graphs": cuda_graphs.report(loaded.model.base_model), "store": store}
        told |= {"model": loaded.model_id, "stored_tokens": engine.prefix.length}
        told |= {"prefill": manifest.prefill, "kv": manifest.kv, "weights": loaded.weights}
        told |= {"loading_s": loaded.loading} | ({"adapter": loaded.adapter} if loaded.adapter else {})
        output.answer_json(told | {"stats": asdict(cost)})
    else:
        engine.records = wanted.check
        with engine.watched() if wanted.cite else nullcontext() as watch:
            pieces = engine.stream(question.text, wanted.max_new_tokens, wanted.sampler)
            show(held(pieces, lambda: engine.grounded, wanted.least))
        tell_grounded(engine.grounded)
        tell_cut(engine.finish, wanted.max_new_tokens, engine.most_new(1))
        cost = engine.prefix.take_stats()
        if wanted.check:
            tell_checked(asdict(checked(engine, engine.record)))
        if watch is not None:
            output.note(cited_text(engine.cited(watch)))
    for difference in _differences(manifest, engine.loaded.weights):
        output.note(difference)
    if cost.tail_rows and not engine.selector.bound:
        output.note(
            "Sampling the unselected tokens leaves the denominator of the attention uncertain by "
            f"{cost.tail_error:.2%} (standard error, mean)."
        )
    if question.stats:
        output.note(describe(cost, engine))


def _ask_server(address: ServerAddress, store: str, question: _Question) -> None:
    began, answer, wanted = time.monotonic(), client.ServerAnswer(), question.wanted
    with client.Server(address) as server:
        served = server.served(store)
        pieces = server.stream(served.name, client.conversation(question.text), wanted, answer)
        if question.as_json:
            for _ in pieces:
                pass
            told = {"question": question.text, **answer.fields(wanted), "selector": wanted.selector}
            told |= {"options": wanted.options, "store": served.name, "model": served.model}
            told |= {"stored_tokens": served.tokens, "server": server.url, "prompt_tokens": answer.prompt}
            told |= {"cached_tokens": answer.cached} | ({"stats": answer.stats} if answer.stats else {})
            output.answer_json(told)
        else:
            show(held(pieces, lambda: answer.grounded, wanted.least))
            tell_grounded(answer.grounded)
            tell_checked(answer.checked)
            tell_cut(answer.finish, wanted.max_new_tokens)
            tell_notes(answer.notes(wanted))
    if wanted.cite and not question.as_json:
        output.note(cited_text(answer.cited))
    if question.stats:
        output.note(answer.describe(time.monotonic() - began))


def answer_fields(given: Answer, least: float | None = None) -> dict[str, object]:
    """An answer for JSON; what is grounded less than `least` is said not to be in the text."""
    cited: dict[str, object] = {}
    if given.citations is not None:
        cited["citations"] = list(map(asdict, given.citations))
    if given.checked is not None:
        cited["checked"] = asdict(given.checked)
    told = {"answer": output.if_grounded(given.text, given.grounded, least), "grounded": given.grounded}
    return told | {"tokens": len(given.tokens), "finish": given.finish, **cited}


def _differences(manifest: Manifest, asked: str) -> Iterator[str]:
    """How a store differs from one of exact attention, and of the weights that it is `asked` with."""
    if parts := manifest.approximations():
        yield f"The store's keys and values are approximate: {output.one_line(', '.join(parts))}."
    if (made := manifest.weights) != "auto":
        other = f", and it was asked with {'full' if asked == 'auto' else asked} weights"
        yield (
            f"The store was prefilled with {made} weights: its keys and values are those of the quantized "
            f"model{'' if asked == made else other}."
        )


def show(pieces: Iterable[str]) -> None:
    """Print an answer as it arrives, without the white space that models begin with."""
    begun = False
    for piece in pieces:
        shown = piece if begun else piece.lstrip()
        begun = begun or bool(shown)
        output.generated(shown)
    output.generated("", end="\n")


def held(pieces: Iterable[str], grounded: Callable[[], float | None], least: float | None) -> Iterable[str]:
    """The pieces of an answer; all at once, where it must be grounded by `least` to be shown."""
    if least is None:
        yield from pieces
    else:
        text = "".join(pieces)
        yield output.if_grounded(text, grounded(), least)


def tell_grounded(grounded: float | None) -> None:
    """Say on stderr how likely an answer stands in the text, where that is known."""
    if grounded is not None:
        output.note(f"grounded {grounded:.2f}")


def tell_checked(checked: Mapping[str, Any] | None) -> None:
    """Say on stderr how far a second pass agrees with an answer, where there was one."""
    if checked is not None:
        stay = f"{checked['same']} of {output.count(checked['tokens'], 'token')} stay the likeliest"
        differ = f"log-probabilities differ by {checked['difference']:.3f}"
        output.note(f"checked: {stay} with dense attention, and {differ}")


def tell_cut(finish: str, most: int, room: int = 1) -> None:
    """Say on stderr that an answer was cut by its length, or by the context, which has `room` for so many."""
    if finish == "length" and not room:
        output.note("The answer was cut where the model's context ends.")
    elif finish == "length":
        output.note(f"The answer was cut at {output.count(most, 'token')}: --max-new-tokens N allows more.")


def tell_notes(notes: Iterable[str]) -> None:
    """Say on stderr what is approximate in an answer of several stores, or what a server remarks."""
    for one in notes:
        output.note(output.one_line(one))


def cited_text(citations: Sequence[CitedDocument]) -> str:
    if not citations:
        return "attended to no passage in particular"
    lines = []
    for document in citations:
        lines.append(f"{document.share:4.0%}  {output.one_line(document.name)}")
        lines += [f"{span.share:10.0%}  {' '.join(span.text.split())}" for span in document.spans]
    return "\n".join(lines)


def describe(cost: StepStats, engine: Conversation, stored: float | None = None) -> str:
    """What an answer cost. `stored`: tokens before each conversation, where several answered together."""
    stored = engine.prefix.length if stored is None else stored
    attended = cost.selected / max(1, cost.rows)
    other = cost.total_s - cost.search_s - cost.gather_s - cost.attend_s
    attentions = sum(cost.attended.values())
    where = ", ".join(f"{times / attentions:.0%} on the {place}" for place, times in cost.attended.items())
    looked_up = cost.cache_hits + cost.cache_misses
    cached = f"; {cost.cache_hits / looked_up:.1%} of the rows were in the device cache" if looked_up else ""
    bus = f", {output.size(cost.bus_bytes)} over the bus" if cost.bus_bytes else ""
    spent = f"search {cost.search_s:.2f}, gather {cost.gather_s:.2f}, attend {cost.attend_s:.2f}"
    told = {
        "tokens": f"{cost.tokens:,} run (question and answer)",
        "attended": f"{attended:,.1f} of {stored:,.0f} stored tokens in each step and head "
        f"({attended / max(1, stored):.2%})",
        "speed": f"{1000 * cost.total_s / max(1, cost.tokens):,.1f} ms for each token run",
        "moved": f"{output.size(cost.bytes_moved)} of stored keys and values{bus}",
        **engine.selector.report(),
        **_stated_error(cost, engine),
        "attention": f"{where}{cached}",
        "time": f"{cost.total_s:.2f} s: {spent}, the rest of the model {other:.2f}",
        "loading": f"{engine.loaded.loading:.2f} s before, for the model",
    }
    return "\n".join(f"{name:9} {value}" for name, value in told.items())


def _stated_error(cost: StepStats, engine: Conversation) -> dict[str, str]:
    bound = engine.selector.bound
    if bound is None or not cost.tail_rows:
        return {}
    whole = cost.whole_rows / cost.tail_rows
    return {
        "error": f"{cost.tail_error:.2%} of a head's output is stated in the mean, and kept to in "
        f"{bound.share:.4g} of the cases; {whole:.1%} of the queries attended to everything"
    }


def _ask_collection(
    asked: AskedCollection, question: _Question, options: AskOptions, cluster: Cluster | None
) -> None:
    """Ask each document, on a `cluster` in any order; one that fails does not stop the others."""
    if cluster is not None and (question.wanted.temperature > 0 or question.stats):
        other = "--stats" if question.stats else "--temperature"
        raise ConfigError(f"--workers and {other} do not go together for a collection: leave one of them out")
    check_options(options, cluster is None)
    documents = asked.documents(question.text)
    if not documents:
        raise ConfigError("no document contains a word of the question: rephrase it, or give --all")
    if cluster is None:
        results = _answers_here(asked, documents, question, options)
    else:
        results = _answers_of_cluster(asked, documents, question, cluster, options.config)
    answers: dict[str, dict[str, object]] = {}
    failed: dict[str, OffloadDecodeError] = {}
    for entry, result, described in results:
        if isinstance(result, OffloadDecodeError):
            failed[entry.name] = result
            output.note(f"error: {output.one_line(entry.name)}: {sentence(result)}")
            continue
        if question.as_json:
            place = {"document": entry.name, "store": asked.collection.address(entry)}
            told = answer_fields(result, question.wanted.least)
            answers[entry.name] = {**place, **told, "stats": asdict(result.stats)}
        else:
            output.answer(output.one_line(entry.name), end=": ")
            text = output.if_grounded(result.text, result.grounded, question.wanted.least)
            output.generated(text, end="\n")
            tell_grounded(result.grounded)
            tell_checked(None if result.checked is None else asdict(result.checked))
            if result.citations is not None:
                output.note(cited_text(result.citations))
        if question.stats:
            output.note(described)
    if question.as_json:
        names = [entry.name for entry in documents]
        in_order = [answers[name] for name in names if name in answers]
        errors = [{"document": name, "error": sentence(failed[name])} for name in names if name in failed]
        told = {"question": question.text, "collection": asked.collection.name}
        output.answer_json(told | {"answers": in_order, "failed": errors})
    if failed:
        raise typer.Exit(min(map(exit_code, failed.values())))


def _answers_here(
    asked: AskedCollection, documents: Sequence[Entry], question: _Question, options: AskOptions
) -> DocumentAnswers:
    wanted = question.wanted
    open_engine = engine_opener(options, least=wanted.least)
    for entry in documents:
        try:
            with asked.collection.held(entry) as store:
                engine = open_engine(str(store))
                one = engine.answer(question.text, wanted.max_new_tokens, *wanted.how)
        except OffloadDecodeError as error:
            yield entry, error, ""
        else:
            yield entry, one, describe(one.stats, engine)


def _answers_of_cluster(
    asked: AskedCollection,
    documents: Sequence[Entry],
    question: _Question,
    cluster: Cluster,
    config: EngineConfig,
) -> DocumentAnswers:
    from offload_decode.prefill_jobs.on_ray.asking import QuestionBatch, answer_on_ray

    stores = [asked.collection.address(entry) for entry in documents]
    remote = asked.on_other_machines(stores)
    parts = [QuestionBatch(store, (question.text,)) for store in stores]
    wanted = question.wanted
    how = wanted.max_new_tokens, wanted.cite, wanted.check, remote
    for number, result in answer_on_ray(parts, cluster, config, *how, least=wanted.least):
        yield documents[number], result if isinstance(result, OffloadDecodeError) else result[0], ""
