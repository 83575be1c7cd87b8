"""A model's own chat template, put to messages: the text that it writes, in which its special tokens can be
told from those that a message spells out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any

from offload_decode.errors import ModelError
from offload_decode.models.pieces import Piece, special_tokens
from offload_decode.models.rendered import TemplateRefuses, rendered
from offload_decode.server.errors import WrongField
from offload_decode.server.messages import Call, Message

Tools = Sequence[Mapping[str, Any]]

# Breaks up special tokens that a message spells out; Unicode reserves it for use within a program.
_BREAK = "\ufdd0"
_PROBE, _ANSWER = Message("user", "Who wrote it?"), Message("assistant", "\x02answer\x03")
_SYSTEM = Message("system", "Answer.")
_CALL = Call("look_there", {}, "000000000")  # some want ids of nine letters
_CALLED = (_PROBE, Message("assistant", "", (_CALL,)), Message("tool", "It is.", answers=_CALL.id))


class Template:
    """The chat template of a tokenizer. What it refuses is a `WrongField`."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._special = special_tokens(tokenizer)
        # Those of models that see pictures may take a list of parts alone, and write nothing of a text.
        self._in_parts = False
        self._in_parts = _PROBE.text not in self.rendered([_PROBE])

    def rendered(self, messages: Sequence[Message], tools: Tools | None = None) -> str:
        """The text of messages, ready for what the assistant says next, or for the rest of what it says last.

        Special tokens that they spell out are broken up: `pieces` makes them letters.
        """
        goes_on = messages[-1].role == "assistant" and not messages[-1].calls
        names = {call.id: call.name for message in messages for call in message.calls}
        try:
            return rendered(
                self._tokenizer,
                [self._broken(self._written(message, names)) for message in messages],
                tools=self._broken(tools) or None,
                add_generation_prompt=not goes_on,
                continue_final_message=goes_on,
            )
        except (TemplateRefuses, ModelError) as error:
            reason = " ".join(str(error).split())[:200]
            raise WrongField(
                f"the chat template of this model does not take these messages ({reason}): "
                "let questions and answers alternate, or leave out what it does not know",
                "messages",
            ) from error

    def pieces(self, rendered: str) -> list[Piece]:
        """The pieces of a text that was rendered, or of a part of it."""
        # A special token that no piece holds whole is letters.
        return [Piece(part) for part in rendered.split(_BREAK)]

    def plain(self, rendered: str) -> str:
        """A text that was rendered, with every special token in it whole."""
        return rendered.replace(_BREAK, "")

    def ahead_of_answers(self, after: str) -> str:
        """What stands in front of an answer, behind the `after` that opens one: mostly nothing."""
        text = self.rendered([_PROBE, _ANSWER, _PROBE])
        between = text[text.index(_PROBE.text) + len(_PROBE.text) : text.index(_ANSWER.text)]
        return between.removeprefix(after) if between.startswith(after) else ""

    def tools_text(self, tools: Tools) -> str:
        """What the template says of tools, its special tokens left out; empty if nothing."""
        messages = [_SYSTEM, _PROBE]
        try:
            without = self.rendered(messages)
        except WrongField:  # it knows no system
            messages = [_PROBE]
            without = self.rendered(messages)
        added = _added(self._cut(without), self._cut(self.rendered(messages, tools)))
        return self.plain("".join(part for part in added if not self._is_special(part))).strip()

    def writes_calls(self) -> bool:
        """Whether the template writes calls of tools, and what these answer."""
        try:
            return all(text in self.rendered(_CALLED) for text in (_CALL.name, _CALLED[-1].text))
        except WrongField:
            return False

    def _written(self, message: Message, names: Mapping[str, str]) -> dict[str, Any]:
        """As templates expect a message."""
        content = [{"type": "text", "text": message.text}] if self._in_parts else message.text
        written: dict[str, Any] = {"role": message.role, "content": content}
        if message.calls:
            written["tool_calls"] = [_call(call) for call in message.calls]
        if message.role == "tool":
            written |= {"tool_call_id": message.answers, "name": names.get(message.answers, "")}
        return written

    def _broken(self, value: Any) -> Any:
        """The same, with the special tokens that it spells out broken up."""
        if isinstance(value, str) and self._special is not None:
            return self._special.sub(lambda found: found[0][:1] + _BREAK + found[0][1:], value)
        if isinstance(value, Mapping):
            return {self._broken(name): self._broken(part) for name, part in value.items()}
        if isinstance(value, list | tuple):
            return [self._broken(part) for part in value]
        return value

    def _cut(self, text: str) -> list[str]:
        return [text] if self._special is None else re.split(f"({self._special.pattern})", text)

    def _is_special(self, text: str) -> bool:
        return self._special is not None and self._special.fullmatch(text) is not None


def _call(call: Call) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _added(before: Sequence[str], after: Sequence[str]) -> list[str]:
    """What parts have in one text beyond those of the other."""
    added: list[str] = []
    for kind, start, end, first, last in SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if kind == "insert":
            added += after[first:last]
        elif kind == "replace":
            added.append(_between("".join(before[start:end]), "".join(after[first:last])))
    return added


def _between(before: str, after: str) -> str:
    """`after` without the beginning and the end that it shares with `before`, of whole lines if it can be."""
    shortest = min(len(before), len(after))
    head = next((i for i in range(shortest) if before[i] != after[i]), shortest)
    same = (i for i in range(shortest - head) if before[-1 - i] != after[-1 - i])
    end = len(after) - next(same, shortest - head)
    starts = [head]  # of the same text, where its beginning stands in front of it too
    size = end - head
    inserted = size == len(after) - len(before)
    while inserted and starts[-1] and after[starts[-1] - 1] == after[starts[-1] - 1 + size]:
        starts.append(starts[-1] - 1)
    begins = (start for start in starts if not start or after[start - 1] == "\n" or after[start].isspace())
    start = next(begins, head)
    return after[start : start + size]
