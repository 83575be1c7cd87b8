"""From a request's messages, or its text, to the tokens that are run.

`chat_tokens` and `completion_tokens` are what a service asks. Behind a store (`stored`) they are what follows
the stored tokens, put as `Engine.ask` puts a question and the next one; with the model alone they are the
whole prompt. `keep_answer` notes how an answer was spelled: as a part of later messages it is found again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from offload_decode.models.loading import LoadedModel
from offload_decode.models.pieces import Piece, encode
from offload_decode.models.prompt import Prompt, opening_of
from offload_decode.server.errors import WrongField
from offload_decode.server.messages import Message, read_messages, without_system
from offload_decode.server.parts import Part, Spelt, check_characters, encoded
from offload_decode.server.spellings import Known, Spellings
from offload_decode.server.templated import templated
from offload_decode.server.templates import Template, Tools

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
    asked = replace(turns[0], text=_CORPUS + prompt.seam.gap + turns[0].text.strip())
    head = template.rendered([asked]).split(_CORPUS)[0] + _CORPUS
    first, *parts = templated(template, [asked, *turns[1:]], known, None)
    if not isinstance(first, Piece) or not first.text.startswith(head):
        raise WrongField(
            "the chat template of this model puts something before the corpus when tools are called, and "
            "nothing can stand before what is stored: ask without tools",
            "messages",
        )
    _, kept = prompt.gap
    return [Piece(kept + first.text.removeprefix(head).removeprefix(prompt.seam.gap)), *parts]
