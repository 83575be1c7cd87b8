"""`/v1/messages`, asked by the `anthropic` package, and in the words of agents that are made for it."""

import json

import anthropic
import httpx
import pytest
from pydantic import BaseModel

from offload_decode.server.messages import read_messages
from offload_decode.server.requests import (
    TEMPLATE_OPTIONS,
    Busy,
    Loading,
    NoSuchName,
    TimedOut,
    ToolCall,
    WrongField,
)
from tests.server.fakes import STORED

ASKED = {"model": "book", "max_tokens": 100, "messages": [{"role": "user", "content": "Who wrote it?"}]}
TOOL = {"name": "find", "description": "Find.", "input_schema": {"type": "object"}, "cache_control": None}
FUNCTION = {"name": "find", "description": "Find.", "parameters": {"type": "object"}}


@pytest.fixture
def client(url):
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=20)


def text(text, **more):
    return {"type": "text", "text": text, **more}


def asked(service, url, **body):
    """What the service is asked, and the warnings of the answer."""
    answer = httpx.post(f"{url}/v1/messages", json={**ASKED, **body})
    assert answer.status_code == 200, answer.text
    return service.tickets[-1].asked, answer.json().get("warnings")


def test_an_answer(client):
    answer = client.messages.create(**ASKED)
    (block,) = answer.content
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", "book")
    assert (block.type, block.text) == ("text", "Who wrote it?")
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    used = answer.usage
    assert (used.input_tokens, used.output_tokens) == (0, len("Who wrote it?"))
    assert (used.cache_read_input_tokens, used.cache_creation_input_tokens) == (STORED, 0)


def test_fields_of_a_request_reach_the_service(client, service):
    client.messages.create(
        **ASKED,
        system="Be brief.",
        stop_sequences=["END", "\n"],
        extra_body={"selector": "quest", "citations": True, "temperature": 0.5, "top_p": 0.9},
    )
    given = service.tickets[0].asked
    written = given.generation
    assert (written.max_tokens, written.temperature, written.top_p) == (100, 0.5, 0.9)
    assert (written.stop, given.selector, given.cite) == (("END", "\n"), "quest", True)
    assert given.messages[0] == {"role": "system", "content": "Be brief."}


def test_a_stream_tells_of_the_answer_as_it_grows(client, service):
    service.reasoning = "Hm."
    events = list(
        client.messages.create(**ASKED | {"messages": [{"role": "user", "content": "Who?"}]}, stream=True)
    )
    assert [event.type for event in events] == [
        "message_start",
        *["content_block_start", "content_block_delta", "content_block_stop"],
        *["content_block_start", *["content_block_delta"] * 4, "content_block_stop"],
        "message_delta",
        "message_stop",
    ]
    assert events[0].message.usage.cache_read_input_tokens == STORED
    assert (events[0].message.content, events[0].message.stop_reason) == ([], None)
    assert events[2].delta.thinking == "Hm."
    assert [event.index for event in events[1:-2]] == [0, 0, 0, 1, 1, 1, 1, 1, 1]
    assert (events[-2].delta.stop_reason, events[-2].usage.output_tokens) == ("end_turn", 4)


def test_the_package_puts_a_stream_together_as_the_whole_answer(client, service):
    service.reasoning, service.calls = (
        "Hm.",
        (ToolCall("c1", "find", '{"name": "Ä"}'), ToolCall("c2", "find", "{}")),
    )
    how = {**ASKED, "tools": [TOOL], "extra_body": {"citations": True}}
    whole = client.messages.create(**how)
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert (whole.content[2].id, whole.content[2].name, whole.content[2].input) == (
        "c1",
        "find",
        {"name": "Ä"},
    )
    assert whole.stop_reason == "tool_use"
    assert whole.to_dict()["citations"][0]["name"] == "minutes.txt"
    with client.messages.stream(**how) as stream:
        events = list(stream)
        last = stream.get_final_message()
    assert [one.to_dict() for one in last.content] == [one.to_dict() for one in whole.content]
    assert (last.stop_reason, last.usage) == (whole.stop_reason, whole.usage)
    (delta,) = [event for event in events if event.type == "message_delta"]
    assert delta.to_dict()["citations"] == whole.to_dict()["citations"]


@pytest.mark.parametrize(
    ("stop", "finish", "told"),
    [("?", None, ("stop_sequence", "?")), (None, None, ("end_turn", None)), (None, 3, ("max_tokens", None))],
)
def test_why_an_answer_ended(client, service, stop, finish, told):
    service.stop = stop
    answer = client.messages.create(**ASKED | {"max_tokens": finish or 100})
    assert (answer.stop_reason, answer.stop_sequence) == told


