"""The messages of a chat, read strictly from the objects of OpenAI's API."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from offload_decode.common.files import parse
from offload_decode.server.requests import ToolCall, WrongField

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
SEPARATOR = "\n\n"  # between consecutive messages of one role


@dataclass(frozen=True)
class Call:
    """A tool call. arguments: an object where they are the JSON of one, else the client's text."""

    name: str
    arguments: Mapping[str, Any] | str
    id: str = ""


@dataclass(frozen=True)
class Message:
    """A message of one of the roles `system`, `user`, `assistant` and `tool`.

    calls: the tool calls of an assistant. answers: the id of the call that a tool's message answers.
    """

    role: str
    text: str
    calls: tuple[Call, ...] = ()
    answers: str = ""


def read_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Messages from a client, consecutive ones of a role joined; `developer` is `system`.

    Raises `WrongField` for a message that cannot be read, and where there is none of the user.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise _wrong("messages must be a list with at least one message of the user")
    each = [_read(f"messages[{number}]", message) for number, message in enumerate(messages)]
    # Some clients send an empty message in place of the answer to come.
    read = joined(one for one in each if one.text or one.calls or one.role != "assistant")
    if not any(message.role == "user" for message in read):
        raise _wrong("there is no message of the user: add one with the role 'user'")
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


def call_object(call: Call | ToolCall) -> dict[str, Any]:
    """A tool call as OpenAI's messages have it."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def answer_object(text: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
    """An assistant's message as OpenAI's API has it."""
    more = {"tool_calls": [call_object(call) for call in calls]} if calls else {}
    return {"role": "assistant", "content": text, **more}


def _read(where: str, message: object) -> Message:
    if not isinstance(message, Mapping):
        raise _wrong(f"{where} is not an object with 'role' and 'content'")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise _wrong(f"{where} has the role {str(role)[:40]!r}, which is none of {', '.join(ROLES)}")
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise _wrong(f"{where} has tool_calls that are no list")
    if calls and role != "assistant":
        raise _wrong(f"{where} has tool_calls, which only the assistant makes")
    read = tuple(_call(where, call) for call in calls)
    content = message.get("content")
    text = "" if content is None and calls else _text(where, content)
    return Message(ROLES[role], text, read, str(message.get("tool_call_id") or ""))


def _text(where: str, content: object) -> str:
    if isinstance(content, list):
        return "".join(_part(where, part) for part in content)
    if not isinstance(content, str):
        raise _wrong(f"{where} has no content: give a text, or a list of text parts")
    return content


def _part(where: str, part: object) -> str:
    match part:
        case {"type": "text" | "input_text" | "output_text", "text": str(text)}:
            return text
        case {"type": "text" | "input_text" | "output_text"}:
            raise _wrong(f"{where} has a text part without a text")
    raise _wrong(f"{where} has a part that is no text, and this model reads text alone")


def _call(where: str, call: object) -> Call:
    match call:
        case {"function": {"name": str(name), "arguments": str(text)}, **more}:
            try:
                parsed = parse(text)
            except ValueError:
                parsed = None
            return Call(name, parsed if isinstance(parsed, dict) else text, str(more.get("id") or ""))
    raise _wrong(f"{where} has a tool call that is none: it needs a function with a name and arguments")


def _wrong(sentence: str) -> WrongField:
    return WrongField(sentence, "messages")
