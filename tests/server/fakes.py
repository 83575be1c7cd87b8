"""A service without a model: it answers with what it was told, a character a token, from its own threads."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from offload_decode.server.catalog import Entry
from offload_decode.server.jobs import Jobs
from offload_decode.server.metrics import Metrics
from offload_decode.server.requests import (
    Delta,
    Done,
    Emit,
    Ended,
    Failed,
    Joined,
    NoSuchName,
    Prompted,
    Scored,
    Settings,
    ToolCall,
    Usage,
    WrongField,
)
from offload_decode.server.service import ChatRequest, CompletionRequest
from offload_decode.types import Checked, CitedDocument, CitedSpan, StepStats
from tests.tiny import tiny_tokenizer

STORED = 100
"""Tokens that lie in front of every question."""
Asked = ChatRequest | CompletionRequest
CITED = (CitedDocument("minutes.txt", 0.75, (CitedSpan(3, 7, "Ada wrote it.", 0.5),)),)


def entry(name: str = "book", path: Path | None = Path("/srv/stores/book.kv")) -> Entry:
    """A store, or where `path` is None the model without one."""
    return Entry(
        name=name,
        path=path,
        model_id="/srv/models/tiny",
        dtype="float32",
        weights="auto",
        tokens=STORED if path else 0,
        documents=1 if path else 0,
        created=1_700_000_000,
    )


ENTRIES = (entry(), entry("tiny", None))


def entry_of(name: str) -> Entry:
    for one in ENTRIES:
        if one.name == name:
            return one
    raise NoSuchName(f"nothing here is called '{name}': there are book, tiny")


@dataclass
class Ticket:
    """What was asked, and whether it was cancelled."""

    asked: Asked
    cancelled: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        self.cancelled.set()


class FakeService:
    """Answers a chat with the last message, a completion with its prompt reversed; tokens are characters. Its
    catalog has two names: `book`, a store, and `tiny`, its model, which is in memory.

    `fault` is raised when something is asked; `early` and `late` are what a request fails with before and
    after its first token; `reasoning` goes before the text and `calls` are made after it; `stop` ends it;
    `pace_s` is the time between tokens, `wait_s` that before the first event; `grounded` is told of each
    answer, and so is how stores were `joined`, with `notes`.
    """

    def __init__(self, settings: Settings | None = None):
        self.settings = settings or Settings()
        self.catalog = SimpleNamespace(folders=(), entries=lambda: ENTRIES, entry=entry_of)
        self.loaded_models = SimpleNamespace(
            model=self._model,
            models=lambda: ["/srv/models/tiny"],
            loading=lambda: False,
            open_stores=lambda: ["book"],
        )
        self.jobs = Jobs(self.catalog)
        self.tickets: list[Ticket] = []
        self.fault: Exception | None = None
        self.calls: tuple[ToolCall, ...] = ()
        self.reasoning = ""
        self.stop: str | None = None
        self.early: Exception | None = None
        self.late: Exception | None = None
        self.pace_s = self.wait_s = 0.0
        self.grounded: float | None = None
        self.checked = Checked(3, 2, 0.25)
        self.joined: Joined | None = None
        self.notes: tuple[str, ...] = ()
        self.closed = False
        self.metrics = Metrics()

    def chat(self, asked: ChatRequest, emit: Emit) -> Ticket:
        text = str(asked.messages[-1].get("content"))
        return self._begin(asked, text, "", emit)

    def complete(self, asked: CompletionRequest, emit: Emit) -> Ticket:
        prompt = asked.prompt if isinstance(asked.prompt, str) else self.detokenize("", asked.prompt)
        return self._begin(asked, prompt[::-1], prompt, emit)

    def stored_tokens(self, asked: ChatRequest) -> list[int]:
        return [self.catalog.entry(asked.model).tokens]

    def tokenize(
        self,
        model: str,
        text: str | None = None,
        messages: list[dict[str, Any]] | None = None,
        add_special: bool = True,
        tools: list[dict[str, Any]] | None = None,
    ) -> list[int]:
        self.catalog.entry(model)
        text = text if messages is None else "".join(str(one.get("content")) for one in messages)
        text = (text or "") + "".join(one["function"]["name"] for one in tools or ())
        return [*([0] if add_special else []), *map(ord, text or "")]

    def detokenize(self, model: str, tokens: Sequence[int]) -> str:
        if not all(0 <= token < 0x110000 for token in tokens):  # as the service refuses what is no token
            raise WrongField("the ids of tokens must be those of characters", "prompt")
        return "".join(map(chr, tokens))

    def pieces(self, model: str, tokens: Sequence[int]) -> list[str]:
        return [chr(token) for token in tokens]

    def close(self) -> None:
        self.closed = True

    def _model(self, entry: Entry) -> SimpleNamespace:
        if self.fault is not None:
            raise self.fault
        return SimpleNamespace(known_tokenizer=tiny_tokenizer())

    def _begin(self, asked: Asked, text: str, prompt: str, emit: Emit) -> Ticket:
        self.catalog.entry(asked.model)
        if self.fault is not None:
            raise self.fault
        ticket = Ticket(asked)
        self.tickets.append(ticket)
        most = asked.generation.max_tokens
        most = None if most == -1 else most
        threading.Thread(target=self._answer, args=(ticket, text[:most], len(text), prompt, emit)).start()
        return ticket

    def _answer(self, ticket: Ticket, text: str, whole: int, prompt: str, emit: Emit) -> None:
        try:
            for event in self._events(ticket.asked, text, whole, prompt):
                if ticket.cancelled.wait(self.pace_s):
                    return
                emit(event)
        finally:
            ticket.over.set()

    def _events(self, asked: Asked, text: str, whole: int, prompt: str):
        time.sleep(self.wait_s)
        if self.early is not None:
            yield Failed(self.early)
            return
        top = asked.generation.top_logprobs
        scores = None
        if isinstance(asked, CompletionRequest) and asked.prompt_logprobs is not None:
            scores = tuple(
                Scored(ord(sign)) if not at else scored(ord(sign), asked.prompt_logprobs)
                for at, sign in enumerate(prompt)
            )
        yield Prompted(Usage(STORED + len(prompt), STORED), scores)
        for index in range(asked.n):
            if self.reasoning:
                yield Delta(index, "", (), reasoning=self.reasoning)
            for sign in text:
                yield Delta(index, sign, (Scored(ord(sign)) if top is None else scored(ord(sign), top),))
                if self.late is not None:
                    yield Failed(self.late)
                    return
            if self.calls:
                yield Delta(index, "", (), self.calls)
            ended = "tool_calls" if self.calls else "stop"
            finish = ended if len(text) == whole else "length"
            yield Ended(index, finish, self.stop, self.grounded)
        usage = Usage(STORED + len(prompt), STORED, asked.n * len(text))
        cost, checked = StepStats(tokens=len(text), bytes_moved=1000), self.checked if asked.check else None
        cited = CITED if asked.cite else None
        yield Done(usage, cost, cited, checked=checked, joined=self.joined, notes=self.notes)


def scored(token: int, top: int) -> Scored:
    """A token that is the likeliest, with the ones after it in the alphabet behind it."""
    return Scored(token, -0.5, tuple((token + rank, -0.5 - rank) for rank in range(top)))
