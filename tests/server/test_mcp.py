"""The tools of the Model Context Protocol, called by its own client: in this process, and over HTTP."""

import asyncio
import threading
from contextlib import AsyncExitStack, suppress
from dataclasses import replace

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
    ("name", "arguments", "says"),
    [
        ("ask", {}, "question: field required"),
        ("ask", {"question": ""}, "question: string should have at least 1 character"),
        ("ask", {"question": "x" * (1 << 18)}, "question: string should have at most 131072 characters"),
        ("ask", {"question": "Who?", "store": "x" * 1000}, "store: string should have at most"),
        (
            "ask",
            {"question": "Who?", "max_tokens": 0},
            "max_tokens: input should be greater than or equal to 1",
        ),
        (
            "search_passages",
            {"query": "Who?", "limit": MOST_PASSAGES + 1},
            "limit: input should be less than",
        ),
        ("search_passages", {"query": "Who?", "limit": "many"}, "limit: input should be a valid integer"),
    ],
)
def test_wrong_arguments_are_told_of_in_a_sentence(tools, name, arguments, says):
    told = refused(tools, name, **{"store": "book", **arguments})
    assert told.startswith(says)
    assert "\n" not in told
    assert "pydantic" not in told


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


@pytest.mark.parametrize("remote", [False, True])
def test_a_call_that_is_given_up_frees_its_work(service, monkeypatch, remote):
    begun, cancelled, chat = threading.Event(), threading.Event(), service.chat

    def watched(asked, emit):
        def noted(event):
            begun.set()
            emit(event)

        endless = replace(asked, generation=replace(asked.generation, ignore_end=True, max_tokens=-1))
        ticket = chat(endless, noted)
        return ticket._replace(cancel=lambda: (cancelled.set(), ticket.cancel()))

    async def given_up(client):
        call = asyncio.create_task(client.call_tool("ask", {"question": QUESTION, "store": "book"}))
        assert await asyncio.to_thread(begun.wait, 60)
        call.cancel()
        with suppress(asyncio.CancelledError):
            await call
        assert await asyncio.to_thread(cancelled.wait, 20)

    async def over(server):
        async with Client(server) as client:
            await given_up(client)

    monkeypatch.setattr(service, "chat", watched)
    if remote:
        with listening(create_app(service, Access())) as url:
            asyncio.run(over(url + PATH))
    else:
        asyncio.run(over(create_server(service)))
