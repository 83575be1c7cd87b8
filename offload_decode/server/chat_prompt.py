"""From a request's messages, or its text, to the tokens that are run.

`chat_tokens` and `completion_tokens` are what a service asks. Behind a store (`stored`) they are what follows
the stored tokens, put as `Engine.ask` puts a question and the next one; with the model alone they are the
whole prompt. `keep_answer` notes how an answer was spelled: as a part of later messages it is found again.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from itertools import groupby
from typing import Any, NamedTuple

from offload_decode.common.errors import ModelError
from offload_decode.common.files import parse
from offload_decode.models.loading import LoadedModel
from offload_decode.models.prompt import (
    Piece,
    Prompt,
    TemplateRefuses,
    encode,
    encode_after,
    encode_first,
    opening_of,
    rendered,
    special_tokens,
)
from offload_decode.server.requests import WrongField

# Texts and known tokens that stand one behind the other, to the tokens of the whole.

_HALVES = re.compile("[\ud800-\udfff]")


class Spelt(NamedTuple):
    """A text in the tokens as which it was generated."""

    tokens: tuple[int, ...]


Part = Piece | Spelt


def encoded(loaded: LoadedModel, stored: bool, parts: Iterable[Part], param: str = "messages") -> list[int]:
    """Token ids of parts behind what is stored, or of a whole prompt; what stands between known tokens is one
    text.
    """
    tokens: list[int] = []
    run: list[Piece] = []
    begun = False

    def close() -> None:
        nonlocal begun
        check_characters([piece.text for piece in run], param)
        if begun or stored:
            tokens.extend(encode_after(loaded.known_tokenizer, "" if begun else loaded.prompt.gap[0], run))
        else:
            tokens.extend([*loaded.prompt.opening, *encode_first(loaded.known_tokenizer, run)])
        run.clear()
        begun = True

    for part in parts:
        if isinstance(part, Piece):
            run.append(part)
        else:
            close()
            tokens.extend(part.tokens)
    if run:
        close()
    return tokens


def check_characters(texts: Iterable[str], param: str) -> None:
    """Raise `WrongField` for what JSON may spell and no tokenizer takes."""
    if any(_HALVES.search(text) for text in texts):
        raise WrongField("the text holds half of a character (a lone surrogate): send it as UTF-8", param)


# The messages of a chat as OpenAI's API has them, read strictly.

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
    calls = tuple(_message_call(where, call) for call in made)
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


def _message_call(where: str, call: object) -> Call:
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


# The tokens of answers as they were generated: encoded anew, their text might be spelled otherwise, and
# what was run for them would not be found again.

MOST_TOKENS = 1 << 20

Known = Sequence[tuple[int, ...] | None]
"""The tokens of each answer of a chat in turn, None where they are not known."""


class Spellings:
    """A bounded memory of answers by all that was said up to them, the least recently used forgotten first.
    Thread-safe.

    `scope` keeps apart what must not be mixed: ids of tokens mean something to one tokenizer alone.
    """

    def __init__(self, most_tokens: int = MOST_TOKENS):
        self._most = most_tokens
        self._held = 0
        self._known: OrderedDict[bytes, tuple[int, ...]] = OrderedDict()
        self._lock = threading.Lock()

    def keep(self, scope: str, messages: Sequence[Message], tokens: Sequence[int]) -> None:
        """The last of `messages`, the assistant's, was generated as `tokens`."""
        *_, (message, key) = _keys(scope, messages)
        assert message.role == "assistant", "only answers are generated"
        with self._lock:
            self._held += len(tokens) - len(self._known.pop(key, ()))
            self._known[key] = tuple(tokens)
            while self._held > self._most:
                self._held -= len(self._known.popitem(last=False)[1])

    def of(self, scope: str, messages: Sequence[Message]) -> Known:
        """The tokens of each of the assistant's messages in turn; None where they are not known."""
        keys = [key for message, key in _keys(scope, messages) if message.role == "assistant"]
        with self._lock:
            for key in keys:
                if key in self._known:
                    self._known.move_to_end(key)
            return [self._known.get(key) for key in keys]


