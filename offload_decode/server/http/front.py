"""In front of replicas that each are a whole server: a request goes to one that has its store open, and to
another where that one is lost before it has begun to answer. What replicas are is the caller's: nothing here
knows Ray.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from typing import Any, Protocol
from urllib.parse import parse_qs

from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from offload_decode.server.http.app import guard
from offload_decode.server.http.errors import add_handlers, refused
from offload_decode.server.http.security import Access
from offload_decode.server.http.streaming import disconnected
from offload_decode.server.metrics import log_fields
from offload_decode.server.requests import Busy

TRIES = 3
"""Replicas that a request may lose before it fails."""
STORES = "/v1/stores"
_KEPT = (STORES, "/v1/jobs")
"""Jobs are known to the replica that runs them: all that is asked of them goes to one, as to `STORES`."""
_LONGEST = 512  # letters of a name that is looked for
_WIRE = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path")


class Lost(Exception):
    """The replica has gone, with all it was doing."""


class Replicas(Protocol):
    """Servers behind the front."""

    def ask(self, name: str, scope: Mapping[str, Any], body: bytes) -> AsyncGenerator[list[Message]]:
        """Have the one that has `name` open (any, where it is empty) answer a request: ASGI messages, as they
        come. Raises `Lost`, and `Busy` where none has room. Closing it drops the request.
        """
        ...

    async def metrics(self) -> bytes:
        """Of all of them, as Prometheus reads them."""
        ...


class Front:
    """An ASGI app that answers through replicas."""

    def __init__(self, replicas: Replicas):
        self.replicas = replicas

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await Request(scope, receive).body()
        wire = {key: scope[key] for key in _WIRE if key in scope}
        # Which origins may ask was decided here: a replica knows of none.
        wire["headers"] = [(bytes(k), bytes(v)) for k, v in scope["headers"] if bytes(k) != b"origin"]
        name = await _name(scope, body)
        log_fields()["model"] = name
        begun = PendingResponse(wire, receive, send)
        answering = asyncio.create_task(self._answer(name, wire, body, begun))
        leaving = asyncio.create_task(disconnected(receive))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                answering.result()
        finally:
            for task in (answering, leaving):
                task.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)

    async def _answer(self, name: str, wire: Mapping[str, Any], body: bytes, begun: PendingResponse) -> None:
        once = wire["path"].startswith(_KEPT) and wire["method"] != "GET"  # it may have been done
        for left in reversed(range(1 if once else TRIES)):
            try:
                async with aclosing(self.replicas.ask(name, wire, body)) as messages:
                    async for batch in messages:
                        for message in batch:
                            await begun.send(message)
                return
            except Lost:
                if begun.answered:
                    raise  # the connection is cut, so that nobody takes half an answer for a whole one
                if not left:
                    await begun.fail(Busy("the servers that had this request were lost: try again", 2))
            except Exception as error:  # noqa: BLE001 - of a replica, in another process
                await begun.fail(error)
                return


class PendingResponse:
    """A response on its way out, which may begin anew until the answer itself has begun (`answered`):
    comments that keep a connection open are no answer.
    """

    def __init__(self, wire: Scope, receive: Receive, send: Send):
        self._wire, self._receive, self._send = wire, receive, send
        self._start: Message | None = None
        self._started = self.answered = False

    async def send(self, message: Message) -> None:
        """The next message. The first one is held back until a body comes."""
        if message["type"] == "http.response.start":
            self._start = message
            return
        if not self._started:
            assert self._start is not None, "a response starts before its body"
            self._started = True
            await self._send(self._start)
        body = message.get("body", b"")
        self.answered = self.answered or not body.startswith(b":") or not message.get("more_body", False)
        await self._send(message)

    async def fail(self, error: Exception) -> None:
        """End it with an error, where its status has not been sent; else raise it."""
        if self._started:
            raise error
        await refused(error)(self._wire, self._receive, self._send)


def create_front(replicas: Replicas, access: Access, most: int) -> FastAPI:
    """The front as an app; `access` and `most` as in `app.guard`. Uploads are no larger, as they pass through
    memory here.
    """
    app = FastAPI(openapi_url=None)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(await replicas.metrics(), media_type=CONTENT_TYPE_LATEST)

    app.mount("/", Front(replicas))
    add_handlers(app)
    guard(app, access, most, most)
    return app


async def run(app: ASGIApp, scope: Mapping[str, Any], body: bytes) -> AsyncGenerator[list[Message]]:
    """What an app answers to a request, on the replica's side: messages as they come, those of one moment
    together. When the iterator is closed the app is told that the client has gone.
    """
    queue: asyncio.Queue[Message | None] = asyncio.Queue()
    unread = [{"type": "http.request", "body": body, "more_body": False}]
    closed = asyncio.Event()

    async def receive() -> Message:
        if unread:
            return unread.pop()
        await closed.wait()
        return {"type": "http.disconnect"}

    async def work() -> None:
        try:
            await app(dict(scope), receive, queue.put)
        finally:
            queue.put_nowait(None)

    working = asyncio.create_task(work())
    try:
        over = False
        while not over:
            batch = [await queue.get()]
            while not queue.empty():
                batch.append(queue.get_nowait())
            over = None in batch
            if messages := [message for message in batch if message is not None]:
                yield messages
        await working
    finally:
        closed.set()
        with suppress(TimeoutError, asyncio.CancelledError):
            await asyncio.wait_for(asyncio.gather(working, return_exceptions=True), 5)


async def _name(scope: Scope, body: bytes) -> str:
    """What a request names, by which a replica is chosen; empty where it names nothing."""
    if scope["path"].startswith(_KEPT):
        return STORES
    if scope["method"] != "POST":
        query: dict[str, list[str]] = parse_qs(scope["query_string"].decode("latin-1"))
        return query.get("model", [""])[0][:_LONGEST]
    try:
        fields = await asyncio.to_thread(json.loads, body)
    except (ValueError, RecursionError):
        return ""  # a replica says what is wrong with it
    name = fields.get("model") if isinstance(fields, dict) else None
    return name if isinstance(name, str) and len(name) <= _LONGEST else ""
