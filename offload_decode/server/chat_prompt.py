"""From a request's messages, or its text, to the tokens that are run.

Behind a store (`stored`) they are the tokens after the stored ones, spelled as `Engine.ask` spells a question
and the next one; with the model alone they are the whole prompt. Answers of earlier turns keep the tokens
that they were generated as (`AnswerTokens`): encoded anew, their text might be spelled otherwise, and the
prefix cache would not find them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from inspect import signature
from itertools import chain, groupby
from os.path import commonprefix
from typing import Any, cast

from offload_decode.common.errors import ModelError
from offload_decode.engine.text import decode
from offload_decode.models.loading import LoadedModel
from offload_decode.models.prompt import (
    Piece,
    Prompt,
    TemplateRefuses,
    encode,
    encode_after,
    encode_first,
    opening_of,
    prompt_for,
    rendered,
    special_tokens,
)
from offload_decode.server.messages import Message, arguments_of, call_object, read_messages, without_system
from offload_decode.server.prefix_cache import AnswerTokens
from offload_decode.server.requests import TEMPLATE_OPTIONS, ToolCall, WrongField

Tools = Sequence[Mapping[str, Any]]

Known = Sequence[tuple[int, ...] | None]
"""The tokens of each answer of a chat in turn, None where they are not known."""


Part = Piece | tuple[int, ...]
"""Of a prompt: a text, or an answer in the tokens that it was generated as."""

_CORPUS = "\x02Corpus\x03"
_USER = Message("user", "")
# Breaks up special tokens that a message spells out; Unicode reserves it for use within a program.
_BREAK = "\ufdd0"
# Messages that a template is probed with. Some templates want call ids of nine letters.
_QUESTION, _ANSWER = Message("user", "Who wrote it?"), Message("assistant", "\x02answer\x03")
_SYSTEM = Message("system", "Answer.")
_CALL = ToolCall("000000000", "look_there", "{}")
_CALLED = (_QUESTION, Message("assistant", "", (_CALL,)), Message("tool", "It is.", answers=_CALL.id))


def chat_tokens(
    loaded: LoadedModel,
    stored: bool,
    messages: Sequence[Mapping[str, Any]],
    tools: Tools | None = None,
    answer_tokens: AnswerTokens | None = None,
    scope: str = "",
    options: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of messages, ready for the answer; where the assistant speaks last, for the rest of it.

    Nothing can stand before a stored corpus: behind one, a system message stands ahead of the user's next
    message, and tools are described ahead of the first question. `scope` is that of `AnswerTokens`, `options`
    are variables of the template. Raises `WrongField`.
    """
    read, prompt = read_messages(messages), prompt_with(loaded, stored, options or {})
    known: Known = answer_tokens.of(scope, read) if answer_tokens else []
    called = any(message.calls or message.role == "tool" for message in read)
    if not any(message.role == "user" for message in read):  # some templates look for one
        first = next(place for place, message in enumerate(read) if message.role != "system")
        read = [*read[:first], _USER, *read[first:]]
    if prompt.template == "plain":
        if tools or called:
            raise WrongField("this model has no chat template, and so it knows no tools", "tools")
        ahead = " "
    else:
        template = Template(loaded.known_tokenizer, options)
        described = template.tools_text(tools) if tools else ""
        if (tools and not described) or (called and not template.writes_calls()):
            raise WrongField("the chat template of this model knows no tools", "tools")
        if not stored:
            return _encoded(loaded, stored, _alone(template, read, known, tools))
        if described:
            first = next(place for place, message in enumerate([*read, _USER]) if message.role != "system")
            read = [*read[:first], Message("system", described), *read[first:]]
        ahead = "" if called else template.before_answers(prompt.after)
    turns = without_system(read)
    if turns[0].role != "user":
        turns = [_USER, *turns]
    if called:
        return _encoded(loaded, stored, _behind(prompt, template, turns, known))
    return _encoded(loaded, stored, _framed(prompt, turns, known, stored, ahead))


