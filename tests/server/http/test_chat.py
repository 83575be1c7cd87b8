"""`/v1/chat/completions`, asked by the client that people use."""

import json
import math

import httpx
import openai
import pytest

from offload_decode.server.requests import Busy, Loading, TimedOut, ToolCall, WrongField
from tests.server.fakes import STORED

ASKED = {"model": "book", "messages": [{"role": "user", "content": "Who wrote it?"}]}


def test_an_answer_is_openais(client):
    answer = client.chat.completions.create(**ASKED)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "Who wrote it?")
    assert (choice.finish_reason, choice.logprobs) == ("stop", None)
    assert answer.model == "book"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len("Who wrote it?")
    assert answer.usage.total_tokens == STORED + len("Who wrote it?")
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == STORED


def test_fields_of_a_request_reach_the_service(client, service):
    client.chat.completions.create(
        **ASKED,
        max_completion_tokens=5,
        temperature=0.5,
        top_p=0.9,
        seed=7,
        stop=["\n", "END"],
        n=2,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        logit_bias={"65": -100},
        response_format={"type": "json_schema", "json_schema": {"name": "it", "schema": {"type": "object"}}},
        extra_body={
            "selector": "quest",
            "options": {"budget": "1%", "sinks": 4},
            "deadline": 3.5,
            "citations": True,
        },
    )
    asked = service.tickets[0].asked
    written = asked.generation
    assert (asked.n, asked.selector, asked.options) == (2, "quest", {"budget": "1%", "sinks": 4})
    assert (asked.deadline_s, asked.cite) == (3.5, True)
    assert (written.max_tokens, written.temperature, written.top_p, written.seed) == (5, 0.5, 0.9, 7)
    assert (written.stop, written.logit_bias) == (("\n", "END"), {65: -100.0})
    assert (written.frequency_penalty, written.presence_penalty) == (0.5, -0.5)
    assert written.grammar == {"json_schema": {"type": "object"}}


def test_half_a_character_is_the_replacement_character(url):
    body = r'{"model": "book", "messages": [{"role": "user", "content": "a\ud800\ud83d\ude42"}]}'
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(f"{url}/v1/chat/completions", content=body, headers=headers)
    assert answer.json()["choices"][0]["message"]["content"] == "a\ufffd\N{SLIGHTLY SMILING FACE}"


def test_fields_left_out_default_to_the_servers_settings(client, service):
    client.chat.completions.create(**ASKED, stop="x", temperature=None, n=None)
    written = service.tickets[0].asked.generation
    settings = service.settings
    assert (written.max_tokens, written.temperature) == (None, settings.temperature)
    assert (written.top_p, written.stop, written.top_logprobs) == (settings.top_p, ("x",), None)


