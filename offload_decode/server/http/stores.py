"""`/v1/models`, `/v1/stores` and `/v1/jobs`: every name that can be asked; and stores, which are made from
texts and files, listed, appended to, renewed and deleted.

Nothing is fetched from anywhere: documents come with the request, and models are those that the server
already serves. Prefills, appends and renewals take long: they are jobs, whose id is answered at once.
"""

import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Any, Generic, Literal, TypeVar

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from openai.types import Model, ModelDeleted
from pydantic import BaseModel, Field, StringConstraints, ValidationError
from starlette.datastructures import UploadFile

from offload_decode.common.files import parse
from offload_decode.server.catalog import SUFFIX, Entry
from offload_decode.server.http.answers import AppService, Name, Option, Short, WholeBody
from offload_decode.server.http.errors import RESPONSES, known_names, without_paths
from offload_decode.server.job import Job, Kind, Upload
from offload_decode.server.jobs import MOST_DOCUMENTS, JobProgress
from offload_decode.server.requests import TooLarge, WrongField
from offload_decode.server.service import Service
from offload_decode.store.reader import KVStore
from offload_decode.types import Document

FORM = "multipart/form-data"
_MOST_FIELDS, _MOST_FIELD_BYTES = 100, 1 << 20
_MOST_DELETED = 8  # at a time
_JSON_FIELDS = ("documents", "options", "index", "drop")


class Text(BaseModel):
    """A document that is text already."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=500)]
    text: str


class Texts(WholeBody):
    """Documents for a store; in a form, its files are documents too."""

    documents: Annotated[list[Text], Field(default_factory=list, max_length=MOST_DOCUMENTS, fail_fast=True)]

    def uploads(self) -> list[Upload]:
        """The documents as a job takes them."""
        return [_upload(one.name, one.text) for one in self.documents]


class Corpus(Texts):
    """All documents of a store as they are now: edited, in another order, new or gone. `text` is that of the
    only document of a store, or of the one that is called as the store is. `drop`: also where most of those
    that the store has are gone.
    """

    text: str | None = None
    drop: bool = False


class NewStore(Texts):
    """A store to be made, of `documents` or of one `text`, which is called as the store is. `model` is a name
    of `/v1/models` (the only model, where there is one); `kv`, `dtype`, `weights`, `rope`, `system`, `method`
    and `options` (such as `{"chunk": 512}`) are those of `offload-decode prefill`; `index`: build the indexes
    that make asking it fast.
    """

    name: Short
    text: str | None = None
    model: Name | None = None
    kv: Short = "auto"
    dtype: Short | None = None
    weights: Short | None = None
    rope: Short | None = None
    system: str | None = None
    method: Short = "dense"
    options: dict[str, Option] = Field(default_factory=dict)
    index: bool = True


Sent = TypeVar("Sent", bound=Texts)
T = TypeVar("T")


class Listed(BaseModel, Generic[T]):
    """All there are."""

    object: Literal["list"] = "list"
    data: list[T]


class ServedModel(Model):
    """A store, a collection of them, or a model without a corpus. `root` is the model that answers; `parent`
    the name of that model where this one has a corpus. `tokens` and `documents` are those of the corpus, and
    `note` a sentence to know before it is asked. `type`, `display_name` and `created_at` are for Anthropic's
    clients.
    """

    type: Literal["model"] = "model"
    display_name: str
    created_at: datetime
    root: str
    parent: str | None = None
    tokens: int
    documents: int
    collection: bool = False
    note: str | None


class Models(Listed[ServedModel]):
    """All of them, on one page, as Anthropic's clients ask."""

    first_id: str | None
    last_id: str | None
    has_more: Literal[False] = False


class Kept(WholeBody):
    """How long a store is kept: see `StoreDetails`. What is left out stays as it is."""

    pinned: bool = False
    expires_after: Annotated[int, Field(ge=1, le=10**9)] | None = None


class JobError(BaseModel):
    """Why a job failed."""

    message: str


class JobAnswer(BaseModel):
    """A job: `status` is queued, running, done, failed or cancelled; times are in seconds since 1970."""

    id: str
    object: Literal["job"] = "job"
    kind: Kind
    store: str
    status: Literal["queued", "running", "done", "failed", "cancelled"]
    documents: int
    created_at: int
    started_at: int | None
    finished_at: int | None
    progress: JobProgress | None
    result: dict[str, Any] | None
    error: JobError | None


class StoreAnswer(BaseModel):
    """A store: `root` is its model; `recall` is what its indexes measured when they were built."""

    id: str
    object: Literal["store"] = "store"
    created: int
    root: str
    tokens: int
    documents: int
    note: str | None
    recall: float | None
    digest: str


