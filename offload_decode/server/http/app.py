"""The app: routes, what stands in front of them, and how errors leave it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version

from anyio.to_thread import run_sync
from fastapi import FastAPI, Security
from fastapi.security import HTTPBearer
from starlette.middleware.cors import CORSMiddleware

from offload_decode.server.http import chat, completions, models, page, responses, seeing, stores, tokens
from offload_decode.server.http.handlers import add_handlers
from offload_decode.server.http.security import Access, Guard
from offload_decode.server.service import Service


def create_app(service: Service, access: Access | None = None) -> FastAPI:
    """The HTTP side of a service, which is closed when the app shuts down. `access`: who may ask (all)."""
    access = access or Access()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await run_sync(service.close)

    app = FastAPI(
        title="offload-decode",
        description="Stored corpora behind the OpenAI API.",
        version=version("offload-decode"),
        lifespan=lifespan,
        docs_url=None,  # its pages load scripts from elsewhere
        redoc_url=None,
        dependencies=[Security(HTTPBearer(auto_error=False))] if access.keys else [],
    )
    app.state.service = service
    for room in (chat, completions, responses, models, stores, tokens, seeing, page):
        app.include_router(room.router())
    add_handlers(app)
    limits = service.settings
    guard(app, access, limits.max_body, limits.max_upload)
    return app


def guard(app: FastAPI, access: Access, most: int, uploads: int) -> None:
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
            expose_headers=[seeing.HEADER, "Retry-After"],
        )
    app.add_middleware(seeing.Seen)  # around all others
