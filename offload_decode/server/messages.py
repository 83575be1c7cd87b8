"""The messages of a chat as OpenAI's API has them, read strictly."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from offload_decode.plain_json import parse
from offload_decode.server.errors import WrongField

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
BETWEEN = "\n\n"  # what consecutive messages of a role are joined by


@dataclass(frozen=True)
class Call:
    """A call of a tool. arguments: an object where they are JSON of one, else the text as it came."""

    name: str
    arguments: Mapping[str, Any] | str
    id: str = ""


@dataclass(frozen=True)
class Message:
    """A message of one of the roles `system`, `user`, `assistant` and `tool`.

    calls: those of an assistant. answers: the id of the call that a tool's message answers.
    """

    role: str
    text: str
    calls: tuple[Call, ...] = ()
    answers: str = ""


def read_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Messages as a client sent them, consecutive ones of a role as one; `developer` is `system`.

    Raises `WrongField` for what cannot be read, and where no user speaks.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise _wrong("messages must be a list with at least one message of the user")
    each = [_read(number, message) for number, message in enumerate(messages)]
    # Some clients send a place for the answer that is to come.
    read = joined(one for one in each if one.text or one.calls or one.role != "assistant")
    if not any(message.role == "user" for message in read):
        raise _wrong("there is no message of the user: add one with the role 'user'")
    return read


def joined(messages: Iterable[Message]) -> list[Message]:
    """Consecutive messages of a role as one; each answer of a tool stays one of its own."""
    runs = groupby(enumerate(messages), lambda each: (each[1].role, each[1].role == "tool" and each[0]))
    return [_as_one([message for _, message in run]) for _, run in runs]


def without_system(messages: Iterable[Message]) -> list[Message]:
    """The same, with what the system says ahead of what the user says next."""
    return joined(replace(one, role="user") if one.role == "system" else one for one in messages)


def _as_one(run: Sequence[Message]) -> Message:
    text = BETWEEN.join(message.text for message in run if message.text)
    return replace(run[0], text=text, calls=tuple(call for message in run for call in message.calls))


def _read(number: int, message: object) -> Message:
    where = f"messages[{number}]"
    if not isinstance(message, Mapping):
        raise _wrong(f"{where} is not an object with 'role' and 'content'")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise _wrong(f"{where} has the role {str(role)[:40]!r}, which is none of {', '.join(ROLES)}")
    made = message.get("tool_calls") or []
    if not isinstance(made, list):
        raise _wrong(f"{where} has tool_calls that are no list")
    calls = tuple(_call(where, call) for call in made)
    if calls and role != "assistant":
        raise _wrong(f"{where} has tool_calls, which only the assistant makes")
    text = _text(where, message.get("content"), calls)
    return Message(ROLES[role], text, calls, str(message.get("tool_call_id") or ""))


def _text(where: str, content: object, calls: tuple[Call, ...]) -> str:
    if content is None and calls:
        return ""
    if isinstance(content, list):
        content = "".join(_part(where, part) for part in content)
    if not isinstance(content, str):
        raise _wrong(f"{where} has no content: give a text, or a list of text parts")
    return content


def _part(where: str, part: object) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    text = part.get("text") if isinstance(part, Mapping) else None
    if kind not in ("text", "input_text", "output_text"):
        raise _wrong(f"{where} has a part that is no text, and this model reads text alone")
    if not isinstance(text, str):
        raise _wrong(f"{where} has a text part without a text")
    return text


def _call(where: str, call: object) -> Call:
    match call:
        case {"function": {"name": str(name), "arguments": str(arguments)}, **more}:
            return Call(name, _arguments(arguments), str(more.get("id") or ""))
    raise _wrong(f"{where} has a tool call that is none: it needs a function with a name and arguments")


def _arguments(text: str) -> Mapping[str, Any] | str:
    try:
        read = parse(text)
    except ValueError:
        return text
    return read if isinstance(read, dict) else text


def _wrong(sentence: str) -> WrongField:
    return WrongField(sentence, "messages")