def _keys(scope: str, messages: Sequence[Message]) -> Iterator[tuple[Message, bytes]]:
    """Each message, the system's among the user's, with a digest of it and of all before it.

    White space around a text and the ids of calls are left out: clients do not always send them back.
    """
    digest = hashlib.sha256(scope.encode()).digest()
    for message in without_system(messages):
        calls = [(call.name, call.arguments) for call in message.calls]
        said = json.dumps([message.role, message.text.strip(), calls], sort_keys=True)
        digest = hashlib.sha256(digest + said.encode()).digest()
        yield message, digest


# A model's own chat template, put to messages: the text that it writes, in which its special tokens can
# be told from those that a message spells out.

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


# Messages as a chat template puts them, with the answers among them in the tokens that are known of them.


def templated(template: Template, messages: list[Message], known: Known, tools: Tools | None) -> list[Part]:
    """What the template writes, with answers in the tokens that are known of them where it leaves them as
    they are: of all, or of those that call no tool, or of none.
    """
    places = [place for place, message in enumerate(messages) if message.role == "assistant"]
    # One that opens the chat is behind no question, so that it was not generated.
    spelled = {place: tokens for place, tokens in zip(places, known, strict=False) if tokens and place}
    plain = {place: tokens for place, tokens in spelled.items() if not messages[place].calls}
    for chosen in (spelled, plain):
        if chosen and (parts := _spelled(template, messages, chosen, tools)) is not None:
            return parts
    return list(template.pieces(template.rendered(messages, tools)))


def _spelled(
    template: Template, messages: list[Message], known: Mapping[int, tuple[int, ...]], tools: Tools | None
) -> list[Part] | None:
    """What the template writes, with these answers in their tokens; None where it changes one of them."""
    marks = {place: f"\x02answer {place}\x03" for place in known}
    marked = [
        replace(message, text=marks[place], calls=()) if place in marks else message
        for place, message in enumerate(messages)
    ]
    as_they_are = [
        message if place in marks and not message.calls else other
        for place, (message, other) in enumerate(zip(messages, marked, strict=True))
    ]
    try:
        text = template.rendered(marked, tools)
        expected = template.plain(template.rendered(as_they_are, tools))
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
        parts += [*template.pieces(text[end:start]), Spelt(known[place])]
        end = at + len(mark)
    texts = {mark: messages[place].text for place, mark in marks.items() if not messages[place].calls}
    for text_of in (str, str.strip):
        written = template.plain(text)
        for mark, own in texts.items():
            written = written.replace(mark, text_of(own))
        if written == expected:
            return [*parts, *template.pieces(text[end:])]
    return None


_CORPUS = "\x02Corpus\x03"
_USER = Message("user", "")


def chat_tokens(
    loaded: LoadedModel,
    stored: bool,
    messages: Sequence[Mapping[str, Any]],
    tools: Tools | None = None,
    spellings: Spellings | None = None,
    scope: str = "",
) -> list[int]:
    """Token ids of messages, ready for the answer; where the assistant speaks last, for the rest of it.

    Nothing can stand before a stored corpus: behind one, what the system says stands ahead of what the user
    says next, and tools are described ahead of the first question. `scope` is that of `Spellings`. Raises
    `WrongField`.
    """
    read, prompt = read_messages(messages), loaded.prompt
    known: Known = spellings.of(scope, read) if spellings else []
    template = None if prompt.template == "plain" else Template(loaded.known_tokenizer)
    called = any(message.calls or message.role == "tool" for message in read)
    if template is None:
        if tools or called:
            raise WrongField("this model has no chat template, and so it knows no tools", "tools")
        return encoded(loaded, stored, _framed(prompt, without_system(read), known, stored, " "))

    told = template.tools_text(tools) if tools else ""
    if (tools and not told) or (called and not template.writes_calls()):
        raise WrongField("the chat template of this model knows no tools", "tools")
    if not stored:
        return encoded(loaded, stored, _alone(template, read, known, tools))
    first = next(place for place, message in enumerate([*read, _USER]) if message.role != "system")
    turns = without_system([*read[:first], Message("system", told), *read[first:]] if told else read)
    if called:
        return encoded(loaded, stored, _behind(prompt, template, turns, known))
    ahead = template.ahead_of_answers(prompt.after)
    return encoded(loaded, stored, _framed(prompt, turns, known, stored, ahead))


