"""An app behind a port: uvicorn, until it is told to stop."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import uvicorn
from fastapi import FastAPI

from offload_decode.errors import ConfigError

BACKLOG = 1024
_LATE_S = 5  # after which connections are cut, whatever they still do


def bind(host: str, port: int) -> socket.socket:
    """A socket on which connections wait from now on. Raises `ConfigError`."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} of {host} is taken: choose another, such as --port {port + 1}"
            ) from error
        reason = error.strerror or str(error)
        raise ConfigError(
            f"the server cannot listen on {host}, port {port} ({reason}): choose another"
        ) from error


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a host."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def address_of(bound: socket.socket) -> str:
    """`http://127.0.0.1:8000`."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Server(uvicorn.Server):
    """As it stops, `close` ends what is being answered, while connections wait for it."""

    def __init__(self, config: uvicorn.Config, close: Callable[[], None]):
        super().__init__(config)
        self._close = close

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop taking requests, and wait until all are answered."""
        closing = asyncio.create_task(asyncio.to_thread(self._close))
        await super().shutdown(sockets)
        await closing


def listen(
    app: FastAPI, bound: socket.socket, grace_s: float, close: Callable[[float], None] | None = None
) -> None:
    """Serve until SIGINT or SIGTERM; answers that are being written then have so many seconds to end, and
    those that are left are ended by `close`, which is given the seconds.
    """
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        ws="none",
        lifespan="on",
        timeout_graceful_shutdown=round(grace_s + _LATE_S),
    )
    before = signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn raises it again when it has stopped
    try:
        with bound, suppress(KeyboardInterrupt):
            _Server(config, partial(close, grace_s) if close else _nothing).run(sockets=[bound])
    finally:
        signal.signal(signal.SIGTERM, before)


def _nothing() -> None:
    """What is behind the app ends elsewhere."""
