"""An app behind a port: uvicorn, until it is told to stop."""

from __future__ import annotations

import errno
import ipaddress
import signal
import socket
from contextlib import suppress

import uvicorn
from fastapi import FastAPI

from offload_decode.errors import ConfigError

BACKLOG = 1024


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


def listen(app: FastAPI, bound: socket.socket, grace_s: int) -> None:
    """Serve until SIGINT or SIGTERM; answers that are being written then have so many seconds to end."""
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        ws="none",
        lifespan="on",
        timeout_graceful_shutdown=grace_s,
    )
    before = signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn raises it again when it has stopped
    try:
        with bound, suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[bound])
    finally:
        signal.signal(signal.SIGTERM, before)
