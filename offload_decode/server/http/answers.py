"""What both kinds of answers share: requests are begun, their events are put together, and what they cost is
told.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, Protocol, cast
from uuid import uuid4

import anyio
from anyio.to_thread import run_sync
from fastapi import Request, Response
from fastapi.sse import KEEPALIVE_COMMENT, EventSourceResponse, format_sse_event
from openai.types import CompletionUsage
from openai.types.chat.chat_completion_token_logprob import ChatCompletionTokenLogprob, TopLogprob
from openai.types.completion_choice import Logprobs
from openai.types.completion_usage import PromptTokensDetails
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from offload_decode.server.http.errors import refused
from offload_decode.server.requests import (
    Delta,
    Done,
    Emit,
    Ended,
    Event,
    Failed,
    Generation,
    Prompted,
    Scored,
    Settings,
    TimedOut,
    ToolCall,
    Usage,
)
from offload_decode.server.service import Service
from offload_decode.types import CitedDocument

# The events of requests, from the scheduler's thread to the event loop, until the client has them all or
# hangs up.

MOST_UNREAD = 1 << 14
"""Events that wait for a client, before it is dropped: it reads more slowly than the model writes."""


class Ticket(Protocol):
    """A request that was accepted."""

    def cancel(self) -> None: ...


class Told(NamedTuple):
    """An event, and of which request: they are numbered as they were begun."""

    part: int
    event: Event


class Events:
    """What the scheduler tells of one or several requests that one HTTP request began."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Told] = asyncio.Queue()
        self._held: list[Told] = []
        self._tickets: list[Ticket] = []
        self._lock = threading.Lock()
        self._over = False
        self._left = 0

    async def begin(self, starts: Sequence[Callable[[Emit], Ticket]]) -> None:
        """Hand the requests to the scheduler, in a worker thread. Raises what one of them raises."""
        self._left = len(starts)
        await run_sync(self._begin, starts)

    def _begin(self, starts: Sequence[Callable[[Emit], Ticket]]) -> None:
        for part, start in enumerate(starts):
            ticket = start(partial(self._emit, part))
            with self._lock:
                self._tickets.append(ticket)
                over = self._over
            if over:
                ticket.cancel()

    def cancel(self) -> None:
        """Nobody reads any more: the requests end within a step."""
        with self._lock:
            self._over = True
            tickets, self._tickets = self._tickets, []
        for ticket in tickets:
            ticket.cancel()

    def _emit(self, part: int, event: Event) -> None:
        with suppress(RuntimeError):  # the loop has been closed: the server goes down
            self._loop.call_soon_threadsafe(self._put, Told(part, event))

    def _put(self, told: Told) -> None:
        if self._queue.qsize() < MOST_UNREAD:
            self._queue.put_nowait(told)
        elif not self._over:
            self.cancel()
            said = f"the answer was not read: {MOST_UNREAD:,} pieces of it waited"
            self._queue.put_nowait(Told(0, Failed(TimedOut(said))))

    async def first(self, within_s: float) -> None:
        """Wait so long for the first event, and raise the error of a request that fails at once."""
        with anyio.move_on_after(within_s):
            told = await self._queue.get()
            if isinstance(told.event, Failed):
                raise told.event.error
            self._held.append(told)

    async def each(self, quiet_s: float | None = None) -> AsyncIterator[Told | None]:
        """Events until every request is done; None where nothing came for so many seconds. Raises the error
        of a request that fails.
        """
        while self._left:
            told = self._held.pop() if self._held else await self._next(quiet_s)
            if told is not None and isinstance(told.event, Failed):
                raise told.event.error
            if told is not None and isinstance(told.event, Done):
                self._left -= 1
            yield told

    async def _next(self, quiet_s: float | None) -> Told | None:
        with anyio.move_on_after(quiet_s):
            return await self._queue.get()
        return None