def test_a_stream_is_the_answer_in_chunks(client):
    chunks = list(client.chat.completions.create(**ASKED, stream=True, n=2))
    assert [chunk.choices[0].delta.role for chunk in chunks[:2]] == ["assistant", "assistant"]
    for index in range(2):
        own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert "".join(part.delta.content or "" for part in own) == "Who wrote it?"
        assert [part.finish_reason for part in own] == [None] * (len(own) - 1) + ["stop"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert all("usage" not in chunk.to_dict() for chunk in chunks)


def test_the_last_chunk_tells_the_usage_where_it_is_asked_for(client):
    asked = {**ASKED, "stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(**asked))
    assert all(chunk.to_dict()["usage"] is None and chunk.choices for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == STORED


def test_log_probabilities_of_the_tokens_and_of_the_likeliest(client):
    asked = {**ASKED, "logprobs": True, "top_logprobs": 2}
    answer = client.chat.completions.create(**asked)
    content = answer.choices[0].logprobs.content
    assert [one.token for one in content] == list("Who wrote it?")
    assert all(one.logprob == -0.5 and len(one.top_logprobs) == 2 for one in content)
    assert content[0].bytes == [ord("W")]
    streamed = []
    for chunk in client.chat.completions.create(**asked, stream=True):
        if chunk.choices[0].logprobs is not None:
            streamed += chunk.choices[0].logprobs.content
    assert [one.to_dict() for one in streamed] == [one.to_dict() for one in content]


@pytest.mark.parametrize("stream", [False, True])
def test_citations_and_cost_come_with_the_answer(client, stream):
    answer = client.chat.completions.create(**ASKED, stream=stream, extra_body={"citations": True})
    last = list(answer)[-1] if stream else answer
    (cited,) = last.to_dict()["citations"]
    assert (cited["name"], cited["share"]) == ("minutes.txt", 0.75)
    assert cited["spans"] == [{"start": 3, "end": 7, "text": "Ada wrote it.", "share": 0.5}]
    assert last.to_dict()["stats"]["bytes_moved"] == 1000


@pytest.mark.parametrize("stream", [False, True])
def test_a_check_comes_with_the_answer_that_asks_for_it(client, stream):
    for asked, told in (({"check": True}, {"tokens": 3, "same": 2, "difference": 0.25}), ({}, None)):
        answer = client.chat.completions.create(**ASKED, stream=stream, extra_body=asked)
        last = list(answer)[-1] if stream else answer
        assert last.to_dict().get("checked") == told


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_tells_how_grounded_it_is(client, service, stream):
    service.grounded = 0.25
    answers = client.chat.completions.create(**ASKED, stream=stream)
    told = [one.to_dict().get("grounded") for one in (answers if stream else [answers])]
    assert told[-1] == 0.25
    assert set(told[:-1]) <= {None}
    service.grounded = None
    answers = client.chat.completions.create(**ASKED, stream=stream)
    assert all("grounded" not in one.to_dict() for one in (answers if stream else [answers]))


def test_calls_of_tools_come_whole_and_in_order(client, service):
    service.calls = (ToolCall("c1", "find", '{"name": "Ada"}'), ToolCall("c2", "find", "{}"))
    function = {"name": "find", "parameters": {"type": "object"}}
    asked = {**ASKED, "tools": [{"type": "function", "function": function}]}
    choice = client.chat.completions.create(**asked, tool_choice="required").choices[0]
    assert choice.finish_reason == "tool_calls"
    assert [(call.id, call.function.arguments) for call in choice.message.tool_calls] == [
        ("c1", '{"name": "Ada"}'),
        ("c2", "{}"),
    ]
    assert service.tickets[0].asked.tool_choice == "required"
    chunks = list(client.chat.completions.create(**asked, stream=True))
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert [(call.index, call.id, call.function.name) for call in calls] == [
        (0, "c1", "find"),
        (1, "c2", "find"),
    ]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize(
    ("fault", "status", "raised"),
    [
        (WrongField("no such token", "logit_bias"), 400, openai.BadRequestError),
        (Busy("256 requests wait", 7), 429, openai.RateLimitError),
        (Loading("the model is being loaded", 2), 503, openai.InternalServerError),
        (TimedOut("it took too long"), 504, openai.InternalServerError),
        (ZeroDivisionError("/srv/secret"), 500, openai.InternalServerError),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_openais(client, service, fault, status, raised, stream):
    service.fault = fault
    with pytest.raises(raised) as caught:
        client.chat.completions.create(**ASKED, stream=stream)
    error = caught.value
    assert error.status_code == status
    assert "secret" not in error.message
    assert {*error.response.json()["error"]} == {"message", "type", "param", "code"}
    assert error.response.headers.get("retry-after") == (
        str(fault.retry_s) if isinstance(fault, Busy) else None
    )
    assert error.param == getattr(fault, "param", None)


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_after_the_first_token_ends_the_answer(client, service, stream):
    service.late = TimedOut("it took too long")
    with pytest.raises(openai.APIError, match="it took too long"):
        list(client.chat.completions.create(**ASKED, stream=stream))


def test_a_stream_that_fails_at_once_has_an_error_status(client, service):
    service.wait_s = 0.05
    service.early = TimedOut("it waited too long")
    with pytest.raises(openai.InternalServerError) as caught:
        client.chat.completions.create(**ASKED, stream=True)
    assert caught.value.status_code == 504


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_cancels_its_request(client, service, stream):
    service.pace_s = 0.05
    if stream:
        chunks = client.chat.completions.create(**ASKED, stream=True)
        next(iter(chunks))
        chunks.close()
    else:
        with pytest.raises(openai.APITimeoutError):
            client.chat.completions.create(**ASKED, timeout=0.1)
    assert service.tickets[0].cancelled.wait(2)
    assert service.tickets[0].over.wait(2)


def test_a_client_that_hangs_up_before_the_first_event_cancels_its_request(client, service):
    service.wait_s = 0.3
    with pytest.raises(openai.APITimeoutError):
        client.chat.completions.create(**ASKED, stream=True, timeout=0.05)
    assert service.tickets[0].cancelled.wait(0.2)


def test_comments_keep_a_silent_stream_open(url, service, monkeypatch):
    monkeypatch.setattr("offload_decode.server.http.streaming.QUIET_S", 0.02)
    service.wait_s = 0.1
    body = {**ASKED, "stream": True}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.iter_lines()
        assert next(lines) == ": ping"
        assert [line for line in lines if line][-1] == "data: [DONE]"


def test_fields_that_are_not_known_are_named_once(client, caplog):
    caplog.set_level("INFO", "offload_decode.server")
    for _ in range(2):
        client.chat.completions.create(**ASKED, extra_body={"frobnicate\n": 1})
    (line,) = [one for one in caplog.messages if "frobnicate" in one]
    assert "\n" not in line


@pytest.mark.parametrize(
    ("changed", "param"),
    [
        *(({"messages": wrong}, "messages") for wrong in (None, "x", {}, [])),
        *(({"messages": [wrong]}, "messages[0]") for wrong in ("x", None, [])),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": 1, "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [None]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        *(({"temperature": wrong}, "temperature") for wrong in (-1, "hot", math.inf, math.nan)),
        *(({"top_p": wrong}, "top_p") for wrong in (-0.1, 1.1, math.nan)),
        *(({"frequency_penalty": wrong}, "frequency_penalty") for wrong in (-2.1, 2.1, math.nan)),
        ({"presence_penalty": 3}, "presence_penalty"),
        *(({"n": wrong}, "n") for wrong in (0, 1000)),
        ({"top_logprobs": 5}, "top_logprobs"),
        *(({"logprobs": True, "top_logprobs": wrong}, "top_logprobs") for wrong in (-1, 21)),
        *(({"stop": wrong}, "stop") for wrong in (["x"] * 17, "x" * 1025)),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        *(({"logit_bias": {"3": wrong}}, "logit_bias") for wrong in (101, math.nan)),
        ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "x"}}]}]}, "messages[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"options": {"budget": [1]}}, "options.budget"),
        ({"deadline": 0}, "deadline"),
    ],
)
def test_a_field_that_cannot_be_is_named(url, changed, param):
    body = json.dumps(ASKED | changed)  # NaN is sent as it is
    given = {"Content-Type": "application/json"}
    answer = httpx.post(f"{url}/v1/chat/completions", content=body, headers=given)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(param)
