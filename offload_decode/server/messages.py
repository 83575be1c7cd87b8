"""The messages of a chat, from the objects of OpenAI's API, whose shape the routes have checked."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from offload_decode.common.files import parse
from offload_decode.server.requests import ToolCall, WrongField

SEPARATOR = "\n\n"  # between consecutive messages of one role


@dataclass(frozen=True)
class Message:
    """A message of one of the roles `system`, `user`, `assistant` and `tool`.

    calls: the tool calls of an assistant. answers: the id of the call that a tool's message answers.
    """

    role: str
    text: str
    calls: tuple[ToolCall, ...] = ()
    answers: str = ""


def read_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Messages from a client, consecutive ones of a role joined; `developer` is `system`.

    Raises `WrongField` for a message without content, for calls that are not the assistant's, and where there
    is no message of the user.
    """
    each = [_read(f"messages[{number}]", message) for number, message in enumerate(messages)]
    # Some clients send an empty message in place of the answer to come.
    read = joined(one for one in each if one.text or one.calls or one.role != "assistant")
    if not any(message.role == "user" for message in read):
        raise WrongField("there is no message of the user: add one with the role 'user'", "messages")
    return read


def joined(messages: Iterable[Message]) -> list[Message]:
    """Consecutive messages of a role as one; each tool's answer stays a message of its own."""
    runs = groupby(enumerate(messages), lambda each: (each[1].role, each[1].role == "tool" and each[0]))
    found = []
    for _, numbered in runs:
        run = [message for _, message in numbered]
        text = SEPARATOR.join(message.text for message in run if message.text)
        found.append(replace(run[0], text=text, calls=tuple(call for one in run for call in one.calls)))
    return found


def without_system(messages: Iterable[Message]) -> list[Message]:
    """The same, with each system message put ahead of the next message of the user."""
    return joined(replace(one, role="user") if one.role == "system" else one for one in messages)


def call_object(call: ToolCall, arguments: Any = None) -> dict[str, Any]:
    """A tool call as OpenAI's messages have it, or with other `arguments`."""
    function = {"name": call.name, "arguments": call.arguments if arguments is None else arguments}
    return {"id": call.id, "type": "function", "function": function}


def arguments_of(call: ToolCall) -> Mapping[str, Any] | str:
    """An object where they are the JSON of one, else the client's text."""
    try:
        arguments = parse(call.arguments)
    except ValueError:
        arguments = None
    return arguments if isinstance(arguments, dict) else call.arguments


def answer_object(text: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
    """An assistant's message as OpenAI's API has it."""
    more = {"tool_calls": [call_object(call) for call in calls]} if calls else {}
    return {"role": "assistant", "content": text, **more}


def _read(where: str, message: Mapping[str, Any]) -> Message:
    calls, content = message.get("tool_calls") or (), message.get("content")
    if calls and message["role"] != "assistant":
        raise WrongField(f"{where} has tool_calls, which only the assistant makes", "messages")
    if content is None and not calls:
        raise WrongField(f"{where} has no content: give a text, or a list of text parts", "messages")
    text = content if isinstance(content, str) else "".join(part["text"] for part in content or ())
    role = "system" if message["role"] == "developer" else message["role"]
    functions = [(call.get("id", ""), call["function"]) for call in calls]
    read = tuple(ToolCall(id, function["name"], function["arguments"]) for id, function in functions)
    return Message(role, text, read, message.get("tool_call_id") or "")