class StoreDetails(StoreAnswer):
    """A store with its documents in order, its size on disk, and how it was made. It is deleted when it was
    not used for `expires_after` seconds, unless that is null or it is `pinned`; `last_used` is in seconds
    since 1970, null where it was not asked since the server began.
    """

    spans: list[Document]
    bytes: int
    pinned: bool
    expires_after: int | None
    last_used: int | None
    dtype: str
    kv: dict[str, str]
    prefill: dict[str, Any]
    template: str


def router() -> APIRouter:
    """The routes; the app's `state.service` is asked."""
    routes = APIRouter()
    more: dict[str, Any] = {"tags": ["stores"], "responses": RESPONSES}
    # They wait for answers to end: in threads of their own, so that other requests find one.
    deleting = CapacityLimiter(_MOST_DELETED)

    @routes.get("/v1/models", tags=["models"], responses=RESPONSES)
    def models(service: AppService) -> Models:
        """All stores, each by its name, and the models themselves. Nothing is loaded to tell them."""
        found = [_model(entry) for entry in service.catalog.entries()]
        first, last = (found[0].id, found[-1].id) if found else (None, None)
        return Models(data=found, first_id=first, last_id=last)

    @routes.get("/v1/models/{name:path}", tags=["models"], responses=RESPONSES)
    def model(service: AppService, name: str) -> ServedModel:
        """One of them."""
        return _model(service.catalog.entry(name))

    @routes.get("/v1/stores", **more)
    def stores(service: AppService) -> Listed[StoreAnswer]:
        """All stores."""
        entries = [entry for entry in service.catalog.entries() if entry.is_store]
        return Listed(data=[StoreAnswer(**_fields(entry, "recall", "digest")) for entry in entries])

    @routes.post("/v1/stores", status_code=202, openapi_extra=_body(NewStore), **more)
    async def create(request: Request, service: AppService) -> JobAnswer:
        """Make a store: as JSON, or as a form with the same fields and files (text, HTML, PDF, Word)."""
        async with _sent(request, NewStore, service.settings.max_body) as (asked, documents):
            fields = asked.model_dump(include={"kv", "system", "method", "options", "index"})
            fields |= asked.model_dump(include={"dtype", "weights", "rope"}, exclude_none=True)
            if asked.text is not None:
                documents = [_upload(asked.name.removesuffix(SUFFIX), asked.text), *documents]
            job = await run_sync(partial(service.jobs.prefill, asked.name, asked.model, documents, **fields))
        return _job(service, job)

    @routes.get("/v1/stores/{name}", **more)
    def store(service: AppService, name: Name) -> StoreDetails:
        """One store, with its documents."""
        return _details(service, name)

    @routes.post("/v1/stores/{name}", **more)
    def keep(service: AppService, name: Name, asked: Kept) -> StoreDetails:
        """Pin a store, or say after how many seconds without a use it expires."""
        service.jobs.keep(name, **asked.model_dump(include={"pinned", "expires_after"}, exclude_unset=True))
        return _details(service, name)

    @routes.post("/v1/stores/{name}/append", status_code=202, openapi_extra=_body(Texts), **more)
    async def append(request: Request, service: AppService, name: Name) -> JobAnswer:
        """Add documents to a store, as JSON or as a form with files."""
        async with _sent(request, Texts, service.settings.max_body) as (_, documents):
            job = await run_sync(service.jobs.append, name, documents)
        return _job(service, job)

    @routes.post("/v1/stores/{name}/renew", status_code=202, openapi_extra=_body(Corpus), **more)
    async def renew(request: Request, service: AppService, name: Name) -> JobAnswer:
        """Make a store what its documents are now, as JSON or as a form with files: all of them are sent."""
        async with _sent(request, Corpus, service.settings.max_body) as (asked, documents):
            if asked.text is not None:
                documents = [_upload(await run_sync(_text_of, service, name), asked.text), *documents]
            job = await run_sync(service.jobs.renew, name, documents, asked.drop)
        return _job(service, job)

    @routes.delete("/v1/stores/{name}", **more)
    async def delete(service: AppService, name: Name) -> ModelDeleted:
        """Delete a store: its name goes at once, its files when no answer reads them any more."""
        await run_sync(service.jobs.delete, name, limiter=deleting)
        return ModelDeleted(id=name, object="store", deleted=True)

    @routes.get("/v1/jobs", **more)
    def jobs(service: AppService) -> Listed[JobAnswer]:
        """Jobs, the newest first; those that are over are kept for a while."""
        return Listed(data=[_job(service, job) for job in service.jobs.jobs()])

    @routes.get("/v1/jobs/{id}", **more)
    def job(service: AppService, id: Name) -> JobAnswer:
        """One job, and how far it is."""
        return _job(service, service.jobs.job(id))

    @routes.post("/v1/jobs/{id}/cancel", **more)
    def cancel(service: AppService, id: Name) -> JobAnswer:
        """Stop a job, and remove what it has written so far."""
        return _job(service, service.jobs.cancel(id))

    @routes.post("/v1/jobs/{id}/retry", **more)
    def retry(service: AppService, id: Name) -> JobAnswer:
        """Have a job that failed go on where it stopped."""
        return _job(service, service.jobs.retry(id))

    return routes