def prompt_with(loaded: LoadedModel, stored: bool, options: Mapping[str, Any]) -> Prompt:
    """The prompt of a model with variables of its chat template. Raises `WrongField` for those that are none,
    and behind a store for what would change the opening that was stored with it.
    """
    if not options:
        return loaded.prompt
    tokenizer = loaded.known_tokenizer
    if own := {*signature(tokenizer.apply_chat_template).parameters} & {*options}:
        raise WrongField(f"{min(own)} is no variable of a chat template: leave it out", TEMPLATE_OPTIONS)
    try:
        prompt = prompt_for(tokenizer, loaded.tokenizer_hash, options)
    except ModelError as error:
        raise WrongField(
            "the chat template of this model fails with these variables", TEMPLATE_OPTIONS
        ) from error
    if stored and prompt.before != loaded.prompt.before:
        changed = "these variables change how the prompt begins, which is stored with the corpus"
        raise WrongField(f"{changed}: leave them out, or ask the model without a corpus", TEMPLATE_OPTIONS)
    return prompt


def completion_tokens(loaded: LoadedModel, stored: bool, prompt: str | Sequence[int]) -> list[int]:
    """Token ids of a raw prompt: a text, in which special tokens are recognised, or token ids as they are.

    Raises `WrongField` for an empty one behind a store, and for ids that are not in the vocabulary.
    """
    if not isinstance(prompt, str):
        vocabulary = range(loaded.model.get_input_embeddings().num_embeddings)
        if not all(type(token) is int and token in vocabulary for token in prompt):
            raise WrongField(f"ids of tokens are whole numbers from 0 to {len(vocabulary) - 1}", "prompt")
        tokens = list(prompt)
    elif stored:
        tokens = _encoded(loaded, True, [Piece(prompt)])
    else:
        tokens = text_ids(loaded, prompt)
    if not tokens:
        raise WrongField("the prompt is empty: give a text or the ids of tokens", "prompt")
    return tokens


def text_ids(loaded: LoadedModel, text: str, special: bool = True) -> list[int]:
    """Token ids of a text; `special`: with the tokens that this tokenizer puts ahead of one."""
    tokenizer = loaded.known_tokenizer
    return [*(opening_of(tokenizer) if special else ()), *encode(tokenizer, text)]


def keep_answer(
    loaded: LoadedModel,
    messages: Sequence[Mapping[str, Any]],
    answer: Mapping[str, Any],
    tokens: Sequence[int],
    answer_tokens: AnswerTokens,
    scope: str,
) -> None:
    """Remember that `answer`, the message that a client is sent, was generated as `tokens` (no end token).

    One that is cut short of its tokens (a stop string), or that continues the client's own, is not
    remembered.
    """
    read = read_messages([*messages, answer])
    text, last = decode(loaded.known_tokenizer, tokens), read[-1]
    if last.role == "assistant" and tokens and (last.calls or last.text.strip() == text.strip()):
        answer_tokens.keep(scope, read, tokens)


def _encoded(loaded: LoadedModel, stored: bool, parts: Iterable[Part]) -> list[int]:
    """Token ids of parts; the pieces between known tokens are encoded as one text."""
    tokens: list[int] = []
    for number, (kind, group) in enumerate(groupby(parts, type)):
        if kind is not Piece:
            tokens += chain.from_iterable(cast("Iterator[tuple[int, ...]]", group))
            continue
        pieces = [part for part in group if isinstance(part, Piece)]
        if number or stored:
            tokens += encode_after(loaded.known_tokenizer, "" if number else loaded.prompt.gap[0], pieces)
        else:
            tokens += [*loaded.prompt.opening, *encode_first(loaded.known_tokenizer, pieces)]
    return tokens


def _framed(prompt: Prompt, turns: list[Message], known: Known, stored: bool, ahead: str) -> list[Part]:
    """As the engine puts turns; `ahead` goes before an answer whose tokens are not known."""
    answers, after = iter(known), prompt.after
    parts: list[Part] = [Piece((prompt.gap[1] if stored else "") + prompt.ask)]
    for place, message in enumerate(turns):
        if message.role == "user":
            parts += [Piece(prompt.turn)] if place else []
            parts += [Piece(message.text.strip(), users=True), Piece(after)]
            after = prompt.again
        elif tokens := next(answers, None):
            parts.append(tokens)
        else:
            continues = place == len(turns) - 1  # where its text ends
            text = message.text.lstrip() if continues else message.text.strip()
            parts += [Piece(ahead), Piece(text, users=True)]
    return parts


