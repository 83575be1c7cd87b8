"""How the server is: `/health`, `/metrics`, and a line in the log for each request, with its id."""

from __future__ import annotations

import logging
import re
from typing import Any, Literal
from uuid import uuid4

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from offload_decode.server import logs

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


class Seen:
    """Gives every request an id, its client's own where that is a plain one, sends it back, and logs what
    became of the request. It goes around everything else.
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
        with logs.request(level, request_id=number, method=scope["method"]) as line:

            async def sent(message: Message) -> None:
                if message["type"] == "http.response.start":
                    line["status"] = message["status"]
                    MutableHeaders(scope=message)[HEADER] = number
                await send(message)

            try:
                await self.app(scope, receive, sent)
            finally:
                line["route"] = _route(scope)
                line.setdefault("status", HUNG_UP)


def router() -> APIRouter:
    """The routes; the app's `state.service` is asked."""
    routes = APIRouter(tags=["server"])

    @routes.get("/health", responses={503: {"model": Health, "description": "The first model is loading."}})
    def health(request: Request, response: Response) -> Health:
        """Whether requests are answered."""
        residents = request.app.state.service.residents
        models = residents.models()
        loading = residents.loading() and not models
        response.status_code = 503 if loading else 200
        return Health(
            status="loading" if loading else "ok",
            models_loaded=len(models),
            stores_open=len(residents.open_stores()),
        )

    @routes.get("/metrics", response_class=PlainTextResponse)
    def metrics(request: Request) -> Response:
        """Everything that is counted and timed, for Prometheus."""
        return Response(request.app.state.service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    return routes


def _route(scope: Scope) -> str:
    """The route that was taken, as it is declared; the path where there is none."""
    route: Any = scope.get("route")
    return str(getattr(route, "path", None) or scope["path"][:200])
