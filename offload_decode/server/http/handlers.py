"""How errors leave the app: whatever is raised becomes a response in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from offload_decode.server.http import seeing
from offload_decode.server.http.errors import ErrorBody, Problem, Refusal, known_names, refusal, refused

_SENTENCES = {
    400: "the body cannot be read",
    404: "there is nothing at this address",
    405: "this address does not take that method",
}


class Caught:
    """Answers what its app raises. An answer that has begun is cut off."""

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
        said = _SENTENCES.get(error.status_code, str(error.detail))
        headers = dict(error.headers or {})
        if error.status_code == 405:  # a framework's own header names the methods of the first route alone
            headers["Allow"] = ", ".join(_allowed(request))
        return refusal(error.status_code, said, **headers).response()

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=seeing.HUNG_UP)  # nobody reads it

    app.add_exception_handler(RequestValidationError, wrong)
    app.add_exception_handler(HTTPException, status)
    app.add_exception_handler(ClientDisconnect, gone)
    app.add_middleware(Caught)


def _allowed(request: Request) -> list[str]:
    """The methods that the address of a request takes."""
    return [
        method
        for method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
        if any(
            route.matches({**request.scope, "method": method})[0] is Match.FULL
            for route in request.app.router.routes
        )
    ]


def invalid(errors: Sequence[Any], body: Any) -> Refusal:
    """A body that is not of the shape it must be; says so of the field that is furthest in."""
    if errors[0]["type"] == "json_invalid":
        return refusal(
            400, f"the body is not JSON: {errors[0]['ctx']['error']} at position {errors[0]['loc'][1]}"
        )
    if isinstance(body, bytes | str | None) and len(errors[0]["loc"]) == 1:
        return refusal(400, "send a JSON object, with the header Content-Type: application/json")
    first = max(errors, key=lambda error: len(error["loc"]))
    name = _field(first["loc"], body)
    message = f"{name}: {_lowered(first['msg'])}" if name else _lowered(first["msg"])
    return Refusal(
        400,
        ErrorBody(error=Problem(message=message, type="invalid_request_error", param=name or None)),
        {},
    )


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


def _lowered(message: str) -> str:
    message = message.removeprefix("Value error, ")
    return message[:1].lower() + message[1:]