@pytest.mark.parametrize(
    ("choice", "chosen"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "find"}, {"type": "function", "function": {"name": "find"}}),
    ],
)
def test_tools_and_which_of_them_is_called(client, service, choice, chosen):
    client.messages.create(**ASKED, tools=[TOOL], tool_choice=choice)
    given = service.tickets[0].asked
    assert (given.tools, given.tool_choice) == ([{"type": "function", "function": FUNCTION}], chosen)
    assert given.parallel_calls
    client.messages.create(**ASKED, tools=[TOOL], tool_choice={**choice, "disable_parallel_tool_use": True})
    assert not service.tickets[1].asked.parallel_calls


def test_blocks_are_the_messages_of_a_chat(service, url):
    used = {"type": "tool_use", "id": "c1", "name": "find", "input": {"name": "Ä"}}
    results = [
        {"type": "tool_result", "tool_use_id": "c1", "content": [text("Ada"), text("Grace")]},
        {"type": "tool_result", "tool_use_id": "c2", "content": "gone", "is_error": True},
        {"type": "tool_result", "tool_use_id": "c3"},
    ]
    sources = [
        {
            "type": "document",
            "source": {"type": "text", "media_type": "text/plain", "data": "A."},
            "title": "a",
        },
        {"type": "document", "source": {"type": "content", "content": [text("B."), text("C.")]}},
        {"type": "search_result", "source": "https://x", "title": "d", "content": [text("D.")]},
    ]
    given, warnings = asked(
        service,
        url,
        model="tiny",
        system=[text("Be brief.", cache_control={"type": "ephemeral"}), text("Be kind.")],
        messages=[
            {"role": "user", "content": [text("Who?"), *sources]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": ""},
                    text("I "),
                    text("look."),
                    used,
                ],
            },
            {"role": "user", "content": [text("And when?"), *results]},
            {"role": "system", "content": "Now."},
        ],
    )
    assert warnings is None
    call = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"name": "Ä"}'}}
    assert given.messages == [
        {"role": "system", "content": "Be brief.\n\nBe kind."},
        {"role": "user", "content": "Who?\n\nDocument: a\nA.\n\nB.\n\nC.\n\nDocument: d\nD."},
        {"role": "assistant", "content": "I look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "Ada\n\nGrace"},
        {"role": "tool", "tool_call_id": "c2", "content": "Error: gone"},
        {"role": "tool", "tool_call_id": "c3", "content": ""},
        {"role": "user", "content": "And when?"},
        {"role": "system", "content": "Now."},
    ]


def test_the_result_of_a_tool_alone_is_a_turn(service, url):
    used = {"type": "tool_use", "id": "c1", "name": "find", "input": {}}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "Ada"}]}
    for before in ([], [{"role": "assistant", "content": [used]}]):
        given, _ = asked(service, url, model="tiny", messages=[*before, result])
        assert [one.role for one in read_messages(given.messages)][-1] == "tool"


def test_what_cannot_be_read_is_passed_over_and_the_answer_says_so(service, url):
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AAAA"}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [image, text("Ada")]}
    given, warnings = asked(
        service,
        url,
        model="tiny",
        messages=[
            {"role": "user", "content": [image, pdf, text("Who?")]},
            {"role": "user", "content": [result]},
        ],
        tools=[
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
            {**TOOL, "type": "custom"},
        ],
    )
    assert [one["content"] for one in given.messages] == ["Who?", "Ada"]
    assert [tool["function"]["name"] for tool in given.tools] == ["find"]
    assert warnings == ["left out, as it is not read here: document, image, web_search_20250305"]


def test_a_request_of_an_agent(service, url):
    agents = {
        "system": [
            text("x-anthropic-billing-header: cc_version=2.1.0; cch=a1b2c;"),
            text("You write code.", cache_control={"type": "ephemeral"}),
        ],
        "metadata": {"user_id": "u"},
        "thinking": {"type": "enabled", "budget_tokens": 31_999},
        "top_k": 40,
        "context_management": {"edits": []},
        "max_tokens": 32_000,
        "service_tier": "auto",
    }
    answer = httpx.post(
        f"{url}/v1/messages?beta=true",
        json={**ASKED, **agents},
        headers={
            "anthropic-version": "2023-06-01",
            "anthropic-beta": "context-1m-2025-08-07",
            "x-api-key": "k",
        },
    )
    assert answer.status_code == 200, answer.text
    given = service.tickets[-1].asked
    assert given.messages[0]["content"] == "You write code."
    assert given.template_options == {"enable_thinking": True}
    assert "stands behind the stored corpus" in answer.json()["warnings"][0]


def test_how_much_a_model_thinks(service, url):
    def options(**body):
        return asked(service, url, **body)[0].template_options

    assert options() == {}
    assert options(thinking={"type": "disabled"}) == {"enable_thinking": False}
    assert options(thinking={"type": "adaptive"}, output_config={"effort": "low"}) == {
        "reasoning_effort": "low",
        "enable_thinking": True,
    }