def completion_tokens(loaded: LoadedModel, stored: bool, prompt: str | Sequence[int]) -> list[int]:
    """Token ids of a raw prompt: a text, in which special tokens are recognised, or token ids as they are.

    Raises `WrongField` for an empty one behind a store, and for ids that are not in the vocabulary.
    """
    if not isinstance(prompt, str):
        known = range(loaded.model.get_input_embeddings().num_embeddings)
        if not all(type(token) is int and token in known for token in prompt):
            raise WrongField(f"the ids of tokens must be whole numbers from 0 to {len(known) - 1}", "prompt")
        tokens = list(prompt)
    elif stored:
        tokens = encoded(loaded, True, [Piece(prompt)], "prompt")
    else:
        tokens = text_tokens(loaded, prompt)
    if not tokens:
        raise WrongField("the prompt is empty: give a text or the ids of tokens", "prompt")
    return tokens


def text_tokens(loaded: LoadedModel, text: str, special: bool = True) -> list[int]:
    """Token ids of a text; `special`: with the tokens that this tokenizer puts ahead of one."""
    check_characters([text], "prompt")
    tokenizer = loaded.known_tokenizer
    return [*(opening_of(tokenizer) if special else ()), *encode(tokenizer, text)]


def keep_answer(
    loaded: LoadedModel,
    messages: Sequence[Mapping[str, Any]],
    answer: Mapping[str, Any],
    tokens: Sequence[int],
    spellings: Spellings,
    scope: str,
) -> None:
    """Note that `answer`, the message that a client is sent, was generated as `tokens` (no end token).

    One that is cut short of its tokens (a stop string), or that goes on with the client's own, is not noted.
    """
    read = read_messages([*messages, answer])
    text = loaded.known_tokenizer.decode(
        list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    last = read[-1]
    if last.role == "assistant" and tokens and (last.calls or last.text.strip() == text.strip()):
        spellings.keep(scope, read, tokens)


def _framed(prompt: Prompt, turns: list[Message], known: Known, stored: bool, ahead: str) -> list[Part]:
    """Questions and answers as the engine puts them; `ahead` goes before an answer that is not known."""
    _, kept = prompt.gap if stored else ("", "")
    if turns[0].role != "user":
        turns = [_USER, *turns]
    answers, parts, after = iter(known), list[Part]([Piece(kept + prompt.ask)]), prompt.after
    for place, message in enumerate(turns):
        if message.role == "user":
            parts += [Piece(prompt.turn)] if place else []
            parts += [Piece(message.text.strip(), users=True), Piece(after)]
            after = prompt.again
        elif tokens := next(answers, None):
            parts.append(Spelt(tokens))
        else:
            # The last one goes on where its text ends.
            text = message.text.lstrip() if place == len(turns) - 1 else message.text.strip()
            parts += [Piece(ahead), Piece(text, users=True)]
    return parts


def _alone(template: Template, messages: list[Message], known: Known, tools: Tools | None) -> list[Part]:
    """As the template puts messages; to one that knows no system, the user says what it says."""
    said = [message.text.strip() for message in messages if message.role == "system"]
    try:
        written = template.plain(template.rendered(messages, tools)) if said else ""
        if all(text in written for text in said):
            return templated(template, messages, known, tools)
    except WrongField:
        if not said:
            raise
    return templated(template, without_system(messages), known, tools)


def _behind(prompt: Prompt, template: Template, turns: list[Message], known: Known) -> list[Part]:
    """As the template puts turns behind a corpus that the user's first message begins with."""
    if turns[0].role != "user":
        turns = [_USER, *turns]
    asked = replace(turns[0], text=_CORPUS + prompt.join.gap + turns[0].text.strip())
    head = template.rendered([asked]).split(_CORPUS)[0] + _CORPUS
    first, *parts = templated(template, [asked, *turns[1:]], known, None)
    if not isinstance(first, Piece) or not first.text.startswith(head):
        raise WrongField(
            "the chat template of this model puts something before the corpus when tools are called, and "
            "nothing can stand before what is stored: ask without tools",
            "messages",
        )
    _, kept = prompt.gap
    return [Piece(kept + first.text.removeprefix(head).removeprefix(prompt.join.gap)), *parts]
