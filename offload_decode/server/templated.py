"""Messages as a chat template puts them, with the answers among them in the tokens that are known of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from offload_decode.server.errors import WrongField
from offload_decode.server.messages import Message
from offload_decode.server.parts import Part, Spelt
from offload_decode.server.spellings import Known
from offload_decode.server.templates import Template, Tools


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
