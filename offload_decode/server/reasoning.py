"""Reasoning of models that mark it: what stands between `<think>` and `</think>` ahead of an answer."""

from collections import defaultdict
from dataclasses import replace

from offload_decode.models.loading import LoadedModel
from offload_decode.models.prompt import Prompt
from offload_decode.server.requests import Delta, Emit, Ended, Event

BEGIN, END = "<think>", "</think>"


def marks_reasoning(loaded: LoadedModel) -> bool:
    """Whether the chat template of a model knows of reasoning."""
    return END in str(loaded.known_tokenizer.chat_template or "")


class ReasoningParser:
    """Text in, reasoning and text out, without the marks and the white space around them.

    `inside`: the prompt ends in the mark that begins the reasoning. The same text gives the same result,
    however it is cut into pieces.
    """

    def __init__(self, inside: bool):
        self._pending = ""
        self._state = "reasoning" if inside else "before"
        self._fresh = True  # of what comes next, white space is left out

    def push(self, text: str, last: bool = False) -> tuple[str, str]:
        """The reasoning and the text that can be told now; all of it where no more text comes (`last`)."""
        self._pending += text
        if self._state == "before":
            begun = self._pending.lstrip()
            if BEGIN.startswith(begun) and not last:
                return "", ""
            self._state, self._fresh = "text", False
            if begun.startswith(BEGIN):
                self._state, self._pending, self._fresh = "reasoning", begun.removeprefix(BEGIN), True
        reasoning = ""
        if self._state == "reasoning":
            thought, end, rest = self._pending.partition(END)
            kept = thought.rstrip() if end or last else self._told(thought)
            reasoning, self._pending = self._begun(kept), self._pending[len(kept) :]
            if not end:
                return reasoning, ""
            self._state, self._pending, self._fresh = "text", rest, True
        shown, self._pending = self._begun(self._pending), ""
        return reasoning, shown

    def _told(self, thought: str) -> str:
        """The part of a text that neither the mark of the end nor white space before it may begin in."""
        cut = max((size for size in range(1, len(END)) if thought.endswith(END[:size])), default=0)
        return thought[: len(thought) - cut].rstrip()

    def _begun(self, text: str) -> str:
        text = text.lstrip() if self._fresh else text
        self._fresh = self._fresh and not text
        return text


def reasoning_apart(emit: Emit, prompt: Prompt) -> Emit:
    """An `emit` that passes events on, with the reasoning of each answer apart from its text."""
    inside = prompt.after.rstrip().endswith(BEGIN)
    parsers: dict[int, ReasoningParser] = defaultdict(lambda: ReasoningParser(inside))

    def pass_on(event: Event) -> None:
        if isinstance(event, Delta):
            reasoning, text = parsers[event.index].push(event.text)
            event = replace(event, text=text, reasoning=reasoning)
        elif isinstance(event, Ended):
            reasoning, text = parsers[event.index].push("", last=True)
            if reasoning or text:
                emit(Delta(event.index, text, (), reasoning=reasoning))
        emit(event)

    return pass_on
