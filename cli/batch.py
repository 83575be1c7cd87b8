"""`offload-decode batch`: many questions to many stores, resumable."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offload_decode.cli import client, output
from offload_decode.cli import options as opts
from offload_decode.cli.ask import answer_fields
from offload_decode.cli.client import AnswerOptions, Server, ServerAddress, ServerAnswer
from offload_decode.cli.collections import AskedCollection, DocumentChoice, open_collection
from offload_decode.cli.errors import FAILURE, exit_code, sentence
from offload_decode.cli.limits import AskOptions, check_options, cluster_of, engine_opener
from offload_decode.cli.options import EVERYDAY, From, a_path, option, with_groups, workers_option
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
from offload_decode.cli.together import Together, TogetherChoice, refuse_others
from offload_decode.common.errors import ConfigError, OffloadDecodeError

if TYPE_CHECKING:
    from offload_decode.prefill_jobs.on_ray.asking import JointQuestion, QuestionBatch
    from offload_decode.prefill_jobs.on_ray.pool import TaskProgress
    from offload_decode.prefill_jobs.on_ray.workers import Cluster
    from offload_decode.types import Answer


@with_groups
def batch(
    stores: Annotated[
        list[Path],
        opts.store_argument("The stores to ask, or one collection, or a collection's URL in a bucket.", None),
    ],
    questions: Annotated[
        Path,
        option(
            "FILE.jsonl",
            'Questions, one per line: {"question": "…", "id": 1, "store": "…"}.',
            parser=a_path,
            panel=EVERYDAY,
        ),
    ],
    out: Annotated[
        Path, option("FILE.jsonl", "File to which answers are appended.", parser=a_path, panel=EVERYDAY)
    ],
    options: AskOptions,
    address: Annotated[ServerAddress | None, From(client.server_address)],
    choice: DocumentChoice,
    together: TogetherChoice,
    max_new_tokens: opts.MaxNewTokens = 128,
    batch_size: Annotated[
        int,
        option("N", "Questions in one forward pass, or sent to a server at a time.", min=1, panel=EVERYDAY),
    ] = 8,
    cites: opts.Cite = False,
    check: opts.Check = False,
    only_grounded: opts.OnlyGrounded = None,
    workers: Annotated[
        str | None,
        workers_option(
            "spread the questions over a Ray cluster. Machines answer from stores that they have at the same "
            "path, or fetch from a collection's bucket."
        ),
    ] = None,
    worker_count: opts.WorkerCount = None,
    quiet: opts.Quiet = False,
) -> None:
    """Ask many questions of many stores.

    Every question goes to every store, unless its line names one ("id" and "store" are optional). Each answer
    is a line with "id", "store", "question", "answer", "grounded", "tokens" (their number), "finish", the
    settings, "citations" with --cite, "checked" with --check, and all other fields of the question's line.

    In a collection, a question goes to the documents that --all, --top and --where choose, or to the one that
    its line names as "document"; the answer's line names its "document". With --together, each question gets
    one answer, whose line names its documents in "joined".

    With --workers ray, answers are written as they arrive, and a lost worker is replaced; with --together
    too, each question goes to one worker. Workers for which the cluster has no room start when a machine
    joins it.

    The same command resumes an interrupted batch: questions already answered in the output are not asked
    again.
    """
    if address is not None:
        client.check_server_options(options)
    server = address is not None
    refuse_others(together, server, False, only_grounded is not None, check)
    cluster = cluster_of(workers, worker_count, options.gpu_memory, options.ram, server=server)
    check_out(out)
    read = read_questions(questions)
    if out.exists() and out.samefile(questions):
        raise ConfigError(f"{out} holds the questions: choose another --out")
    with (
        Progress(quiet) as progress,
        open_collection(stores, address, choice, lambda: nullcontext(progress)) as collection,
    ):
        if together.together is not None:
            together.check(stores, collection)
            asked = together.assign(read, stores, collection)
        elif collection is not None:
            asked = collection.assign(read)
        else:
            given = [os.path.normpath(store) for store in stores]
            asked = assign(read, given, among(given))
        settings = cites, check, only_grounded, progress, together.settings
        job = Batch(options, out, collection, max_new_tokens, batch_size, *settings)
        answered = read_answered(out, job.settings)
        left = {store: [q for q in group if q.key(store) not in answered] for store, group in asked.items()}
        job.total = sum(map(len, left.values()))
        unasked = {store: group for store, group in left.items() if group}
        if address is None:
            check_options(options, cluster is None)
        if address is not None:
            _ask_server(address, unasked, job)
        elif unasked and together.together is not None:
            joining = Together(stores, collection, together, options, cites, only_grounded)
            if cluster is None:
                _answer_together(unasked, job, joining)
            else:
                _answer_together_on_ray(cluster, unasked, job, joining)
        elif unasked and cluster is not None:
            _answer_on_ray(cluster, unasked, job)
        elif unasked:
            _answer_here(unasked, job)
    done = job.total - sum(number for number, _ in job.failures.values())
    kept = sum(map(len, asked.values())) - job.total
    output.note(f"{out}: {output.count(done, 'answer')}{f', {kept:,} there already' if kept else ''}", quiet)
    for store, (number, error) in job.failures.items():
        output.note(f"error: {sentence(error)} (unanswered: {output.count(number, 'question')} to {store})")
    for question in (unmatched := collection.unmatched if collection else []):
        output.note(
            f"error: no document contains a word of line {question.line} of the questions: rephrase it, name "
            'its "document", or give --all'
        )
    if job.failures or unmatched:
        raise typer.Exit(min([exit_code(error) for _, error in job.failures.values()], default=FAILURE))


@dataclass
class Batch:
    """A batch that runs. `collection`: that of the stores, if any; `total`: how many questions to answer;
    `failures`: by store, how many of its questions are unanswered, and its first error.
    """

    options: AskOptions
    out: Path
    collection: AskedCollection | None
    max_new_tokens: int
    size: int
    cites: bool
    check: bool
    least: float | None
    progress: Progress
    together: Mapping[str, object]
    total: int = 0
    done: int = 0
    failures: dict[str, tuple[int, OffloadDecodeError]] = field(default_factory=dict)

    @property
    def settings(self) -> dict[str, object]:
        """The fields of every line that say how it was answered."""
        config = self.options.config
        told = {"selector": config.selector, "options": config.options, "max_new_tokens": self.max_new_tokens}
        told |= {"model": config.model, "weights": config.weights, **self.together}
        told |= {"adapter": config.adapter} if config.adapter else {}
        told |= {"cite": True} if self.cites else {}
        told |= {"check": True} if self.check else {}
        return told | ({} if self.least is None else {"only_grounded": self.least})

    def fields(self, answers: Iterable[Answer]) -> list[dict[str, object]]:
        """What the lines of answers say of them."""
        return [answer_fields(answer, self.least) for answer in answers]

    def write(self, store: str, answered: Iterable[tuple[Question, Mapping[str, object]]]) -> None:
        """Append answers to questions, as the fields that each has, to the output, and show the progress."""
        entry = None if self.collection is None else self.collection.stores.get(store)
        document = {} if entry is None else {"document": entry.name}
        lines = [
            {"id": question.id, "store": store, "question": question.text}
            | {**answer, **self.settings, **question.extra, **document}
            for question, answer in answered
        ]
        append_answers(self.out, lines)
        self.advance(len(lines))

    def parts(self, questions: Sequence[Question]) -> list[Sequence[Question]]:
        return [questions[start : start + self.size] for start in range(0, len(questions), self.size)]

    def fail(self, store: str, questions: int, error: OffloadDecodeError) -> None:
        earlier, first = self.failures.get(store, (0, error))
        self.failures[store] = earlier + questions, first
        self.advance(questions)

    def advance(self, questions: int) -> None:
        self.done += questions
        self.progress("answer", self.done, self.total)


def _answer_here(left: dict[str, list[Question]], job: Batch) -> None:
    """Answer store by store; a store that fails does not stop the others."""
    open_engine = engine_opener(job.options, least=job.least)
    for store, group in left.items():
        answered = 0
        try:
            with nullcontext(store) if job.collection is None else job.collection.held(store) as path:
                engine = open_engine(str(path))
                job.advance(0)
                for part in job.parts(group):
                    texts = [question.text for question in part]
                    answers = engine.answer_many(texts, job.max_new_tokens, job.size, job.cites, job.check)
                    job.write(store, zip(part, job.fields(answers), strict=True))
                    answered += len(part)
        except OffloadDecodeError as error:
            job.fail(store, len(group) - answered, error)


def _answer_together(left: dict[str, list[Question]], job: Batch, together: Together) -> None:
    """Answer one question after the other, each from all of its stores."""
    for store, group in left.items():
        for question in group:
            try:
                with together.opened(question.text) as talk:
                    given = talk.answer(question.text, job.max_new_tokens)
                    job.write(store, [(question, answer_fields(given, job.least) | talk.fields())])
            except OffloadDecodeError as error:
                job.fail(store, 1, error)


def _answer_together_on_ray(
    cluster: Cluster, left: dict[str, list[Question]], job: Batch, together: Together
) -> None:
    """Answer each question by one worker, from all of its stores."""
    asked = [(store, question) for store, group in left.items() for question in group]
    parts = [together.question(question.text) for _, question in asked]
    addresses = [address for part in parts for address in part.addresses]
    for number, result in _on_ray(cluster, parts, job, addresses):
        store, question = asked[number]
        if isinstance(result, OffloadDecodeError):
            job.fail(store, 1, result)
        else:
            given, told = result
            job.write(store, [(question, answer_fields(given, job.least) | told)])


def _answer_on_ray(cluster: Cluster, left: dict[str, list[Question]], job: Batch) -> None:
    from offload_decode.prefill_jobs.on_ray.asking import QuestionBatch

    given = [(store, part) for store, group in left.items() for part in job.parts(group)]
    parts = [QuestionBatch(store, tuple(question.text for question in group)) for store, group in given]
    for number, result in _on_ray(cluster, parts, job, list(left)):
        store, group = given[number]
        if isinstance(result, OffloadDecodeError):
            job.fail(store, len(group), result)
        else:
            job.write(store, zip(group, job.fields(result), strict=True))


def _on_ray(
    cluster: Cluster,
    parts: Sequence[QuestionBatch | JointQuestion],
    job: Batch,
    stores: Sequence[str],
) -> Iterator[tuple[int, Any]]:
    from offload_decode.prefill_jobs.on_ray.asking import answer_on_ray

    def watch(running: TaskProgress) -> None:
        fetching = sum(size > 0 for _, size in running.values())
        fetch = f", {fetching} of them fetching" if fetching else ""
        at_work = f"{len(running)} at work{fetch}" if running else "(waiting for workers)"
        job.progress("answer", job.done, job.total, at_work)

    remote = None if job.collection is None else job.collection.on_other_machines(stores)
    how = job.options.config, job.max_new_tokens, job.cites, job.check, remote, watch, job.least
    return answer_on_ray(parts, cluster, *how)


def _ask_server(address: ServerAddress, left: dict[str, list[Question]], job: Batch) -> None:
    """Ask as many questions at a time as the batch size says; no more of them after an error that does not
    concern a single question.
    """
    config = job.options.config
    way = config.selector, config.options, job.max_new_tokens
    wanted = AnswerOptions(*way, cite=job.cites, check=job.check, least=job.least)
    stopped = Event()

    def ask(server: Server, name: str, question: Question) -> ServerAnswer:
        answer = ServerAnswer()
        try:
            for _ in server.stream(name, client.conversation(question.text), wanted, answer, stopped):
                pass
        except OffloadDecodeError as error:
            if not isinstance(error, ConfigError):
                stopped.set()
            raise
        return answer

    with Server(address) as server:
        names: dict[str, str] = {}
        for store, group in left.items():
            try:
                names[store] = server.served(store).name
            except ConfigError as error:
                job.fail(store, len(group), error)
        pool = ThreadPoolExecutor(job.size)
        try:
            asked = [(store, question) for store in names for question in left[store]]
            running = {pool.submit(ask, server, names[store], one): (store, one) for store, one in asked}
            for done in as_completed(running):
                store, question = running[done]
                if isinstance(failure := done.exception(), OffloadDecodeError):
                    job.fail(store, 1, failure)
                else:
                    job.write(store, [(question, done.result().fields(wanted))])
        finally:
            stopped.set()  # Ctrl-C: threads stop at the next piece
            pool.shutdown(cancel_futures=True)
