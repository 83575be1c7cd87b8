"""Errors as OpenAI's clients read them, `{"error": {message, type, param, code}}` with a status; and how the
server is seen from outside: `/health`, `/metrics`, and a line in the log for each request, with its id.

A remote client gets the sentence that the command line would print, without the server's paths; the log has
all of it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from uuid import uuid4

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from offload_decode.common.errors import (
    BucketError,
    ConfigError,
    CorpusError,
    DoesNotFit,
    NotCompiled,
    OffloadDecodeError,
    StoreBusy,
    StoreExists,
    StoreIncomplete,
    StoreNotFound,
    UnknownIndex,
)
from offload_decode.common.memory import OUT_OF_MEMORY, is_out_of_memory
from offload_decode.server.metrics import log_fields, logged_request
from offload_decode.server.requests import Busy, Loading, NoSuchName, ReadOnly, TimedOut, TooLarge, WrongField

if TYPE_CHECKING:
    from offload_decode.server.service import Service


LOG = logging.getLogger("offload_decode.server")


class Problem(BaseModel):
    """An error: a sentence, and names for programs."""

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
"""For the OpenAPI document."""


STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}, **RESPONSES}
"""Of routes whose answers may be streamed."""


class Refusal(NamedTuple):
    """The response to an error."""

    status: int
    body: ErrorBody
    headers: Mapping[str, str] = {}

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
    for kind, status, type_, code in _KINDS:
        if isinstance(error, kind):
            if status >= 500 and not isinstance(error, Busy | TimedOut):
                LOG.error("%s: %s", type(error).__name__, error)
            param = error.param if isinstance(error, WrongField) else None
            headers = {}
            if isinstance(error, Busy):
                headers = {"Retry-After": str(max(1, error.retry_s))}
            elif isinstance(error, TimedOut | DoesNotFit):  # another try would only take the same time again
                headers = {"X-Should-Retry": "false"}
            return refusal(status, without_paths(str(error), names or {}), code, type_, param, **headers)
    if is_out_of_memory(error):
        LOG.error("%s", OUT_OF_MEMORY, exc_info=error)
        message = "the server is out of memory: ask for less, or try again later"
        return refusal(503, message, "out_of_memory", "server_error")
    LOG.error("unexpected %s", type(error).__name__, exc_info=error)
    under = f", under {number}" if (number := log_fields().get("request_id")) else ""
    message = f"something went wrong in the server; its log says what{under}"
    return refusal(500, message, None, "server_error")


def refusal(
    status: int,
    message: str,
    code: str | None = None,
    type: str = "invalid_request_error",
    param: str | None = None,
    **headers: str,
) -> Refusal:
    """An error that is no exception's."""
    return Refusal(
        status, ErrorBody(error=Problem(message=message, type=type, param=param, code=code)), headers
    )


def known_names(service: Service) -> dict[str, str]:
    """The names that clients know of stores and models, by their paths."""
    entries = service.catalog.entries()
    stores = {str(entry.path): entry.name for entry in entries if entry.path is not None}
    return {entry.model_id: entry.base for entry in entries} | stores


def without_paths(message: str, names: Mapping[str, str]) -> str:
    """A message in which paths that `names` knows have their name, and others their last part alone."""
    for path in sorted(names, key=len, reverse=True):
        message = message.replace(path, names[path])
    return re.sub(r"(?<![\w.:/])(?:~|\.{1,2})?/(?:[^\s/'\",;]+/)*([^\s/'\",;]+)", r"\1", message)


HEADER = "X-Request-Id"
HUNG_UP = 499
"""The status of a request whose client left before an answer began, as nginx logs it."""
_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
_QUIET = ("/health", "/metrics")


class Health(BaseModel):
    """Whether requests are answered: `loading` until the first model is in memory. Numbers of models in
    memory, and of stores that are open; no names, as nobody needs a key to ask.
    """

    status: Literal["ok", "loading"]
    models_loaded: int
    stores_open: int