def _alone(template: Template, messages: list[Message], known: Known, tools: Tools | None) -> list[Part]:
    """As the template puts messages; system messages become the user's where it knows no system."""
    system = [message.text.strip() for message in messages if message.role == "system"]
    try:
        written = template.plain(template.rendered(messages, tools)) if system else ""
        if all(text in written for text in system):
            return _templated(template, messages, known, tools)
    except WrongField:
        if not system:
            raise
    return _templated(template, without_system(messages), known, tools)


def _behind(prompt: Prompt, template: Template, turns: list[Message], known: Known) -> list[Part]:
    """As the template puts turns behind a corpus that the user's first message begins with."""
    asked = replace(turns[0], text=_CORPUS + prompt.join.gap + turns[0].text.strip())
    head = template.rendered([asked]).split(_CORPUS)[0] + _CORPUS
    first, *parts = _templated(template, [asked, *turns[1:]], known, None)
    if not isinstance(first, Piece) or not first.text.startswith(head):
        message = "this model's chat template puts tools before the stored corpus: ask without tools"
        raise WrongField(message, "messages")
    return [Piece(prompt.gap[1] + first.text.removeprefix(head).removeprefix(prompt.join.gap)), *parts]


def _templated(template: Template, messages: list[Message], known: Known, tools: Tools | None) -> list[Part]:
    """The template's text, with answers in their known tokens where it leaves them unchanged."""
    places = [place for place, message in enumerate(messages) if message.role == "assistant"]
    # An answer that opens the chat is behind no question, so that it was not generated.
    all_known = {place: tokens for place, tokens in zip(places, known, strict=False) if tokens and place}
    without_calls = {place: tokens for place, tokens in all_known.items() if not messages[place].calls}
    for chosen in (all_known, without_calls):
        if chosen and (parts := _with_known(template, messages, chosen, tools)) is not None:
            return parts
    return list(template.pieces(template.rendered(messages, tools)))


def _with_known(
    template: Template, messages: list[Message], known: Mapping[int, tuple[int, ...]], tools: Tools | None
) -> list[Part] | None:
    """The template's text, with these answers in their tokens; None where it changes one of them."""
    marks = {place: f"\x02answer {place}\x03" for place in known}
    marked, unmarked = messages.copy(), messages.copy()
    for place, mark in marks.items():
        marked[place] = replace(messages[place], text=mark, calls=())
        if messages[place].calls:
            unmarked[place] = marked[place]
    try:
        text = template.rendered(marked, tools)
        expected = template.plain(template.rendered(unmarked, tools))
        opened = {mark: template.rendered(marked[:place], tools) for place, mark in marks.items()}
    except WrongField:
        return None
    parts: list[Part] = []
    end = 0
    for place, mark in marks.items():
        # The answer was generated from there on: what the template puts between is in its tokens.
        start, at = len(opened[mark]), text.find(mark)
        if text.count(mark) != 1 or not text.startswith(opened[mark]) or text[start:at].strip():
            return None
        parts += [*template.pieces(text[end:start]), known[place]]
        end = at + len(mark)
    for stripped in (False, True):
        written = template.plain(text)
        for place, mark in marks.items():
            if not messages[place].calls:
                answer = messages[place].text
                written = written.replace(mark, answer.strip() if stripped else answer)
        if written == expected:
            return [*parts, *template.pieces(text[end:])]
    return None


