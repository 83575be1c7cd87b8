"""`/v1/models`: every name that can be asked. Nothing is loaded to tell them."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, Request
from openai.types import Model
from pydantic import BaseModel

from offload_decode.server.catalog import Entry
from offload_decode.server.http.answers import service_of
from offload_decode.server.http.errors import RESPONSES

OWNER = "offload-decode"


class ServedModel(Model):
    """A store, or a model without a corpus. `root` is the model that answers; `parent` the name of that model
    where this one is a store. `tokens` and `documents` are the store's.
    """

    root: str
    parent: str | None = None
    tokens: int
    documents: int


class ModelList(BaseModel):
    """All names."""

    object: Literal["list"] = "list"
    data: list[ServedModel]


def router() -> APIRouter:
    """The routes; the app's `state.service` is asked."""
    routes = APIRouter(tags=["models"])

    @routes.get("/v1/models", responses=RESPONSES)
    def models(request: Request) -> ModelList:
        """All stores, each by its name, and the models themselves."""
        return ModelList(data=[_model(entry) for entry in service_of(request).catalog.entries()])

    @routes.get("/v1/models/{name:path}", responses=RESPONSES)
    def model(request: Request, name: str) -> ServedModel:
        """One of them."""
        return _model(service_of(request).catalog.entry(name))

    return routes


def _model(entry: Entry) -> ServedModel:
    return ServedModel(
        id=entry.name,
        object="model",
        created=entry.created,
        owned_by=OWNER,
        root=entry.base,
        parent=None if entry.path is None else entry.base,
        tokens=entry.tokens,
        documents=entry.documents,
    )
