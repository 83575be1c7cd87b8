"""Who may ask, and how much of a request is read: decided in front of every route, before a body is read.

A server without keys that listens on loopback answers to names of loopback alone, so that no web page
reaches it by a name of its own that was pointed there (DNS rebinding). With a key any name will do: proxies
pass on the one they are called by, and a page has no key. What changes something is taken from other origins
only where they were let in, since browsers send forms across origins without asking.
"""

import hmac
from dataclasses import dataclass
from pathlib import Path

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from offload_decode.common.errors import ConfigError
from offload_decode.server.http.errors import Refusal

OPEN = ("/", "/health")
"""What needs no key: whether the server runs, and the page, which asks for one."""
OPEN_FOLDER = "/page/"
DOCUMENTS = "/v1/stores"
"""Where documents are sent, which are larger than questions."""
LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})
_MOST_KEY_BYTES = 1 << 16


@dataclass(frozen=True)
class Access:
    """Keys that open the server (none: it is open), origins whose pages may ask from a browser, and names
    that requests may call the server by (none: any).
    """

    keys: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    hosts: frozenset[str] = frozenset()


def read_keys(path: Path) -> tuple[str, ...]:
    """The keys of a file, one a line. Raises `ConfigError`."""
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_KEY_BYTES + 1)
        keys = tuple(line.strip() for line in content.decode().splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: give a text file, a key in each line") from error
    if not keys or len(content) > _MOST_KEY_BYTES:
        raise ConfigError(f"{path} must hold a key in each line, and no more than 64 KiB")
    return keys


class Guard:
    """Refuses requests without a key, under a foreign name or from a foreign page, and those whose body has
    more than `most` bytes, stated or counted; more than `uploads` where documents are sent.
    """

    def __init__(self, app: ASGIApp, access: Access, most: int, uploads: int):
        self.app, self.access, self.most, self.uploads = app, access, most, uploads

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        read, most = 0, self.uploads if scope["path"].startswith(DOCUMENTS) else self.most
        refused = self._refused(scope, most)
        if refused is not None:
            await refused(scope, receive, send)
            return

        async def counted() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > most:
                raise HTTPException(413, _too_large(most))
            return message

        await self.app(scope, counted, send)

    def _refused(self, scope: Scope, most: int) -> Refusal | None:
        headers, path = Headers(scope=scope), scope["path"]
        host = headers.get("host", "")
        if self.access.hosts and _name(host) not in self.access.hosts:
            return Refusal(403, f"this server does not answer to the name {_name(host)[:80]!r}", "wrong_host")
        if not (path in OPEN or path.startswith(OPEN_FOLDER) or self._opened(headers)):
            message = "give the server's key, as Authorization: Bearer KEY or X-Api-Key: KEY"
            return Refusal(401, message, "invalid_api_key", **{"WWW-Authenticate": "Bearer"})
        if scope["method"] not in ("GET", "HEAD", "OPTIONS") and self._foreign(headers.get("origin"), host):
            return Refusal(
                403, "pages of that origin may not ask here: start the server with --cors ORIGIN", "origin"
            )
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > most:
            return Refusal(413, _too_large(most), "too_large")
        return None

    def _opened(self, headers: Headers) -> bool:
        kind, _, credentials = headers.get("authorization", "").partition(" ")
        bearer = credentials.strip() if kind.lower() == "bearer" else ""
        sent = [key.encode("latin-1") for key in (bearer, headers.get("x-api-key", ""))]
        fits = [hmac.compare_digest(one, key.encode()) for key in self.access.keys for one in sent]
        return not fits or any(fits)

    def _foreign(self, origin: str | None, host: str) -> bool:
        if origin is None or {"*", origin} & {*self.access.origins}:
            return False
        return origin.partition("://")[2].lower() != host.lower()


def _too_large(most: int) -> str:
    return f"the body is larger than the {most:,} bytes that this server reads"


def _name(host: str) -> str:
    """Of `name:port`, where the name may be an address in brackets."""
    if host.startswith("["):
        return host.partition("]")[0].lower() + "]"
    return host.partition(":")[0].lower().rstrip(".")
