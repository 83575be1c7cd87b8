"""A request for answers, whatever their shape: events come from the scheduler's thread to the event loop, and
as a whole or as server-sent events to the client, until it has them all or hangs up: a disconnect cancels.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Protocol

import anyio
from anyio.to_thread import run_sync
from fastapi import Request, Response
from fastapi.sse import KEEPALIVE_COMMENT, EventSourceResponse, format_sse_event
from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from offload_decode.server.http.errors import Refusal, known_names, refused
from offload_decode.server.requests import Done, Emit, Event, Failed, TimedOut
from offload_decode.server.scheduler import Ticket

MOST_UNREAD = 1 << 14
"""Events that wait for a client, before it is dropped: it reads more slowly than the model writes."""
QUIET_S = 5.0
"""Seconds without an event before a comment keeps the connection open; and how long a request may take to
fail with a status of its own, before the stream begins.
"""
DONE = format_sse_event(data_str="[DONE]")
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
Start = Callable[[Emit], Ticket]
"""Hands one request to the scheduler."""


class Reply(Protocol):
    """An answer in the shape of one route, made of events of requests by their numbers: `chunks` of a stream,
    which `begin` opens and `end` closes (`ping` keeps a silent one open), or what was collected as a `whole`.
    """

    end: bytes = b""
    ping: bytes = KEEPALIVE_COMMENT

    def begin(self) -> Iterable[BaseModel]:
        return ()

    def failed(self, refusal: Refusal) -> BaseModel:
        return refusal.error

    def chunks(self, part: int, event: Event) -> AsyncIterator[BaseModel]: ...
    def collect(self, part: int, event: Event) -> None: ...
    async def whole(self) -> BaseModel: ...


PartEvent = tuple[int, Event]
"""The number of a request, as they were begun, and an event of it."""


class Events:
    """The events of one or several requests that one HTTP request begins."""

    def __init__(self, starts: Sequence[Start]) -> None:
        self._starts: Sequence[Start] = starts
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[PartEvent] = asyncio.Queue()
        self._first: list[PartEvent] = []
        self._tickets: list[Ticket] = []
        self._cancelled = False
        self._unfinished = len(starts)

    def begin(self) -> None:
        """Hand the requests to the scheduler, from a worker thread. Raises what one of them raises."""
        starts, self._starts = self._starts, ()  # which hold what was asked
        for part, start in enumerate(starts):
            self._tickets.append(start(partial(self._emit, part)))
            if self._cancelled:  # `cancel` may have read the list before
                self._tickets[-1].cancel()

    def cancel(self) -> None:
        """Nobody reads any more: the requests end within a step."""
        self._cancelled = True
        for ticket in self._tickets.copy():
            ticket.cancel()

    def _emit(self, part: int, event: Event) -> None:
        with suppress(RuntimeError):  # the loop has been closed: the server goes down
            self._loop.call_soon_threadsafe(self._put, part, event)

    def _put(self, part: int, event: Event) -> None:
        if self._queue.qsize() < MOST_UNREAD:
            self._queue.put_nowait((part, event))
        elif not self._cancelled:
            self.cancel()
            error = TimedOut(f"the answer was not read: {MOST_UNREAD:,} pieces of it waited")
            self._queue.put_nowait((part, Failed(error)))

    async def first(self, within_s: float) -> None:
        """Wait so long for the first event, and raise the error of a request that fails at once."""
        if (first := await self._next(within_s)) is not None:
            self._first.append(first)

    async def each(self, quiet_s: float | None = None) -> AsyncIterator[PartEvent | None]:
        """Events until every request is done; None where nothing came for so many seconds. Raises the error
        of a request that fails.
        """
        while self._unfinished:
            event = self._first.pop() if self._first else await self._next(quiet_s)
            if event is not None and isinstance(event[1], Done):
                self._unfinished -= 1
            yield event

    async def _next(self, within_s: float | None) -> PartEvent | None:
        with anyio.move_on_after(within_s):
            part, event = await self._queue.get()
            if isinstance(event, Failed):
                raise event.error
            return part, event
        return None


@asynccontextmanager
async def while_connected(receive: Receive) -> AsyncIterator[None]:
    """Cancel the block, and go on behind it, when the client hangs up."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        group.cancel_scope.cancel()

    try:
        async with anyio.create_task_group() as group:
            group.start_soon(watch)
            yield
            group.cancel_scope.cancel()
    except ExceptionGroup as raised:  # anyio wraps even a single one
        raise raised.exceptions[0] from None


async def respond(request: Request, starts: Sequence[Start], reply: Reply, stream: bool | None) -> Response:
    """Begin requests, and answer with their reply: whole, or as a stream where none of them fails at once, as
    the status can say so. They are cancelled when one fails or the client hangs up (`ClientDisconnect`).
    """
    events, done = Events(starts), False
    try:
        async with while_connected(request.receive):
            # A thread that begins is waited for, though the client has left: their number is limited.
            await run_sync(events.begin)
            if stream:
                await events.first(QUIET_S)
            else:
                async for event in events.each():
                    if event is not None:
                        reply.collect(*event)
            done = True
    finally:
        if not done:
            events.cancel()
    if not done:
        raise ClientDisconnect
    if stream:
        return Stream(events, reply, known_names(request.app.state.service))
    answer = await reply.whole()
    return Response(answer.model_dump_json(exclude_unset=True, by_alias=True), media_type="application/json")


class Stream(EventSourceResponse):
    """Chunks to a client; an error ends them as the reply says it. `names` are those of the stores, by their
    paths.
    """

    def __init__(self, events: Events, reply: Reply, names: Mapping[str, str]):
        self.events = events
        super().__init__(self._chunks(reply, names), headers=_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.events.cancel()

    async def _chunks(self, reply: Reply, names: Mapping[str, str]) -> AsyncIterator[bytes]:
        try:
            for chunk in reply.begin():
                yield _sse(chunk)
            async for event in self.events.each(QUIET_S):
                if event is None:
                    yield reply.ping
                    continue
                async for chunk in reply.chunks(*event):
                    yield _sse(chunk)
            if reply.end:
                yield reply.end
        except Exception as error:  # noqa: BLE001 - the status has been sent: the error goes into the stream
            yield _sse(reply.failed(refused(error, names)))


def _sse(chunk: BaseModel) -> bytes:
    """A chunk as a server-sent event, named where it has a type: fields that were never set are left out."""
    text = chunk.model_dump_json(exclude_unset=True, by_alias=True)
    return format_sse_event(data_str=text, event=getattr(chunk, "type", None))
