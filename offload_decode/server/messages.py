"""The messages of a chat, from the objects of OpenAI's API, whose shape the routes have checked."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import groupby
from typing import Any

from offload_decode.common.files import parse
from offload_decode.server.requests import ToolCall, WrongField

SEPARATOR = "\n\n"  # between consecutive messages of one role
_ROLES = {"developer": "system", "function": "tool"}


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

    Raises `WrongField` for a message of the user or the system without content, for calls that are not the
    assistant's, and where nothing is the user's: neither a message nor what came of a call.
    """
    each = [_read(f"messages[{number}]", message) for number, message in enumerate(messages)]
    # Some clients send an empty message in place of the answer to come.
    read = joined(one for one in each if one.text or one.calls or one.role != "assistant")
    if not any(message.role in ("user", "tool") for message in read):
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
    calls, role = message.get("tool_calls") or (), _ROLES.get(message["role"], message["role"])
    functions = [(call.get("id", ""), call["function"]) for call in calls]
    if (older := message.get("function_call")) is not None:
        functions.append((_id_of(older["name"]), older))
    if functions and role != "assistant":
        raise WrongField(f"{where} has calls, which only the assistant makes", "messages")
    content = message.get("content")
    if content is None:
        content = message.get("refusal")
    if content is None and role not in ("assistant", "tool"):
        raise WrongField(f"{where} has no content: give a text, or a list of text parts", "messages")
    parts = (
        [content]
        if isinstance(content, str)
        else [one.get("text", one.get("refusal")) for one in content or ()]
    )
    read = tuple(ToolCall(id, one["name"], _written(one.get("arguments"))) for id, one in functions)
    answers = (
        _id_of(message.get("name") or "") if message["role"] == "function" else message.get("tool_call_id")
    )
    return Message(role, "".join(parts), read, answers or "")


def _written(arguments: str | Mapping[str, Any] | None) -> str:
    """Arguments as JSON; some clients send the object itself, or nothing."""
    return arguments if arguments and isinstance(arguments, str) else json.dumps(arguments or {})


def _id_of(name: str) -> str:
    """Of a call in OpenAI's older form, which has none: nine letters and digits, as some templates want."""
    return sha256(name.encode(errors="replace")).hexdigest()[:9]
