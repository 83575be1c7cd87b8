"""`offload-decode batch`: many questions to many stores, resumable."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from offload_decode.cli import options, output
from offload_decode.cli.client import (
    Manner,
    Reached,
    Received,
    Server,
    asked,
    check_left_to_server,
    reaching,
)
from offload_decode.cli.collections import Choosing, Collected, choosing, collected_of
from offload_decode.cli.errors import FAILURE, exit_code, sentence
from offload_decode.cli.limits import Asking, asking, check_here, opener
from offload_decode.cli.options import (
    Cite,
    From,
    MaxNewTokens,
    Quiet,
    WorkerCount,
    Workers,
    a_path,
    check_worker_count,
    with_groups,
)
from offload_decode.cli.output import Progress
from offload_decode.cli.questions import (
    Question,
    among,
    append_answers,
    assign,
    check_out,
    read_answered,
    read_questions,
)
from offload_decode.common.errors import ConfigError, OffloadDecodeError

if TYPE_CHECKING:
    from offload_decode.types import CitedDocument


@with_groups
def batch(
    stores: Annotated[
        list[Path],
        typer.Argument(
            metavar="STORE",
            help="The stores to ask, or one collection, or its URL in a bucket.",
            show_default=False,
            parser=a_path,
            autocompletion=options.stores,
        ),
    ],
    questions: Annotated[
        Path,
        typer.Option(
            metavar="FILE.jsonl",
            help='Questions, a line each: {"question": "…", "id": 1, "store": "…"}.',
            parser=a_path,
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(metavar="FILE.jsonl", help="File that answers are appended to.", parser=a_path),
    ],
    how: Annotated[Asking, From(asking)],
    reached: Annotated[Reached | None, From(reaching)],
    choosing: Annotated[Choosing, From(choosing)],
    max_new_tokens: MaxNewTokens = 128,
    batch_size: Annotated[
        int,
        typer.Option(metavar="N", help="Questions in one forward pass, or on their way to a server.", min=1),
    ] = 8,
    cites: Cite = False,
    workers: Workers = None,
    worker_count: WorkerCount = None,
    quiet: Quiet = False,
) -> None:
    """Ask many questions of many stores.

    Every question is asked of every store, unless its line names one ("id" and "store" may be left out). An
    answer is a line with "id", "store", "question", "answer", "tokens" (how many), "finish", the settings,
    "citations" with --cite, and whatever else the question's line held.

    Of a collection, the question is put to the documents that --all, --top and --where choose, or to the one
    that its line names as "document"; the answer's line names its "document".

    With --workers ray, answers are written in the order in which they come, and a worker that is lost is
    replaced. Workers that the cluster has no room for begin when a machine joins it.

    Questions that the output answers already are not asked again: the same command resumes a batch that was
    interrupted.
    """
    check_worker_count(workers, worker_count)
    if reached is not None:
        check_left_to_server(how)
        if workers is not None:
            raise ConfigError("--workers and --server are two ways of answering: choose one")
    check_out(out)
    read = read_questions(questions)
    if out.exists() and out.samefile(questions):
        raise ConfigError(f"{out} holds the questions: choose another --out")
    with (
        Progress(quiet) as progress,
        collected_of(stores, reached, choosing, lambda: nullcontext(progress)) as collected,
    ):
        if collected is not None:
            asked = collected.assign(read)
        else:
            given = [os.path.normpath(store) for store in stores]
            asked = assign(read, given, among(given))
        writing = Writing(how, out, collected, max_new_tokens, batch_size, cites)
        answered = read_answered(out, writing.settings)
        left = {store: [q for q in own if q.key(store) not in answered] for store, own in asked.items()}
        unasked = {store: own for store, own in left.items() if own}
        if reached is None:
            check_here(how, workers is None)
        if workers is not None:
            failures = _answer_on_ray(workers, worker_count, unasked, writing, progress)
        elif reached is None:
            failures = _answer(unasked, writing, progress)
        else:
            failures = _ask_server(reached, unasked, writing, progress)
    done = sum(map(len, left.values())) - sum(failure.unanswered for failure in failures)
    kept = sum(map(len, asked.values())) - sum(map(len, left.values()))
    output.note(f"{out}: {output.count(done, 'answer')}{f', {kept:,} there already' if kept else ''}", quiet)
    for failure in failures:
        unanswered = f"unanswered: {output.count(failure.unanswered, 'question')} to {failure.store}"
        output.note(f"error: {sentence(failure.error)} ({unanswered})")
    unmatched = [] if collected is None else collected.unmatched
    for question in unmatched:
        output.note(
            f"error: line {question.line} of the questions has no word that a document has: put it "
            'otherwise, name its "document", or give --all'
        )
    if failures or unmatched:
        raise typer.Exit(min([exit_code(failure.error) for failure in failures], default=FAILURE))


@dataclass(frozen=True)
class Writing:
    """How questions are answered, and where answers are written. `collected`: the collection that the stores
    are of, if any.
    """

    how: Asking
    out: Path
    collected: Collected | None
    max_new_tokens: int
    batch_size: int
    cites: bool

    @property
    def settings(self) -> dict[str, object]:
        """What every line says of how it was answered."""
        config = self.how.config
        return {
            "selector": config.selector,
            "options": config.options,
            "max_new_tokens": self.max_new_tokens,
            "model": config.model,
            "weights": config.weights,
            **({"cite": True} if self.cites else {}),
        }

    def held(self, store: str) -> AbstractContextManager[str | Path]:
        """Where a store lies while it is asked."""
        return nullcontext(store) if self.collected is None else self.collected.held(store)

    def line(
        self,
        store: str,
        question: Question,
        text: str,
        tokens: int,
        finish: str,
        citations: Sequence[CitedDocument] | None,
    ) -> dict[str, object]:
        """An answer as it is written."""
        return {
            "id": question.id,
            "store": store,
            "question": question.text,
            "answer": text,
            "tokens": tokens,
            "finish": finish,
            **({} if citations is None else {"citations": list(map(asdict, citations))}),
            **self.settings,
            **question.extra,
            **({} if self.collected is None else {"document": self.collected.stores[store].name}),
        }


class Unanswered(NamedTuple):
    """A store that could not answer all of its questions."""

    store: str
    unanswered: int
    error: OffloadDecodeError


def _answer(left: dict[str, list[Question]], writing: Writing, progress: Progress) -> list[Unanswered]:
    """Answer store by store; a store that fails does not stop the others."""

    failures: list[Unanswered] = []
    open_engine, size = opener(writing.how), writing.batch_size
    done, total = 0, sum(map(len, left.values()))
    for store, own in left.items():
        answered = 0
        try:
            with writing.held(store) as path:
                engine = open_engine(str(path))
                progress("answer", done, total)
                for start in range(0, len(own), size):
                    part = own[start : start + size]
                    texts = [question.text for question in part]
                    answers = engine.answer_many(texts, writing.max_new_tokens, size, writing.cites)
                    append_answers(
                        writing.out,
                        [
                            writing.line(store, q, a.text, len(a.tokens), a.finish, a.citations)
                            for q, a in zip(part, answers, strict=True)
                        ],
                    )
                    answered += len(part)
                    progress("answer", done + answered, total)
        except OffloadDecodeError as error:
            failures.append(Unanswered(store, len(own) - answered, error))
        done += len(own)
    return failures


def _answer_on_ray(
    address: str,
    workers: int | None,
    left: dict[str, list[Question]],
    writing: Writing,
    progress: Progress,
) -> list[Unanswered]:
    """Have the machines of a cluster answer; answers are written as they come."""
    if not left:
        return []

    from offload_decode.cli.batch_on_ray import answer_there
    from offload_decode.prefill_jobs.on_ray.asking import Given
    from offload_decode.prefill_jobs.on_ray.workers import Cluster

    far = None if writing.collected is None else writing.collected.on_other_machines(left)

    def line(store: str, question: Question, given: Given) -> dict[str, object]:
        return writing.line(store, question, given.text, given.tokens, given.finish, given.citations)

    failures = answer_there(
        Cluster(address, workers, writing.how.caps),
        left,
        far,
        writing.how,
        writing.out,
        line,
        max_new_tokens=writing.max_new_tokens,
        batch_size=writing.batch_size,
        cites=writing.cites,
        progress=progress,
    )
    return [Unanswered(store, unanswered, error) for store, (unanswered, error) in failures.items()]


def _ask_server(
    reached: Reached, left: dict[str, list[Question]], writing: Writing, progress: Progress
) -> list[Unanswered]:
    """Have a server answer all questions, several at a time; answers are written as they come."""
    failures: dict[str, Unanswered] = {}
    done, total = 0, sum(map(len, left.values()))
    config = writing.how.config
    manner = Manner(config.selector, config.options, writing.max_new_tokens, cite=writing.cites)
    with Server(reached) as server:
        for store, question, given in answers(server, left, manner, writing.batch_size):
            if isinstance(given, OffloadDecodeError):
                first = failures.get(store, Unanswered(store, 0, given))
                failures[store] = first._replace(unanswered=first.unanswered + 1)
            else:
                cited = given.cited if manner.cite else None
                text = given.text.strip()
                line = writing.line(store, question, text, given.tokens, given.finish, cited)
                append_answers(writing.out, [line])
            done += 1
            progress("answer", done, total)
    return list(failures.values())


Answer = tuple[str, Question, Received | OffloadDecodeError]


def answers(
    server: Server, left: Mapping[str, Sequence[Question]], manner: Manner, at_once: int
) -> Iterator[Answer]:
    """The answers to the questions of each store, as they come, or the errors in their place; `at_once` of
    them are asked at the same time. After an error that is not of one question none is asked any more.
    """
    stopped = Event()
    names: dict[str, str] = {}
    for store in left:
        try:
            names[store] = server.served(store).name
        except ConfigError as error:
            yield from ((store, question, error) for question in left[store])

    def answer(store: str, question: Question) -> Answer:
        received = Received()
        try:
            for _ in server.stream(names[store], asked(question.text), manner, received, stopped):
                pass
        except ConfigError as error:
            return store, question, error
        except OffloadDecodeError as error:
            stopped.set()
            return store, question, error
        return store, question, received

    pool = ThreadPoolExecutor(at_once)
    try:
        running = [pool.submit(answer, store, question) for store in names for question in left[store]]
        for done in as_completed(running):
            yield done.result()
    finally:
        stopped.set()  # Ctrl-C: threads leave at the next piece
        pool.shutdown(cancel_futures=True)
