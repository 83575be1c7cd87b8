"""`ask` of a collection: an answer from each document that the question is put to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, NamedTuple

import typer

from offload_decode.cli import output
from offload_decode.cli.ask import attended, describe
from offload_decode.cli.collected import Collected
from offload_decode.cli.failures import exit_code, sentence
from offload_decode.cli.limits import Asking, check_here, opener
from offload_decode.errors import ConfigError, OffloadDecodeError

if TYPE_CHECKING:
    from offload_decode.collections.journal import Entry
    from offload_decode.prefill_jobs.on_ray.cluster import Cluster
    from offload_decode.types import CitedDocument, StepStats


class Told(NamedTuple):
    """An answer, and what it cost: `described` is that in words."""

    text: str
    tokens: int
    finish: str
    citations: Sequence[CitedDocument] | None
    stats: StepStats
    described: str = ""


def ask_collection(
    collected: Collected,
    question: str,
    how: Asking,
    cluster: Cluster | None,
    max_new_tokens: int,
    sampling: tuple[float, float, int],
    as_json: bool,
    cites: bool,
    stats: bool,
) -> None:
    """Ask document after document, one open at a time, or on the machines of a `cluster`, which answer in any
    order; one that fails does not stop the others. `sampling`: of a `Sampler`.
    """
    if cluster is not None and (sampling[0] > 0 or stats):
        other = "--stats" if stats else "--temperature"
        raise ConfigError(f"--workers and {other} do not go together for a collection: leave one of them out")
    check_here(how, cluster is None)
    documents = collected.documents(question)
    if not documents:
        raise ConfigError("no document has a word of the question: put it otherwise, or give --all")
    if cluster is None:
        results = _here(collected, documents, question, how, max_new_tokens, sampling, cites)
    else:
        results = _there(collected, documents, question, how, cluster, max_new_tokens, cites)
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
                "answer": told.text,
                "tokens": told.tokens,
                "finish": told.finish,
                **({} if told.citations is None else {"citations": list(map(asdict, told.citations))}),
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
    collected: Collected,
    documents: Sequence[Entry],
    question: str,
    how: Asking,
    max_new_tokens: int,
    sampling: tuple[float, float, int],
    cites: bool,
) -> Iterator[tuple[Entry, Told | OffloadDecodeError]]:
    from offload_decode.engine.sampler import Sampler

    open_engine = opener(how)
    for entry in documents:
        try:
            with collected.collection.held(entry) as store:
                engine = open_engine(str(store))
                given = engine.answer(question, max_new_tokens, Sampler(*sampling), cites)
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
    max_new_tokens: int,
    cites: bool,
) -> Iterator[tuple[Entry, Told | OffloadDecodeError]]:
    from offload_decode.prefill_jobs.on_ray.asking import Part, answer_on_ray

    stores = [collected.collection.address(entry) for entry in documents]
    far = collected.on_other_machines(stores)
    parts = [Part(store, (question,)) for store in stores]
    for number, result in answer_on_ray(parts, cluster, how.config, max_new_tokens, cites, far):
        if isinstance(result, OffloadDecodeError):
            yield documents[number], result
        else:
            (one,) = result
            yield documents[number], Told(one.text, one.tokens, one.finish, one.citations, one.stats)
