"""`ask` of a collection: an answer from each document that the question is put to."""

from __future__ import annotations

from dataclasses import asdict

import typer

from cli import output
from cli.ask import attended, describe
from cli.collected import Collected
from cli.failures import exit_code, sentence
from cli.limits import Asking, check_here, opener
from offload_decode.errors import ConfigError, OffloadDecodeError


def ask_collection(
    collected: Collected,
    question: str,
    how: Asking,
    max_new_tokens: int,
    sampling: tuple[float, float, int],
    as_json: bool,
    cites: bool,
    stats: bool,
) -> None:
    """Ask document after document, one open at a time; one that fails does not stop the others. `sampling`:
    of a `Sampler`.
    """
    from offload_decode.engine.sampler import Sampler

    check_here(how)
    open_engine = opener(how)
    answers: list[dict[str, object]] = []
    failures: list[OffloadDecodeError] = []
    failed: list[dict[str, str]] = []
    documents = collected.documents(question)
    if not documents:
        raise ConfigError("no document has a word of the question: put it otherwise, or give --all")
    for entry in documents:
        try:
            with collected.collection.held(entry) as store:
                engine = open_engine(str(store))
                given = engine.answer(question, max_new_tokens, Sampler(*sampling), cites)
        except OffloadDecodeError as error:
            failures.append(error)
            failed.append({"document": entry.name, "error": sentence(error)})
            output.note(f"error: {output.one_line(entry.name)}: {sentence(error)}")
            continue
        if as_json:
            cited = {} if given.citations is None else {"citations": list(map(asdict, given.citations))}
            answers.append(
                {
                    "document": entry.name,
                    "store": collected.collection.address(entry),
                    "answer": given.text,
                    "tokens": len(given.tokens),
                    "finish": given.finish,
                    **cited,
                    "stats": asdict(given.stats),
                }
            )
        else:
            output.answer(output.one_line(entry.name), end=": ")
            output.generated(given.text, end="\n")
        if given.citations is not None and not as_json:
            output.note(attended(given.citations))
        if stats:
            output.note(describe(given.stats, engine))
    if as_json:
        name = collected.collection.name
        output.answer_json({"question": question, "collection": name, "answers": answers, "failed": failed})
    if failures:
        raise typer.Exit(min(map(exit_code, failures)))