class RequestLog:
    """Middleware around all others: gives every request an id, its client's own where that is a plain one,
    sends it back, and logs the request when it ends.
    """

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER, "")
        number = given if _ID.fullmatch(given) else uuid4().hex
        level = logging.DEBUG if scope["path"] in _QUIET else logging.INFO
        with logged_request(level, request_id=number, method=scope["method"]) as fields:

            async def sent(message: Message) -> None:
                if message["type"] == "http.response.start":
                    fields["status"] = message["status"]
                    MutableHeaders(scope=message)[HEADER] = number
                await send(message)

            try:
                await self.app(scope, receive, sent)
            finally:
                path = getattr(scope.get("route"), "path", None)  # as it is declared, where there is one
                fields["route"] = str(path or scope["path"][:200])
                fields.setdefault("status", HUNG_UP)


def router() -> APIRouter:
    """The routes; the app's `state.service` is asked."""
    routes = APIRouter(tags=["server"])

    @routes.get("/health", responses={503: {"model": Health, "description": "The first model is loading."}})
    def health(request: Request, response: Response) -> Health:
        """Whether requests are answered."""
        loaded_models = request.app.state.service.loaded_models
        models = loaded_models.models()
        loading = loaded_models.loading() and not models
        response.status_code = 503 if loading else 200
        return Health(
            status="loading" if loading else "ok",
            models_loaded=len(models),
            stores_open=len(loaded_models.open_stores()),
        )

    @routes.get("/metrics", response_class=PlainTextResponse)
    def metrics(request: Request) -> Response:
        """Everything that is counted and timed, for Prometheus."""
        return Response(request.app.state.service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    return routes


_SENTENCES = {
    400: "the body cannot be read",
    404: "there is nothing at this address",
    405: "this address does not take that method",
}


class ErrorResponses:
    """Middleware that turns an exception into its response. An answer that has begun is cut off."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def sent(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self.app(scope, receive, sent)
        except Exception as error:
            if begun or scope["type"] != "http":
                raise
            names = known_names(scope["app"].state.service)
            await refused(error, names).response()(scope, receive, send)


def add_handlers(app: FastAPI) -> None:
    """Let every error of the app become a response."""

    async def wrong(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return invalid(error.errors(), error.body).response()

    async def status(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = _SENTENCES.get(error.status_code, str(error.detail))
        headers = dict(error.headers or {})
        if error.status_code == 405:  # a framework's own header names the methods of the first route alone
            methods = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
            scopes = {method: {**request.scope, "method": method} for method in methods}
            routes = request.app.router.routes
            allowed = (one for one in methods if any(r.matches(scopes[one])[0] is Match.FULL for r in routes))
            headers["Allow"] = ", ".join(allowed)
        return refusal(error.status_code, message, **headers).response()

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=HUNG_UP)  # nobody reads it

    app.add_exception_handler(RequestValidationError, wrong)
    app.add_exception_handler(HTTPException, status)
    app.add_exception_handler(ClientDisconnect, gone)
    app.add_middleware(ErrorResponses)


def invalid(errors: Sequence[Any], body: Any) -> Refusal:
    """The response to a body of the wrong shape; it names the innermost field."""
    if errors[0]["type"] == "json_invalid":
        return refusal(
            400, f"the body is not JSON: {errors[0]['ctx']['error']} at position {errors[0]['loc'][1]}"
        )
    if isinstance(body, bytes | str | None) and len(errors[0]["loc"]) == 1:
        return refusal(400, "send a JSON object, with the header Content-Type: application/json")
    first = max(errors, key=lambda error: len(error["loc"]))
    name = _field(first["loc"], body)
    reason = first["msg"].removeprefix("Value error, ")
    reason = reason[:1].lower() + reason[1:]
    return refusal(400, f"{name}: {reason}" if name else reason, param=name or None)


def _field(place: Sequence[int | str], body: Any) -> str:
    """`messages[0].role`: where in the body, without what pydantic says of unions on the way."""
    name, at = "", body
    for step in place[1:]:
        missing = step is place[-1] and isinstance(at, Mapping)
        if isinstance(step, int):
            name += f"[{step}]"
            at = at[step] if isinstance(at, list) and step < len(at) else None
        elif missing or (isinstance(at, Mapping) and step in at):
            name += f".{step}" if name else step
            at = at.get(step)
    return name
