"""`ask`, `chat` and `batch` with `--server`: questions go there, answers look as they do without."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from threading import Event
from typing import Any

from offload_decode.cli import output
from offload_decode.cli.client import Manner, Received, Served, Server
from offload_decode.cli.questions import Question
from offload_decode.cli.transcript import Turn
from offload_decode.common.errors import ConfigError, OffloadDecodeError


def asked(question: str) -> list[dict[str, str]]:
    """A conversation that a question begins."""
    return [{"role": "user", "content": question}]


def report(server: Server, served: Served, question: str, manner: Manner, received: Received) -> Any:
    """An answer for programs: of what `ask --json` tells, all that a server does."""
    prompt, cached = received.prompt
    told: dict[str, Any] = {
        "question": question,
        "answer": received.text.strip(),
        "tokens": received.tokens,
        "finish": received.finish,
    }
    if manner.cite:
        told["citations"] = received.citations or []
    told |= {
        "selector": manner.selector,
        "options": manner.options,
        "store": served.name,
        "model": served.model,
        "stored_tokens": served.tokens,
        "server": server.url,
        "prompt_tokens": prompt,
        "cached_tokens": cached,
    }
    return told if received.stats is None else told | {"stats": received.stats}


def describe_received(received: Received, seconds: float) -> str:
    """What an answer cost, for people."""
    prompt, cached = received.prompt
    return output.facts(
        [
            ("prompt", f"{prompt:,} tokens, {cached:,} of them stored or remembered"),
            ("answer", output.count(received.tokens, "token")),
            ("time", f"{seconds:.2f} s"),
        ]
    )


class RemoteTranscript:
    """A conversation whose turns are kept here and sent whole: the server remembers what it ran."""

    def __init__(self, server: Server, name: str, manner: Manner):
        self.server, self.name, self.manner = server, name, manner
        self.messages: list[dict[str, str]] = []
        self.turns: list[Turn] = []

    def answer(self, question: str) -> Iterator[str]:
        """Put a question and yield the answer; interrupted, what has come of it stays."""
        received, said = Received(), {"role": "assistant", "content": ""}
        messages = [*self.messages, *asked(question)]
        for piece in self.server.stream(self.name, messages, self.manner, received):
            if not said["content"]:
                self.messages = [*messages, said]
                self.turns.append(Turn(question))
            said["content"] = received.text
            yield piece

    def reset(self) -> None:
        """Forget every turn."""
        self.messages, self.turns = [], []

    def save(self, file: Path) -> None:
        """Raises `ConfigError`: what is saved are tokens, and the server keeps them."""
        raise ConfigError("a conversation with a server cannot be saved: chat without --server for that")

    def load(self, file: Path) -> None:
        """Raises `ConfigError`, as `save` does."""
        raise ConfigError("a conversation cannot be loaded into a server: chat without --server for that")

    @property
    def length(self) -> int:
        """Tokens of the turns, which the server alone counts."""
        return 0


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
