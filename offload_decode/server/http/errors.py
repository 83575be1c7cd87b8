"""Errors as OpenAI's clients read them: `{"error": {message, type, param, code}}` with a status.

A remote client is told what the command line would say, without the server's paths; whoever reads the log
sees the whole of it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from fastapi.responses import JSONResponse
from pydantic import BaseModel

from offload_decode.errors import (
    BucketError,
    ConfigError,
    CorpusError,
    DoesNotFit,
    OffloadDecodeError,
    StoreBusy,
    StoreExists,
    StoreIncomplete,
    StoreNotFound,
)
from offload_decode.indexes.errors import NotCompiled, UnknownIndex
from offload_decode.memory import OUT_OF_MEMORY, is_out_of_memory
from offload_decode.server import logs
from offload_decode.server.errors import Busy, Loading, NoSuchName, ReadOnly, TimedOut, TooLarge, WrongField

if TYPE_CHECKING:
    from offload_decode.server.service import Service

LOG = logging.getLogger("offload_decode.server")


class Problem(BaseModel):
    """What went wrong: a sentence, and names for programs."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """The body of every response that is an error."""

    error: Problem


RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "The request cannot be answered as it is."},
    "5XX": {"model": ErrorBody, "description": "The server cannot answer."},
}
"""What an OpenAPI document says of errors."""


class Refusal(NamedTuple):
    """An error on its way out."""

    status: int
    body: ErrorBody
    headers: dict[str, str]

    def response(self) -> JSONResponse:
        """The whole response."""
        return JSONResponse(self.body.model_dump(), self.status, self.headers)


_KINDS: tuple[tuple[type[Exception], int, str, str | None], ...] = (
    (Loading, 503, "server_error", "loading"),
    (Busy, 429, "rate_limit_error", "busy"),
    (NoSuchName, 404, "invalid_request_error", "model_not_found"),
    (ReadOnly, 403, "invalid_request_error", "read_only"),
    (TooLarge, 413, "invalid_request_error", "too_large"),
    (TimedOut, 504, "timeout_error", "timeout"),
    (ConfigError, 400, "invalid_request_error", None),
    (UnknownIndex, 400, "invalid_request_error", None),
    (NotCompiled, 400, "invalid_request_error", None),
    (CorpusError, 400, "invalid_request_error", None),
    (StoreExists, 409, "invalid_request_error", "exists"),
    (StoreNotFound, 404, "invalid_request_error", "model_not_found"),
    (StoreIncomplete, 503, "server_error", "incomplete"),
    (StoreBusy, 503, "server_error", "busy"),
    (DoesNotFit, 503, "server_error", "does_not_fit"),
    (BucketError, 503, "server_error", None),
    (OffloadDecodeError, 500, "server_error", None),
)
"""Of the first class that an error is: its status, type and code."""


def refused(error: Exception, names: Mapping[str, str] | None = None) -> Refusal:
    """The response to an error. `names` are those of the stores, by their paths."""
    for kind, status, named, code in _KINDS:
        if isinstance(error, kind):
            if status >= 500 and not isinstance(error, Busy | TimedOut):
                LOG.error("%s: %s", type(error).__name__, error)
            said = Problem(
                message=without_paths(str(error), names or {}),
                type=named,
                param=error.param if isinstance(error, WrongField) else None,
                code=code,
            )
            return Refusal(status, ErrorBody(error=said), _headers(error))
    if is_out_of_memory(error):
        LOG.error("%s", OUT_OF_MEMORY, exc_info=error)
        return _plain(503, "the server is out of memory: ask for less, or try again later", "out_of_memory")
    LOG.error("unexpected %s", type(error).__name__, exc_info=error)
    under = f", under {number}" if (number := logs.line().get("request_id")) else ""
    return _plain(500, f"something went wrong in the server; its log says what{under}")


def known_names(service: Service) -> dict[str, str]:
    """What clients call what lies at a path."""
    entries = service.catalog.entries()
    stores = {str(entry.path): entry.name for entry in entries if entry.path is not None}
    return {entry.model_id: entry.base for entry in entries} | stores


def refusal(status: int, message: str, code: str | None = None, **headers: str) -> Refusal:
    """An error that is no exception's: of the wire itself."""
    return Refusal(
        status, ErrorBody(error=Problem(message=message, type="invalid_request_error", code=code)), headers
    )


def _plain(status: int, message: str, code: str | None = None) -> Refusal:
    return Refusal(status, ErrorBody(error=Problem(message=message, type="server_error", code=code)), {})


def _headers(error: Exception) -> dict[str, str]:
    if isinstance(error, Busy):
        return {"Retry-After": str(max(1, error.retry_s))}
    # A client that tries again of itself would only spend the same time again.
    return {"X-Should-Retry": "false"} if isinstance(error, TimedOut | DoesNotFit) else {}


def without_paths(message: str, names: Mapping[str, str]) -> str:
    """A message in which paths that `names` knows have their name, and others their last part alone."""
    for path in sorted(names, key=len, reverse=True):
        message = message.replace(path, names[path])
    return re.sub(r"(?<![\w.:/])(?:~|\.{1,2})?/(?:[^\s/'\",;]+/)*([^\s/'\",;]+)", r"\1", message)
