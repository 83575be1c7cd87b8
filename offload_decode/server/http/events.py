"""The events of requests, from the scheduler's thread to the event loop, until the client has them all or
hangs up.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple, Protocol

import anyio
from anyio.to_thread import run_sync
from starlette.requests import ClientDisconnect, Request

from offload_decode.server.errors import TimedOut
from offload_decode.server.requests import Done, Emit, Event, Failed

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
