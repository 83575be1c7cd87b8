"""Errors as OpenAI's clients read them, `{"error": {message, type, param, code}}` with a status; and how the
server is seen from outside: `/health`, `/metrics`, and a line in the log for each request, with its id.

A remote client gets the sentence that the command line would print, without the server's paths; the log has
all of it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal
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
    ContextEnds,
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


MESSAGES = "/v1/messages"
"""Whose clients read errors in Anthropic's shape."""


class AnthropicProblem(BaseModel):
    """An error: a sentence, and a name for programs."""

    type: str
    message: str


class AnthropicError(BaseModel):
    """The body of a response of `/v1/messages` that is an error."""

    type: Literal["error"]
    error: AnthropicProblem
    request_id: str | None


RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "The request cannot be answered as it is."},
    "5XX": {"model": ErrorBody, "description": "The server cannot answer."},
}
"""For the OpenAPI document."""
ANTHROPIC_RESPONSES = {status: {**told, "model": AnthropicError} for status, told in RESPONSES.items()}
STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}, **RESPONSES}
"""Of routes whose answers may be streamed."""
_TYPES = {429: "rate_limit_error", 500: "server_error", 503: "server_error", 504: "timeout_error"}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_KINDS: Mapping[type, tuple[int, str | None]] = {
    **dict.fromkeys((ConfigError, UnknownIndex, NotCompiled, CorpusError), (400, None)),
    ContextEnds: (400, "context_length_exceeded"),
    ReadOnly: (403, "read_only"),
    NoSuchName: (404, "model_not_found"),
    StoreNotFound: (404, "model_not_found"),
    StoreExists: (409, "exists"),
    TooLarge: (413, "too_large"),
    Busy: (429, "busy"),
    OffloadDecodeError: (500, None),
    Loading: (503, "loading"),
    StoreIncomplete: (503, "incomplete"),
    StoreBusy: (503, "busy"),
    DoesNotFit: (503, "does_not_fit"),
    BucketError: (503, None),
    TimedOut: (504, "timeout"),
}
"""The status and code of an error, by the nearest of its classes."""


class Refusal(JSONResponse):
    """The response to an error, in the shape that the clients of its address read."""

    def __init__(
        self, status: int, message: str, code: str | None = None, param: str | None = None, **headers: str
    ):
        type = _TYPES.get(status, "invalid_request_error")
        self.error = ErrorBody(error=Problem(message=message, type=type, param=param, code=code))
        super().__init__(self.error.model_dump(), status, headers)

    @property
    def anthropic(self) -> AnthropicError:
        """The error in Anthropic's shape."""
        other = "invalid_request_error" if self.status_code < 500 else "api_error"
        type, sentence = _ANTHROPIC_TYPES.get(self.status_code, other), self.error.error.message
        problem, id = AnthropicProblem(type=type, message=sentence), log_fields().get("request_id")
        return AnthropicError(type="error", error=problem, request_id=None if id is None else str(id))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"].startswith(MESSAGES):
            self.body = self.render(self.anthropic.model_dump())
            self.headers["content-length"] = str(len(self.body))
        await super().__call__(scope, receive, send)


def refused(error: Exception, names: Mapping[str, str] | None = None) -> Refusal:
    """The response to an error. `names` are those of the stores, by their paths."""
    known = next((_KINDS[kind] for kind in type(error).__mro__ if kind in _KINDS), None)
    if known is not None:
        status, code = known
        headers = {}
        if isinstance(error, Busy):
            headers = {"Retry-After": str(max(1, error.retry_s))}
        elif isinstance(error, TimedOut | DoesNotFit):  # another try would only take the same time again
            headers = {"X-Should-Retry": "false"}
        if status >= 500 and not isinstance(error, Busy | TimedOut):
            LOG.error("%s: %s", type(error).__name__, error)
        param = error.param if isinstance(error, WrongField) else None
        return Refusal(status, without_paths(str(error), names or {}), code, param, **headers)
    if is_out_of_memory(error):
        LOG.error("%s", OUT_OF_MEMORY, exc_info=error)
        return Refusal(503, "the server is out of memory: ask for less, or try again later", "out_of_memory")
    LOG.error("unexpected %s", type(error).__name__, exc_info=error)
    under = f", under {number}" if (number := log_fields().get("request_id")) else ""
    return Refusal(500, f"something went wrong in the server; its log says what{under}")


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
        id = Headers(scope=scope).get(HEADER, "")
        number = id if _ID.fullmatch(id) else uuid4().hex
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
        known = request.app.state.service.loaded_models
        models, stores = len(known.models()), len(known.open_stores())
        loading = known.loading() and not models
        response.status_code = 503 if loading else 200
        return Health(status="loading" if loading else "ok", models_loaded=models, stores_open=stores)

    @routes.get("/metrics", response_class=PlainTextResponse)
    def metrics(request: Request) -> Response:
        """Everything that is counted and timed, for Prometheus."""
        return Response(request.app.state.service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    return routes


_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
_SENTENCES = {
    400: "the body cannot be read",
    404: "there is nothing at this address: /v1/chat/completions, /v1/completions, /v1/responses and "
    "/v1/messages answer, /v1/models tells of whom, and /openapi.json lists all",
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
            await refused(error, names)(scope, receive, send)


def add_handlers(app: FastAPI) -> None:
    """Let every error of the app become a response."""

    def allowed(request: Request) -> str:
        """A framework's own header names the methods of the first route alone."""
        scopes = {one: {**request.scope, "method": one} for one in _METHODS}
        routes = request.app.router.routes
        return ", ".join(
            one for one in _METHODS if any(r.matches(scopes[one])[0] is Match.FULL for r in routes)
        )

    @app.exception_handler(RequestValidationError)
    async def wrong(request: Request, error: RequestValidationError) -> Response:
        return invalid(error.errors(), error.body)

    @app.exception_handler(HTTPException)
    async def status(request: Request, error: HTTPException) -> Response:
        methods = {"Allow": allowed(request)} if error.status_code == 405 else {}
        message = _SENTENCES.get(error.status_code, str(error.detail))
        if error.status_code == 404 and request.url.path.endswith("/embeddings"):
            message = "embeddings are not made here: this server answers questions, at /v1/chat/completions"
        return Refusal(error.status_code, message, **{**(error.headers or {}), **methods})

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=HUNG_UP)  # nobody reads it

    app.add_middleware(ErrorResponses)


def invalid(errors: Sequence[Any], body: Any) -> Refusal:
    """The response to a body of the wrong shape; it names the innermost field."""
    first = errors[0]
    if first["type"] == "json_invalid":
        return Refusal(400, f"the body is not JSON: {first['ctx']['error']} at position {first['loc'][1]}")
    if isinstance(body, bytes | str | None) and len(first["loc"]) == 1:
        return Refusal(400, "send a JSON object, with the header Content-Type: application/json")
    inner = max(errors, key=lambda error: len(error["loc"]))
    name = _field(inner["loc"], body)
    reason = inner["msg"].removeprefix("Value error, ")
    reason = reason[:1].lower() + reason[1:]
    return Refusal(400, f"{name}: {reason}" if name else reason, param=name or None)


def _field(place: Sequence[int | str], body: Any) -> str:
    """`messages[0].role`: where in the body, without what pydantic says of unions on the way."""
    name, at = "", body
    for step in place[1:]:
        if isinstance(step, int):
            name += f"[{step}]"
            at = at[step] if isinstance(at, list) and step < len(at) else None
        elif isinstance(at, Mapping) and (step in at or step is place[-1]):
            name += f".{step}" if name else step
            at = at.get(step)
    return name
