"""In front of replicas that each are a whole server: a request goes to one that has its store open, and to
another where that one is lost before it has begun to answer. Ray Serve's own proxy (`serve.ingress`) does
neither: it chooses by headers, and a lost replica is a status of 500. What replicas are is the caller's:
nothing here knows Ray.
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
from offload_decode.server.http.streaming import while_connected
from offload_decode.server.metrics import log_fields
from offload_decode.server.requests import Busy

TRIES = 3
"""Replicas that a request may lose before it fails."""
STORES = "/v1/stores"
_KEPT = (STORES, "/v1/jobs")
"""Jobs are known to the replica that runs them: all that is asked of them goes to one, as to `STORES`."""
_PINGS = (b":", b"event: ping")  # which keep a connection open, and are no answer
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
        log_fields()["model"] = name = await _name(scope, body)
        async with while_connected(receive):
            await self._answer(name, wire, body, receive, send)

    async def _answer(self, name: str, wire: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """It may begin anew until the answer itself has begun: what keeps a connection open is no
        answer. Until a body comes, the status is held back.
        """
        once = wire["path"].startswith(_KEPT) and wire["method"] != "GET"  # it may have been done
        tries, sent, answered = 1 if once else TRIES, False, False
        start: Message = {}
        while True:
            try:
                async with aclosing(self.replicas.ask(name, wire, body)) as batches:
                    async for batch in batches:
                        for message in batch:
                            if message["type"] == "http.response.start":
                                start = message
                                continue
                            if not sent:
                                sent = True
                                await send(start)
                            last = not message.get("more_body", False)
                            answered = answered or last or not message.get("body", b"").startswith(_PINGS)
                            await send(message)
                return
            except Exception as error:  # of a replica, in another process
                tries -= 1
                if isinstance(error, Lost) and not answered:
                    if tries:
                        continue
                    error = Busy("the servers that had this request were lost: try again", 2)
                if sent:
                    raise error  # the connection is cut: nobody takes half an answer for a whole one
                await refused(error)(wire, receive, send)
                return


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

    working = asyncio.ensure_future(app(dict(scope), receive, queue.put))
    working.add_done_callback(lambda _: queue.put_nowait(None))
    try:
        over = False
        while not over:
            batch = [await queue.get()]
            while not queue.empty():
                batch.append(queue.get_nowait())
            over = batch[-1] is None
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
    name = (await _fields(body)).get("model")
    return name if isinstance(name, str) and len(name) <= _LONGEST else ""


async def others(body: bytes) -> list[str]:
    """The names of stores that are to answer together, where a request gives some."""
    named = (await _fields(body)).get("together")
    return [name for name in named if isinstance(name, str)] if isinstance(named, list) else []


async def _fields(body: bytes) -> dict[str, Any]:
    """Those of a request's JSON; none of what is no such thing: a replica says what is wrong with it."""
    try:
        fields = await asyncio.to_thread(json.loads, body)
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}
