"""Server-sent events: chunks as they come, comments where nothing comes for long, and the end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping

from fastapi import Response
from fastapi.sse import KEEPALIVE_COMMENT, EventSourceResponse, format_sse_event
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from offload_decode.server.http.errors import refused
from offload_decode.server.http.events import Events

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