def _body(shape: type[BaseModel]) -> dict[str, Any]:
    """For the OpenAPI document: a body that is JSON or a form."""
    plain = shape.model_json_schema()
    plain["properties"]["documents"]["items"] = plain.pop("$defs")[Text.__name__]
    files = {"type": "array", "items": {"type": "string", "format": "binary"}}
    form = {**plain, "properties": {**plain["properties"], "file": files}}
    content = {"application/json": {"schema": plain}, FORM: {"schema": form}}
    return {"requestBody": {"required": True, "content": content}}


@asynccontextmanager
async def _sent(request: Request, shape: type[Sent], most: int) -> AsyncIterator[tuple[Sent, list[Upload]]]:
    """The fields of a request (JSON has `most` bytes) and its documents, which can be read inside the block.
    Raises `WrongField`, `TooLarge` and `RequestValidationError`.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == FORM:
        limits = {"max_files": MOST_DOCUMENTS, "max_fields": _MOST_FIELDS, "max_part_size": _MOST_FIELD_BYTES}
        async with request.form(**limits) as form:
            files = [each for _, each in form.multi_items() if isinstance(each, UploadFile)]
            fields = {
                name: _parsed(value, name) if name in _JSON_FIELDS else value
                for name, value in form.multi_items()
                if isinstance(value, str)
            }
            asked = _checked(shape, fields)
            yield asked, [*asked.uploads(), *(Upload(one.filename or "", one.file) for one in files)]
    elif kind == "application/json":
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > most:
                way = f"send documents as files of a form ({FORM})"
                raise TooLarge(f"JSON may have {most:,} bytes here: {way}")
        asked = await run_sync(lambda: _checked(shape, _parsed(bytes(body), None)))
        yield asked, asked.uploads()
    else:
        raise WrongField(f"send JSON, with the header Content-Type: application/json, or a form ({FORM})")


def _parsed(data: str | bytes, field: str | None) -> Any:
    try:
        return parse(data)
    except ValueError as error:
        raise WrongField(f"{field or 'the body'} is not JSON: {error}", field) from error


def _checked(shape: type[Sent], fields: Any) -> Sent:
    try:
        return shape.model_validate(fields)
    except ValidationError as error:
        found = [{**each, "loc": ("body", *each["loc"])} for each in error.errors()]
        raise RequestValidationError(found, body=fields) from error


def _text_of(service: Service, name: str) -> str:
    """The document of a store whose `text` is given without a name."""
    _, path = service.jobs.store(name)
    documents = KVStore.open(path).documents
    return documents[0].name if len(documents) == 1 else path.name.removesuffix(SUFFIX)


def _upload(name: str, text: str) -> Upload:
    return Upload(name, io.BytesIO(text.encode()), text=True)


def _model(entry: Entry) -> ServedModel:
    parent = None if entry.path is None else entry.base
    created = datetime.fromtimestamp(entry.created, UTC)
    more = {
        "parent": parent,
        "display_name": entry.name,
        "created_at": created,
        **_fields(entry, "collection"),
    }
    return ServedModel(object="model", owned_by="offload-decode", **more)


def _details(service: Service, name: str) -> StoreDetails:
    entry, path = service.jobs.store(name)
    opened, keeping = KVStore.open(path), service.jobs.kept.of(entry)
    made = {name: getattr(opened.manifest, name) for name in ("dtype", "kv", "prefill", "template")}
    return StoreDetails(
        **_fields(entry, "recall", "digest"),
        **made,
        spans=list(opened.documents),
        bytes=sum(opened.cost().values()),
        pinned=keeping.pinned,
        expires_after=keeping.expires_after,
        last_used=None if keeping.last_used is None else int(keeping.last_used),
    )


def _fields(entry: Entry, *more: str) -> dict[str, Any]:
    names = ("created", "tokens", "documents", *more)
    fields = {name: getattr(entry, name) for name in names}
    return {"id": entry.name, "root": entry.base, "note": entry.note or None, **fields}


def _job(service: Service, job: Job) -> JobAnswer:
    reason = None if job.error is None else without_paths(job.error, known_names(service))
    return JobAnswer(
        id=job.id,
        kind=job.work.kind,
        store=job.work.name,
        status=job.state,
        documents=len(job.documents),
        created_at=int(job.created),
        started_at=None if job.started is None else int(job.started),
        finished_at=None if job.ended is None else int(job.ended),
        progress=service.jobs.progress(job.id),
        result=job.result,
        error=None if reason is None else JobError(message=reason),
    )