@pytest.mark.parametrize("stream", [False, True])
def test_a_store_that_begins_otherwise_is_asked_as_it_is(client, service, stream):
    def refuses(given, emit):
        if given.template_options:
            raise WrongField("these variables change how the prompt begins", TEMPLATE_OPTIONS)
        return chat(given, emit)

    chat, service.chat = service.chat, refuses
    answer = client.messages.create(**ASKED, thinking={"type": "disabled"}, stream=stream)
    told = next(iter(answer)).message if stream else answer
    assert told.to_dict()["warnings"] == [
        "the model thinks as it does by default, because these variables change how the prompt begins"
    ]


def test_json_of_a_schema(client, service):
    class Person(BaseModel):
        name: str

    said = json.dumps({"name": "Ada"})
    answer = client.messages.parse(
        **ASKED | {"messages": [{"role": "user", "content": said}]}, output_format=Person
    )
    assert answer.parsed_output == Person(name="Ada")
    generation = service.tickets[0].asked.generation
    assert generation.grammar["json_schema"]["properties"]["name"]["type"] == "string"
    assert generation.grammar_field == "output_config.format"


def test_tokens_are_counted_with_the_stored_ones(client):
    counted = client.messages.count_tokens(
        model="book", messages=ASKED["messages"], system="Be brief.", tools=[TOOL]
    )
    extra = 1  # the fake's first token
    assert counted.input_tokens == STORED + extra + len("Who wrote it?Be brief.find")
    counted = client.messages.count_tokens(
        model="tiny", messages=ASKED["messages"], tools=[TOOL], tool_choice={"type": "none"}
    )
    assert counted.input_tokens == extra + len("Who wrote it?")


def test_models_are_listed(client):
    listed = list(client.models.list())
    assert [(one.id, one.display_name, one.type) for one in listed] == [
        ("book", "book", "model"),
        ("tiny", "tiny", "model"),
    ]
    assert client.models.retrieve("book").created_at.year == 2023


@pytest.mark.parametrize(
    ("fault", "status", "kind"),
    [
        (WrongField("no such token", "x"), 400, "invalid_request_error"),
        (NoSuchName("nothing here is called so"), 404, "not_found_error"),
        (Busy("256 requests wait", 7), 429, "rate_limit_error"),
        (Loading("the model is being loaded", 2), 503, "overloaded_error"),
        (TimedOut("it took too long"), 504, "timeout_error"),
        (ZeroDivisionError("/srv/secret"), 500, "api_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_anthropics(client, service, fault, status, kind, stream):
    service.fault = fault
    with pytest.raises(anthropic.APIStatusError) as caught:
        client.messages.create(**ASKED, stream=stream)
    error = caught.value
    assert error.status_code == status
    assert error.body["type"] == "error"
    assert {*error.body["error"]} == {"type", "message"}
    assert error.body["error"]["type"] == kind
    assert "secret" not in error.message
    assert error.body["request_id"] == error.response.headers["x-request-id"]


def test_an_error_in_a_stream_ends_it(client, service):
    service.late = TimedOut("it took too long")
    with pytest.raises(anthropic.APIStatusError, match="it took too long"):
        list(client.messages.create(**ASKED, stream=True))


def test_pings_keep_a_silent_stream_open(url, service, monkeypatch):
    monkeypatch.setattr("offload_decode.server.http.streaming.QUIET_S", 0.02)
    service.wait_s = 0.1
    with httpx.stream("POST", f"{url}/v1/messages", json={**ASKED, "stream": True}) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert lines[:2] == ["event: ping", 'data: {"type": "ping"}']
    assert lines[-2:] == ["event: message_stop", 'data: {"type":"message_stop"}']


@pytest.mark.parametrize(
    "wrong",
    [
        {"messages": []},
        {"messages": [{"role": "king", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]},
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "x"}]}]},
        {"max_tokens": 0},
        {"tools": [{"name": "find"}]},
        {"tools": [TOOL], "tool_choice": {"type": "tool"}},
        {"tool_choice": {"type": "sometimes"}},
        {"output_config": {"format": {"type": "json_schema"}}},
    ],
)
def test_a_field_that_cannot_be_is_refused(url, wrong):
    answer = httpx.post(f"{url}/v1/messages", json={**ASKED, **wrong})
    assert (answer.status_code, answer.json()["type"]) == (400, "error")
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("how", [{"api_key": "sesame"}, {"auth_token": "sesame", "api_key": None}])
def test_a_key_is_taken_as_each_client_sends_it(serve, how):
    url = serve(keys=("sesame",))
    assert (
        anthropic.Anthropic(base_url=url, **how).messages.create(**ASKED).content[0].text == "Who wrote it?"
    )
    sent = httpx.post(f"{url}/v1/messages", json=ASKED, headers={"X-Api-Key": "sesame"})
    assert sent.status_code == 200
    for headers in ({}, {"X-Api-Key": "open"}, {"X-Api-Key": ""}):
        refused = httpx.post(f"{url}/v1/messages", json=ASKED, headers=headers)
        assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
