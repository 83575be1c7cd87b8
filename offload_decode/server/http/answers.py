"""What both kinds of answers share: requests are begun, their events are put together, and what they cost is
told.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast
from uuid import uuid4

from anyio.to_thread import run_sync
from fastapi import Request
from openai.types import CompletionUsage
from openai.types.completion_usage import PromptTokensDetails

from offload_decode.server.http.events import Events, Ticket, while_connected
from offload_decode.server.http.logprobs import Pieces
from offload_decode.server.http.streaming import QUIET_S
from offload_decode.server.requests import Delta, Done, Emit, Ended, Event, Prompted, Scored, ToolCall, Usage
from offload_decode.server.service import Service
from offload_decode.types import CitedDocument

Start = Callable[[Emit], Ticket]


def service_of(request: Request) -> Service:
    """The service behind the app."""
    return cast(Service, request.app.state.service)


def new_id(kind: str) -> str:
    """An id that no other answer has, such as `chatcmpl-…`."""
    return f"{kind}-{uuid4().hex}"


def now() -> int:
    """Seconds since 1970."""
    return int(time.time())


def pieces_of(request: Request, model: str) -> Pieces:
    """How a model's tokens are spelled, one by one."""
    service = service_of(request)

    async def pieces(tokens: Sequence[int]) -> Sequence[str]:
        return await run_sync(service.pieces, model, tokens)

    return pieces


async def started(request: Request, starts: Sequence[Start]) -> Events:
    """Begin requests whose answers are streamed. Raises what makes one fail at once, so that the status tells
    of it.
    """
    events = Events()

    async def begin() -> None:
        await events.begin(starts)
        await events.first(QUIET_S)

    await while_connected(request, events, begin)
    return events


async def read(request: Request, starts: Sequence[Start], take: Callable[[int, Event], object]) -> None:
    """Begin requests, and hand over all that is told of each, by its number, until they are done."""
    events = Events()

    async def follow() -> None:
        await events.begin(starts)
        async for told in events.each():
            if told is not None:
                take(*told)

    await while_connected(request, events, follow)


async def whole(request: Request, starts: Sequence[Start]) -> list[Answered]:
    """Begin requests, and wait for all of their answers."""
    answered = [Answered() for _ in starts]
    await read(request, starts, lambda part, event: answered[part].add(event))
    return answered


@dataclass
class Written:
    """One answer."""

    text: str = ""
    tokens: list[Scored] = field(default_factory=list)
    finish: Literal["stop", "length", "tool_calls"] = "stop"
    calls: list[ToolCall] = field(default_factory=list)


@dataclass
class Answered:
    """A request with all of its answers, by their index."""

    written: dict[int, Written] = field(default_factory=dict)
    scores: tuple[Scored, ...] | None = None
    done: Done | None = None

    def add(self, event: Event) -> None:
        """The next event."""
        match event:
            case Prompted(_, scores):
                self.scores = scores
            case Delta(index, text, tokens, calls):
                one = self.written.setdefault(index, Written())
                one.text += text
                one.tokens += tokens
                one.calls += calls
            case Ended(index, finish):
                self.written.setdefault(index, Written()).finish = finish
            case Done():
                self.done = event


def usage_of(done: Iterable[Done | None]) -> CompletionUsage:
    """Of all requests together."""
    each = [one.usage for one in done if one is not None]
    return usage(
        Usage(
            sum(one.prompt for one in each),
            sum(one.cached for one in each),
            sum(one.completion for one in each),
        )
    )


def usage(own: Usage) -> CompletionUsage:
    """As OpenAI's API has it."""
    return CompletionUsage(
        prompt_tokens=own.prompt,
        completion_tokens=own.completion,
        total_tokens=own.prompt + own.completion,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=own.cached),
    )


Cited = list[CitedDocument]
"""What an answer attended to, where it was asked for."""


def cost(done: Done | None) -> dict[str, Any]:
    """`stats` and `citations`, for answers that are to tell."""
    assert done is not None, "the last event"
    return {"stats": done.stats, "citations": list(done.citations or ())}
