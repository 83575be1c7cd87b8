"""A connection, before there is a request: what it may send, and how long it may take, are bounded.

h11 parses, whatever else is installed: one limit of it holds for the request line with its headers, for the
extensions of a chunk and for trailers. It looks after each read, so it is fed in pieces.
"""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from offload_decode.server.http.errors import Refusal

MOST_HEADER_BYTES = 1 << 14
MOST_HEADERS = 128
WAIT_S = 60.0
"""For a whole header, and for the next bytes of a body."""
_CHUNKS, _SMALLEST_CHUNK = 10_000, 64  # so many of any size, then one for so many bytes


class _Requests(h11.Connection):
    """Counts headers and chunks, whose number costs more than their size does."""

    status = 400
    _chunks = _bytes = 0

    def next_event(self) -> Any:
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            self.status = error.error_status_hint
            raise
        if isinstance(event, h11.Request):
            self._chunks = self._bytes = 0
            if len(event.headers) > MOST_HEADERS:
                self.status = 431
                raise h11.RemoteProtocolError("too many headers")
        elif isinstance(event, h11.Data):
            self._chunks, self._bytes = self._chunks + 1, self._bytes + len(event.data)
            if self._chunks > _CHUNKS + self._bytes // _SMALLEST_CHUNK:
                raise h11.RemoteProtocolError("too many chunks")
        return event


class Connection(H11Protocol):
    """uvicorn's, within bounds."""

    _late: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, **more: Any):
        super().__init__(*args, **more)
        self.conn: _Requests = _Requests(h11.SERVER, MOST_HEADER_BYTES)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a request."""
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        """Read on, until there is too much of it."""
        for at in range(0, len(data), MOST_HEADER_BYTES):
            if self.transport.is_closing():
                break
            super().data_received(data[at : at + MOST_HEADER_BYTES])
        if self.conn.their_state is not h11.IDLE:
            self._stop_waiting()
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY) and self._late is None:
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        self._stop_waiting()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Refuse what cannot be read, in the form of all errors, where no answer has begun."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            status = self.conn.status
            too_large = f"send up to {MOST_HEADERS} headers, of {MOST_HEADER_BYTES:,} bytes together"
            body = bytes(
                Refusal(status, too_large if status == 431 else "this is no valid HTTP request").body
            )
            head = f"HTTP/1.1 {status} \r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
            self.transport.write(f"{head}\r\nconnection: close\r\n\r\n".encode() + body)
        self.transport.close()

    def _wait(self) -> None:
        if not self.transport.is_closing():
            self._late = self.loop.call_later(WAIT_S, self._cut)

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _cut(self) -> None:
        self._late = None
        if self.flow.read_paused:  # what came is still to be read: it is we who are slow
            self._wait()
        else:
            self.transport.close()
