"""The app: routes, what stands in front of them, and how errors leave it."""

import asyncio
import errno
import ipaddress
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from importlib.metadata import version

import uvicorn
from anyio.to_thread import run_sync
from fastapi import FastAPI, Security
from fastapi.security import APIKeyHeader, HTTPBearer
from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware

from offload_decode.common.errors import ConfigError
from offload_decode.server.http import anthropic, chat, completions, errors, page, responses, stores
from offload_decode.server.http.connection import Connection
from offload_decode.server.http.errors import add_handlers
from offload_decode.server.http.security import Access, Guard
from offload_decode.server.service import Service

_KEYS = (HTTPBearer(auto_error=False), APIKeyHeader(name="X-Api-Key", auto_error=False))
"""How clients send a key, for the OpenAPI document: `security` looks at it."""


def create_app(service: Service, access: Access | None = None) -> FastAPI:
    """The HTTP side of a service, which is closed when the app shuts down. `access`: who may ask (all)."""
    access = access or Access()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await run_sync(service.close)

    app = FastAPI(
        title="offload-decode",
        description="Stored corpora behind the APIs of OpenAI and Anthropic.",
        version=version("offload-decode"),
        lifespan=lifespan,
        docs_url=None,  # its pages load scripts from elsewhere
        redoc_url=None,
        dependencies=[Security(kind) for kind in _KEYS] if access.keys else [],
    )
    app.state.service = service
    for room in (chat, completions, responses, anthropic, stores, errors, page):
        app.include_router(room.router())
    add_handlers(app)
    limits = service.settings
    guard(app, access, limits.max_body, limits.max_upload)
    return app


def guard(app: Starlette, access: Access, most: int, uploads: int) -> None:
    """Put in front of an app what every request passes: it gets an id, it must be allowed to ask, and so many
    bytes of it are read at most.
    """
    app.add_middleware(Guard, access=access, most=most, uploads=uploads)
    if access.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=access.origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[errors.HEADER, "Retry-After"],
        )
    app.add_middleware(errors.RequestLog)  # around all others


# An app behind a port: uvicorn, until it is told to stop.

_LATE_S = 5  # after which connections are cut, whatever they still do


def bind(host: str, port: int) -> socket.socket:
    """A socket on which connections wait from now on. Raises `ConfigError`."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=1024)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            another = f"choose another, such as --port {port + 1}"
            raise ConfigError(f"port {port} of {host} is taken: {another}") from error
        failed = f"the server cannot listen on {host}, port {port} ({error.strerror or error})"
        raise ConfigError(f"{failed}: choose another") from error


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
    app: Starlette, bound: socket.socket, grace_s: float, close: Callable[[float], None] | None = None
) -> None:
    """Serve until SIGINT or SIGTERM; answers that are being written then have so many seconds to end, and
    those that are left are ended by `close`, which is given the seconds.
    """
    config = uvicorn.Config(
        app,
        http=Connection,
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
            _Server(config, partial(close, grace_s) if close else lambda: None).run(sockets=[bound])
    finally:
        signal.signal(signal.SIGTERM, before)