class Template:
    """The chat template of a tokenizer. What it refuses is a `WrongField`.

    In the text that it writes, its own special tokens can be told from those that a message spells out: these
    are broken up.
    """

    def __init__(self, tokenizer: Any, options: Mapping[str, Any] | None = None):
        self._tokenizer, self._options = tokenizer, options or {}
        self._special = special_tokens(tokenizer) or re.compile("(?!)")  # which is found nowhere
        # Templates of models that see pictures may take a list of parts alone, and write nothing of a text.
        self._in_parts = False
        self._in_parts = _QUESTION.text not in self.rendered([_QUESTION])

    def rendered(self, messages: Sequence[Message], tools: Tools | None = None) -> str:
        """The text of messages, ready for the assistant's answer, or for the rest of its last message.

        Special tokens that they spell out are broken up: `pieces` makes them letters.
        """
        continues = messages[-1].role == "assistant" and not messages[-1].calls
        names = {call.id: call.name for message in messages for call in message.calls}
        try:
            return rendered(
                self._tokenizer,
                [self._broken(self._object(message, names)) for message in messages],
                tools=self._broken(tools) or None,
                add_generation_prompt=not continues,
                continue_final_message=continues,
                **self._options,
            )
        except (TemplateRefuses, ModelError) as error:
            reason = " ".join(str(error).split())[:200]
            message = f"this model's chat template does not take these messages ({reason})"
            way = "let questions and answers alternate, or leave out what it does not know"
            raise WrongField(f"{message}: {way}", "messages") from error

    def pieces(self, rendered: str) -> list[Piece]:
        """The pieces of a rendered text; a special token that no piece holds whole is letters."""
        return [Piece(part) for part in rendered.split(_BREAK)]

    def plain(self, rendered: str) -> str:
        """A rendered text with every special token in it whole."""
        return rendered.replace(_BREAK, "")

    def before_answers(self, after: str) -> str:
        """The text in front of an answer, behind the `after` that opens one: mostly nothing."""
        text = self.rendered([_QUESTION, _ANSWER, _QUESTION])
        between = text[text.index(_QUESTION.text) + len(_QUESTION.text) : text.index(_ANSWER.text)]
        return between.removeprefix(after) if between.startswith(after) else ""

    def tools_text(self, tools: Tools) -> str:
        """The template's description of tools without special tokens; empty if it has none."""
        messages = [_SYSTEM, _QUESTION]
        try:
            without = self.rendered(messages)
        except WrongField:  # it knows no system
            messages = [_QUESTION]
            without = self.rendered(messages)
        special = re.compile(f"({self._special.pattern})")
        before, after = special.split(without), special.split(self.rendered(messages, tools))
        added = [part for part in _added(before, after) if not special.fullmatch(part)]
        return self.plain("".join(added)).strip()

    def writes_calls(self) -> bool:
        """Whether the template writes tool calls, and the tools' answers."""
        try:
            return all(text in self.rendered(_CALLED) for text in (_CALL.name, _CALLED[-1].text))
        except WrongField:
            return False

    def _object(self, message: Message, names: Mapping[str, str]) -> dict[str, Any]:
        """A message as templates expect it; `names` are those of functions by the ids of their calls."""
        content = [{"type": "text", "text": message.text}] if self._in_parts else message.text
        written: dict[str, Any] = {"role": message.role, "content": content}
        if message.calls:
            written["tool_calls"] = [call_object(call, arguments_of(call)) for call in message.calls]
        if message.role == "tool":
            written |= {"tool_call_id": message.answers, "name": names.get(message.answers, "")}
        return written

    def _broken(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._special.sub(lambda found: found[0][:1] + _BREAK + found[0][1:], value)
        if isinstance(value, Mapping):
            return {self._broken(name): self._broken(part) for name, part in value.items()}
        if isinstance(value, list | tuple):
            return [self._broken(part) for part in value]
        return value


def _added(before: Sequence[str], after: Sequence[str]) -> list[str]:
    added: list[str] = []
    for kind, start, end, first, last in SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if kind == "insert":
            added += after[first:last]
        elif kind == "replace":
            added.append(_between("".join(before[start:end]), "".join(after[first:last])))
    return added


def _between(before: str, after: str) -> str:
    """`after` without the beginning and the end that it shares with `before`, of whole lines if possible."""
    head = len(commonprefix((before, after)))  # noqa: RUF071 - of letters, not of paths
    tail = len(commonprefix((before[head:][::-1], after[head:][::-1])))  # noqa: RUF071
    starts = [head]  # of the same text, where its beginning stands in front of it too
    size = len(after) - tail - head
    inserted = size == len(after) - len(before)
    while inserted and starts[-1] and after[starts[-1] - 1] == after[starts[-1] - 1 + size]:
        starts.append(starts[-1] - 1)
    begins = (start for start in starts if not start or after[start - 1] == "\n" or after[start].isspace())
    start = next(begins, head)
    return after[start : start + size]