async def while_connected(request: Request, events: Events, work: Callable[[], Awaitable[None]]) -> None:
    """Do `work` on events. Where it fails or the client hangs up (`ClientDisconnect`), they are cancelled."""
    done = False

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        group.cancel_scope.cancel()

    try:
        async with anyio.create_task_group() as group:
            group.start_soon(watch)
            await work()
            done = True
            group.cancel_scope.cancel()
    except ExceptionGroup as raised:  # anyio wraps even a single one
        raise raised.exceptions[0] from None
    finally:
        if not done:
            events.cancel()
    if not done:
        raise ClientDisconnect


# Server-sent events: chunks as they come, comments where nothing comes for long, and the end.

QUIET_S = 5.0
"""Seconds without an event before a comment keeps the connection open; and how long a request may take to
fail with a status of its own, before the stream begins.
"""
DONE = format_sse_event(data_str="[DONE]")
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class Stream(EventSourceResponse):
    """Chunks to a client. None is a comment; an error that the chunks raise is told in OpenAI's shape, and
    ends the stream. When the client hangs up, the requests are cancelled.
    """

    def __init__(
        self,
        events: Events,
        chunks: AsyncIterator[bytes | None],
        names: Mapping[str, str],
    ):
        self.events = events
        super().__init__(_written(chunks, names), headers=_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.events.cancel()


def data(chunk: BaseModel, event: str | None = None) -> bytes:
    """A chunk as an event: fields that were never set are left out."""
    return format_sse_event(data_str=chunk.model_dump_json(exclude_unset=True, by_alias=True), event=event)


def json_of(answer: BaseModel) -> Response:
    """A whole answer: fields that were never set are left out."""
    return Response(answer.model_dump_json(exclude_unset=True, by_alias=True), media_type="application/json")


async def _written(chunks: AsyncIterator[bytes | None], names: Mapping[str, str]) -> AsyncIterator[bytes]:
    try:
        async for chunk in chunks:
            yield KEEPALIVE_COMMENT if chunk is None else chunk
    except Exception as error:  # noqa: BLE001 - the status has been sent: the stream itself must tell
        yield data(refused(error, names).body)


# Log-probabilities as the two APIs have them: a list of objects for chat, parallel lists for completions.

LEAST = -9999.0
"""What is said for a token that cannot come, as OpenAI does: JSON knows no infinity."""

Pieces = Callable[[Sequence[int]], Awaitable[Sequence[str]]]
"""Ids of tokens to the text of each."""


async def of_chat(tokens: Sequence[Scored], pieces: Pieces) -> list[ChatCompletionTokenLogprob]:
    """Each token with its bytes, and the likeliest ones in its place."""
    texts = await _texts(tokens, pieces)
    return [
        ChatCompletionTokenLogprob(
            token=texts[one.token],
            bytes=list(texts[one.token].encode()),
            logprob=_finite(one.logprob),
            top_logprobs=[
                TopLogprob(token=texts[token], bytes=list(texts[token].encode()), logprob=_finite(logprob))
                for token, logprob in one.top
            ],
        )
        for one in tokens
    ]


async def of_completion(tokens: Sequence[Scored], pieces: Pieces, offset: int = 0) -> Logprobs:
    """The first token of all has no log-probability, and is None in both lists. `offset`: where in the text
    the first of these tokens begins.

    The token itself is among the likeliest in its place, whether it is one of them or not.
    """
    texts = await _texts(tokens, pieces)
    offsets = []
    for one in tokens:
        offsets.append(offset)
        offset += len(texts[one.token])
    known = [None if one.logprob is None else _finite(one.logprob) for one in tokens]
    top = [_top(one, texts) for one in tokens]
    return Logprobs.model_construct(
        text_offset=offsets,
        tokens=[texts[one.token] for one in tokens],
        token_logprobs=cast(list[float], known),
        top_logprobs=cast(list[dict[str, float]], top),
    )


def _top(one: Scored, texts: dict[int, str]) -> dict[str, float] | None:
    if one.logprob is None:
        return None
    likeliest: dict[str, float] = {}
    for token, logprob in (*one.top, (one.token, one.logprob)):
        likeliest.setdefault(texts[token], _finite(logprob))  # of tokens that look alike, the likeliest
    return likeliest


async def _texts(tokens: Sequence[Scored], pieces: Pieces) -> dict[int, str]:
    ids = list(dict.fromkeys(id for one in tokens for id in (one.token, *(token for token, _ in one.top))))
    return dict(zip(ids, await pieces(ids), strict=True))


def _finite(logprob: float | None) -> float:
    return LEAST if logprob is None else max(logprob, LEAST)


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


# What requests share: the fields that say how an answer is written, bounded before anything else sees
# them.
#
# Fields that this server does not know are accepted, as OpenAI's clients expect, and named once in the
# log.

LOG = logging.getLogger("offload_decode.server")

MOST_ANSWERS = 16
MOST_TOKENS = 1 << 24
MOST_IDS = 1 << 20
_MOST_NAMES = 256
_IGNORED = frozenset(
    {"user", "metadata", "store", "service_tier", "parallel_tool_calls", "safety_identifier"}
)
_noted: set[str] = set(_IGNORED)

Name = Annotated[str, StringConstraints(min_length=1, max_length=512)]
Short = Annotated[str, StringConstraints(max_length=1024)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Ids = Annotated[list[TokenId], Field(min_length=1, max_length=MOST_IDS, fail_fast=True)]
"""Ids of tokens. Lists of a request fail with their first wrong member: a body may hold millions of them, and
pydantic takes a kilobyte to tell of each.
"""
Bias = Annotated[float, Field(ge=-100, le=100)]
Option = (
    Annotated[str, StringConstraints(max_length=256)]
    | bool
    | int
    | Annotated[float, Field(allow_inf_nan=False)]
)


class Body(BaseModel):
    """A request body. What it does not know is named in the log the first time it is seen."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    @model_validator(mode="after")
    def _note_unknown(self) -> Body:
        for name in self.__pydantic_extra__ or {}:
            if name not in _noted and len(_noted) < _MOST_NAMES:
                _noted.add(name)
                LOG.info("the field %.80r of a request is not known here, and is ignored", name)
        return self


class StreamOptions(Body):
    """`include_usage`: a last chunk says how many tokens there were."""

    include_usage: bool = False


class Asks(Body):
    """Who is asked, and how: the fields of every request for an answer.

    `selector` and `options` choose which stored tokens are attended to, as `-s` and `-o` do; `deadline` is in
    seconds; `citations` adds which documents and passages the answer attended to.
    """

    model: Name
    stream: bool = False
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    selector: Annotated[str, StringConstraints(max_length=64)] | None = None
    options: dict[Annotated[str, StringConstraints(max_length=64)], Option] = Field({}, max_length=64)
    deadline: float | None = Field(None, ge=0.001, le=86_400)
    citations: bool = False


class RequestMessage(Asks):
    """How an answer is written: the fields that chat and completions share."""

    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=MOST_ANSWERS)
    max_tokens: int | None = Field(None, ge=0, le=MOST_TOKENS)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stop: Short | Annotated[list[Short], Field(max_length=16)] | None = None
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")], Bias] | None = Field(
        None, max_length=1024
    )
    ignore_eos: bool = False

    @property
    def answers(self) -> int:
        """How many are wanted."""
        return self.n or 1

    @property
    def tells_usage(self) -> bool:
        """A stream ends with a chunk of usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def generation(self, settings: Settings, most: int | None, top: int | None, grammar: Any) -> Generation:
        """With the server's own values where the request names none; `most`, `top` and `grammar` as
        `Generation` has them.
        """
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return Generation(
            max_tokens=most,
            temperature=settings.temperature if self.temperature is None else self.temperature,
            top_p=settings.top_p if self.top_p is None else self.top_p,
            seed=None if self.seed is None else self.seed % 2**63,
            stop=tuple(filter(None, stop)),
            top_logprobs=top,
            logit_bias={int(token): bias for token, bias in (self.logit_bias or {}).items()},
            frequency_penalty=self.frequency_penalty or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            grammar=grammar,
            ignore_end=self.ignore_eos,
        )
