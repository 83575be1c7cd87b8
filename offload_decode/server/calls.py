"""Calls of tools in the text of an answer, as it comes: in the forms that chat templates teach models."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from offload_decode.server.requests import Delta, Emit, Ended, Event, ToolCall

_BETWEEN = re.compile(r"[\s;,]*")
_JSON = json.JSONDecoder()


@dataclass(frozen=True)
class Form:
    """How a model writes calls: `begin`, their JSON, `end` (None: the answer's end). arguments: what they are
    called in it. bare: an answer that is an object from its first character is a call too. named: the name
    of a function stands before its arguments, with `[ARGS]` between them.
    """

    begin: str
    end: str | None
    arguments: str = "arguments"
    bare: bool = False
    named: bool = False


class Calls:
    """Text in, text and calls out: what is no call is shown as it is, but for white space before one.

    The same text gives the same, however it is cut into pieces.
    """

    def __init__(self, form: Form, names: frozenset[str]):
        self._form = form
        self._names = names
        self._held = ""
        self._inside = False  # of a call, that begins with `_held`
        self._fresh = True  # nothing was shown, and nothing called

    def push(self, text: str) -> tuple[str, tuple[ToolCall, ...]]:
        """What more text lets be shown, and the calls that it completes."""
        self._held += text
        shown, calls = "", list[ToolCall]()
        while True:
            if not self._inside:
                more = self._until_begin()
                shown, self._fresh = shown + more, self._fresh and not more
            if not self._inside or self._form.end is None:
                break
            body, end, rest = self._held.partition(self._form.end)
            if not end:
                break
            found = self._read(body.removeprefix(self._form.begin))
            shown += "" if found else body + end
            calls += found
            self._held, self._inside, self._fresh = rest, False, False
        return shown, tuple(calls)

    def rest(self) -> tuple[str, tuple[ToolCall, ...]]:
        """What is left when no more text comes."""
        found = self._read(self._held.strip().removeprefix(self._form.begin)) if self._inside else []
        shown, self._held = "" if found else self._held, ""
        return shown, tuple(found)

    def _until_begin(self) -> str:
        """Take what can be no part of a call."""
        begin, text = self._form.begin, self._held
        start = text.find(begin)
        if self._form.bare and self._fresh and text.lstrip()[:1] == "{":
            start = 0
        self._inside = start >= 0
        if start < 0:
            last = range(max(0, len(text) - len(begin) + 1), len(text))
            start = next((place for place in last if begin.startswith(text[place:])), len(text))
        shown = text[:start].rstrip()
        self._held = text[start:] if self._inside else text[len(shown) :]
        return shown

    def _read(self, body: str) -> list[ToolCall]:
        """The calls of a body; none where a part of it is no call."""
        try:
            calls = [self._call(value) for value in self._values(body)]
        except (ValueError, RecursionError):
            return []
        return [call for call in calls if call] if all(calls) else []

    def _values(self, body: str) -> Iterator[Any]:
        if self._form.named:
            for one in body.split(self._form.begin):
                name, _, arguments = one.partition("[ARGS]")
                yield {"name": name.strip(), self._form.arguments: json.loads(arguments)}
            return
        place = _after(body, 0)
        while place < len(body):
            value, place = _JSON.raw_decode(body, place)
            yield from value if isinstance(value, list) else [value]
            place = _after(body, place)

    def _call(self, value: Any) -> ToolCall | None:
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            return None
        # An answer that is JSON may have a name too.
        if self._form.bare and value["name"] not in self._names:
            return None
        arguments = value.get(self._form.arguments, {})
        if not isinstance(arguments, dict):
            return None
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        return ToolCall(_new_id(), value["name"], written)


class Calling:
    """Puts the calls in place of the text that they are written in; events come in, and go to `emit`."""

    def __init__(self, emit: Emit, form: Form, names: frozenset[str]):
        self._emit = emit
        self._form = form
        self._names = names
        self._answers: dict[int, Calls] = {}
        self._called: set[int] = set()

    def __call__(self, event: Event) -> None:
        if isinstance(event, Delta):
            text, calls = self._of(event.index).push(event.text)
            self._tell(Delta(event.index, text, event.tokens, calls))
        elif isinstance(event, Ended):
            text, calls = self._of(event.index).rest()
            if text or calls:
                self._tell(Delta(event.index, text, (), calls))
            whole = event.index in self._called and event.finish == "stop"
            self._emit(Ended(event.index, "tool_calls") if whole else event)
        else:
            self._emit(event)

    def _of(self, index: int) -> Calls:
        return self._answers.setdefault(index, Calls(self._form, self._names))

    def _tell(self, delta: Delta) -> None:
        if delta.calls:
            self._called.add(delta.index)
        self._emit(delta)


def as_sent(call: ToolCall) -> dict[str, Any]:
    """A call as OpenAI's messages have it."""
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _new_id() -> str:
    """The id of a call: Mistral's templates take one of nine letters and digits, others any."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


def _after(body: str, place: int) -> int:
    found = _BETWEEN.match(body, place)
    return found.end() if found else place
