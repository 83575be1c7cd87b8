"""The tools of the Model Context Protocol, called by its own client: in this process, and over HTTP."""

import asyncio
from contextlib import AsyncExitStack

import httpx
import httpx2
import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from offload_decode.engine.engine import Engine
from offload_decode.server.http.mcp import MOST_PASSAGES, PATH, create_app, create_server
from offload_decode.server.http.security import LOOPBACK, Access
from tests.server.http.conftest import listening

QUESTION = "What is the colour of thing 3?"


def called(server, *calls):
    """What calls of tools return, each a name and its arguments."""

    async def each():
        async with Client(server) as client:
            return [await client.call_tool(name, arguments) for name, arguments in calls]

    return asyncio.run(each())


def refused(server, name, **arguments):
    """The text of a call that fails."""
    (told,) = called(server, (name, arguments))
    assert told.is_error
    return told.content[0].text


@pytest.fixture
def tools(service):
    return create_server(service)


def test_corpora_are_the_stores_alone(tools):
    (told,) = called(tools, ("list_corpora", {}))
    assert [(one["name"], one["documents"]) for one in told.structured_content["result"]] == [
        ("book", 1),
        ("notes", 1),
    ]


def test_an_answer_and_its_citations_are_the_engine_s(tools, shelf):
    told = Engine.open(shelf / "stores" / "book.kv", options={"budget": "24"}).answer(QUESTION, 8, cites=True)
    (answer,) = called(tools, ("ask", {"question": QUESTION, "store": "book", "max_tokens": 8}))
    found = answer.structured_content
    assert (found["answer"], found["finish"]) == (told.text, told.finish)
    assert [one["name"] for one in found["citations"]] == [one.name for one in told.citations]


def test_passages_are_the_engine_s(tools, shelf):
    found = Engine.open(shelf / "stores" / "book.kv", options={"budget": "24"}).passages(QUESTION, 2)
    (told,) = called(tools, ("search_passages", {"query": QUESTION, "store": "book", "limit": 2}))
    passages = told.structured_content["result"]
    assert found
    assert [(one["document"], one["start"], one["text"]) for one in passages] == [
        (one.document, one.start, one.text) for one in found
    ]


def test_the_only_store_need_not_be_named_and_its_model_is_waited_for(serve, own):
    service = serve(own / "book.kv")
    service.loaded_models._drop(next(iter(service.loaded_models._models)))
    (told,) = called(create_server(service), ("search_passages", {"query": QUESTION}))
    assert told.structured_content["result"]


def test_errors_are_sentences_without_paths(tools, shelf):
    assert "list_corpora tells the names" in refused(tools, "ask", question="Who?")
    missing = refused(tools, "ask", question="Who?", store=str(shelf / "stores" / "none"))
    assert "nothing here is called 'none': there are book, notes" in missing
    assert str(shelf) not in missing
    assert "no corpus to search" in refused(tools, "search_passages", query="Who?", store="model")


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("ask", {"question": ""}),
        ("ask", {"question": "x" * (1 << 18)}),
        ("ask", {"question": "Who?", "store": "x" * 1000}),
        ("ask", {"question": "Who?", "max_tokens": 0}),
        ("search_passages", {"query": "Who?", "limit": MOST_PASSAGES + 1}),
        ("search_passages", {"query": "Who?", "limit": 0}),
    ],
)
def test_arguments_are_bounded(tools, name, arguments):
    assert "1 validation error" in refused(tools, name, **{"store": "book", **arguments})


def test_over_http_a_key_opens_and_the_tools_are_the_same(service):
    call = ("search_passages", {"query": QUESTION, "store": "book"})

    async def over_http(url, key):
        async with AsyncExitStack() as stack:
            headers = {"Authorization": f"Bearer {key}"}
            http = await stack.enter_async_context(httpx2.AsyncClient(headers=headers))
            client = await stack.enter_async_context(Client(streamable_http_client(url, http_client=http)))
            return await client.call_tool(*call)

    (here,) = called(create_server(service), call)
    with listening(create_app(service, Access(keys=("sesame",)))) as url:
        there = asyncio.run(over_http(url + PATH, "sesame"))
        assert there.structured_content == here.structured_content
        assert httpx.post(url + PATH, json={}).status_code == 401


def test_no_page_reaches_it_under_a_name_of_its_own(service):
    with listening(create_app(service, Access(hosts=LOOPBACK))) as url:
        for wrong in ({"Host": "evil.example"}, {"Origin": "https://evil.example"}):
            assert httpx.post(url + PATH, json={}, headers=wrong).status_code == 403


def test_a_body_is_read_up_to_a_limit(serve):
    with listening(create_app(serve(max_body=1000), Access())) as url:
        headers = {"Accept": "application/json, text/event-stream"}
        assert httpx.post(url + PATH, json={"x": "x" * 2000}, headers=headers).status_code == 413
