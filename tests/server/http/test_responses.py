"""`/v1/responses`, asked by the `openai` package."""

import openai
import pytest

from offload_decode.server.http.responses import Conversations
from offload_decode.server.requests import TimedOut, ToolCall
from tests.server.fakes import STORED


def test_an_answer(client):
    answer = client.responses.create(model="book", input="Who wrote it?", instructions="Be short.")
    assert (answer.output_text, answer.status, answer.error) == ("Who wrote it?", "completed", None)
    assert (answer.instructions, answer.model) == ("Be short.", "book")
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (STORED, len("Who wrote it?"))
    assert answer.usage.input_tokens_details.cached_tokens == STORED


def test_items_are_the_messages_of_a_chat(client, service):
    client.responses.create(
        model="book",
        instructions="Be short.",
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "Who?"}]},
            {"type": "reasoning", "id": "rs_1", "summary": []},
            {"type": "function_call", "call_id": "c1", "name": "find", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "Ada"},
            {"role": "user", "content": "And when?"},
        ],
        max_output_tokens=3,
        text={"format": {"type": "json_schema", "name": "it", "schema": {"type": "object"}}},
        extra_body={"selector": "quest"},
    )
    asked = service.tickets[0].asked
    assert [(one["role"], one["content"]) for one in asked.messages] == [
        ("system", "Be short."),
        ("user", "Who?"),
        ("assistant", None),
        ("tool", "Ada"),
        ("user", "And when?"),
    ]
    assert asked.messages[2]["tool_calls"][0]["function"] == {"name": "find", "arguments": "{}"}
    assert asked.messages[3]["tool_call_id"] == "c1"
    assert (asked.generation.max_tokens, asked.selector) == (3, "quest")
    assert asked.generation.grammar == {"json_schema": {"type": "object"}}


def test_an_answer_cut_at_max_output_tokens_is_incomplete(client):
    answer = client.responses.create(model="book", input="Who wrote it?", max_output_tokens=3)
    assert (answer.output_text, answer.status) == ("Who", "incomplete")
    assert answer.incomplete_details.reason == "max_output_tokens"


def test_a_stream_tells_of_the_answer_as_it_grows(client):
    events = list(client.responses.create(model="book", input="Who?", stream=True))
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * 4,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type.endswith("text.delta")) == "Who?"
    last = events[-1].response
    assert (last.output_text, last.status, last.id) == ("Who?", "completed", events[0].response.id)
    assert last.usage.output_tokens == 4
    with client.responses.stream(model="book", input="Who?") as stream:
        assert stream.get_final_response().output_text == "Who?"


def test_calls_of_tools_are_items_of_their_own(client, service):
    service.calls = (ToolCall("c1", "find", '{"name": "Ada"}'),)
    tool = {"type": "function", "name": "find", "parameters": {"type": "object"}}
    asked = {
        "model": "book",
        "input": "Hm",
        "tools": [tool],
        "tool_choice": {"type": "function", "name": "find"},
    }
    answer = client.responses.create(**asked)
    assert [item.type for item in answer.output] == ["message", "function_call"]
    call = answer.output[1]
    assert (call.call_id, call.name, call.arguments) == ("c1", "find", '{"name": "Ada"}')
    assert (call.status, answer.status) == ("completed", "completed")
    assert service.tickets[0].asked.tools[0]["function"]["name"] == "find"
    assert service.tickets[0].asked.tool_choice["function"]["name"] == "find"
    events = list(client.responses.create(**asked, stream=True))
    assert [event.type.removeprefix("response.") for event in events[2:-1]] == [
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * 2,
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [item.type for item in events[-1].response.output] == ["message", "function_call"]
    client.responses.create(model="book", input="So?", previous_response_id=answer.id)
    before = service.tickets[-1].asked.messages[1]
    assert (before["content"], before["tool_calls"][0]["id"]) == ("Hm", "c1")


def test_a_failure_ends_the_stream_of_events(client, service):
    service.late = TimedOut("it took too long")
    last = list(client.responses.create(model="book", input="Who?", stream=True))[-1]
    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert last.response.error.message == "it took too long"


def test_a_conversation_goes_on_from_its_last_response(client, service):
    first = client.responses.create(model="book", input="Who?", instructions="Be short.")
    client.responses.create(model="book", input="And when?", previous_response_id=first.id)
    assert [(one["role"], one["content"]) for one in service.tickets[1].asked.messages] == [
        ("user", "Who?"),
        ("assistant", "Who?"),
        ("user", "And when?"),
    ]
    kept = client.responses.create(model="book", input="Who?", store=False)
    for gone in (kept.id, "resp_none"):
        with pytest.raises(openai.BadRequestError, match="is not remembered") as caught:
            client.responses.create(model="book", input="x", previous_response_id=gone)
        assert caught.value.param == "previous_response_id"


def test_remembered_conversations_are_bounded():
    remembered = Conversations(100, len)
    for id in ("a", "b"):
        remembered.keep(id, "x" * 40)
    assert remembered.find("a") == "x" * 40
    remembered.keep("c", "x" * 40)
    assert remembered.find("b") is None  # the one that was not asked for
    remembered.keep("d", "x" * 101)
    remembered.keep("c", "x" * 50)
    assert (remembered.find("d"), remembered.find("a")) == (None, "x" * 40)


def test_an_invalid_input_item_is_named(client):
    for item in ({"type": "function_call", "call_id": "c1"}, {"type": "message", "content": "x"}):
        with pytest.raises(openai.BadRequestError, match="input\\[0\\]"):
            client.responses.create(model="book", input=[item])


def test_there_must_be_a_message(client):
    with pytest.raises(openai.BadRequestError, match="must be 1 to 4,096 messages") as caught:
        client.responses.create(model="book", input=[{"type": "reasoning", "id": "r", "summary": []}])
    assert caught.value.param == "input"
