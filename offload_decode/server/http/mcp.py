"""The stores of a service as tools of the Model Context Protocol, over standard input and output or HTTP."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Annotated, Any

import anyio
from anyio.to_thread import run_sync
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.transport_security import TransportSecuritySettings
from mcp.types import ToolAnnotations
from pydantic import Field, ValidationError
from starlette.applications import Starlette

from offload_decode.server.catalog import Entry
from offload_decode.server.http.answers import MOST_TOKENS, Name, new_id
from offload_decode.server.http.app import guard
from offload_decode.server.http.errors import invalid, known_names, refused
from offload_decode.server.http.security import Access
from offload_decode.server.http.streaming import Events, Start
from offload_decode.server.requests import AnsweredRequest, Generation, Loading, WrongField
from offload_decode.server.service import ChatRequest, SearchRequest, Service
from offload_decode.types import CitedDocument, Passage

PATH = "/mcp"
MOST_PASSAGES = 50
_POLL_S = 0.2
_INSTRUCTIONS = (
    "Long texts that a language model has read already. list_corpora names them, search_passages finds the "
    "passages that a question is about, and ask answers from the whole text and cites what it attended to."
)
_READS = ToolAnnotations(read_only_hint=True, open_world_hint=False)

Text = Annotated[str, Field(min_length=1, max_length=1 << 17)]
Corpus = Annotated[
    Name | None,
    Field(description="A name that list_corpora tells; may be left out where there is one alone."),
]


@dataclass(frozen=True)
class ListedCorpus:
    """A store: its name, the model that reads it, and how long it is."""

    name: str
    model: str
    tokens: int
    documents: int


@dataclass(frozen=True)
class CitedAnswer:
    """An answer, why it ended (`stop`, or `length` where it was cut), and what it attended to."""

    answer: str
    finish: str
    citations: list[CitedDocument]


class _Server(MCPServer):
    """A server that says in a sentence, as over HTTP, what is wrong with a call's arguments."""

    async def call_tool(self, name: str, arguments: dict[str, Any], context: Any = None) -> Any:
        try:
            return await super().call_tool(name, arguments, context)
        except ToolError as error:
            if not isinstance(error.__cause__, ValidationError):
                raise
            wrong = [{**one, "loc": ("body", *one["loc"])} for one in error.__cause__.errors()]
            raise ToolError(invalid(wrong, arguments).error.error.message) from error.__cause__


def create_server(service: Service) -> MCPServer:
    """The tools of a service, which stays open when the server ends."""
    server = _Server("offload-decode", instructions=_INSTRUCTIONS, version=version("offload-decode"))

    @server.tool(annotations=_READS)
    async def ask(
        question: Text,
        store: Corpus = None,
        max_tokens: Annotated[
            int | None, Field(ge=1, le=MOST_TOKENS, description="Most tokens of the answer.")
        ] = None,
    ) -> CitedAnswer:
        """Answer a question from a stored corpus, with the documents and passages that it attended to."""

        def start(name: str) -> Start:
            how = Generation(max_tokens, service.settings.temperature, service.settings.top_p)
            messages = [{"role": "user", "content": question}]
            return partial(service.chat, ChatRequest(new_id("mcp"), name, how, cite=True, messages=messages))

        answered = await _answered(service, store, start)
        assert answered.done is not None, "it ended without an error"
        one = answered.answers[0]
        return CitedAnswer(one.text, one.finish, list(answered.done.citations or ()))

    @server.tool(annotations=_READS)
    async def search_passages(
        query: Text,
        store: Corpus = None,
        limit: Annotated[int, Field(ge=1, le=MOST_PASSAGES, description="Most passages.")] = 5,
    ) -> list[Passage]:
        """Find the passages of a stored corpus that a question attends to, best first: their document, text
        and score. A whole question finds more than a few words.
        """

        def start(name: str) -> Start:
            return partial(service.search, SearchRequest(new_id("mcp"), name, question=query, most=limit))

        answered = await _answered(service, store, start)
        assert answered.done is not None, "it ended without an error"
        return list(answered.done.passages)

    @server.tool(annotations=_READS)
    async def list_corpora() -> list[ListedCorpus]:
        """List the stored corpora that can be asked and searched."""
        return [ListedCorpus(one.name, one.base, one.tokens, one.documents) for one in _corpora(service)]

    return server


def create_app(service: Service, access: Access) -> Starlette:
    """The tools at `PATH`, behind what every request to a server here passes. There are no sessions."""
    app = create_server(service).streamable_http_app(
        streamable_http_path=PATH,
        stateless_http=True,
        max_request_body_size=service.settings.max_body,
        # `guard` checks names and origins.
        transport_security=TransportSecuritySettings(enable_dns_rebinding_protection=False),
    )
    guard(app, access, service.settings.max_body, service.settings.max_upload)
    return app


def _corpora(service: Service) -> list[Entry]:
    return [entry for entry in service.catalog.entries() if entry.is_store]


async def _answered(service: Service, store: str | None, start: Callable[[str], Start]) -> AnsweredRequest:
    """All that a request for a store is told; its model is waited for. Raises `ToolError`."""
    try:
        return await _collected(start(store or _only(service)), service.settings.deadline_s)
    except Exception as error:
        raise ToolError(refused(error, known_names(service)).error.error.message) from error


def _only(service: Service) -> str:
    names = [entry.name for entry in _corpora(service)]
    if len(names) != 1:
        there = "list_corpora tells the names" if names else "there is none yet: publish a store"
        raise WrongField(f"name a store: {there}", "store")
    return names[0]


async def _collected(start: Start, deadline_s: float) -> AnsweredRequest:
    answered, until = AnsweredRequest(), time.monotonic() + deadline_s
    while True:
        events = Events([start])
        try:
            await run_sync(events.begin)
            async for event in events.each():
                if event is not None:
                    answered.add(event[1])
            return answered
        except Loading:
            if time.monotonic() > until:
                raise
        finally:
            if answered.done is None:
                events.cancel()
        await anyio.sleep(_POLL_S)
