"""What RULER hides things in besides prose, and how many pieces of a text fill a number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle, islice

from offload_decode.evals.tasks.base import Material

_NOISE = (
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "Here we go.",
    "There and back again.",
)
_CLOSE = 0.002  # of the tokens: a text that much too short is long enough
_MOST_TRIES = 8
_LEAST_RATE = 0.1  # tokens of a piece, whatever was measured


def noise(sentences: int) -> str:
    """The five sentences of RULER over and over, five to a line."""
    drawn = list(islice(cycle(_NOISE), sentences))
    return "\n".join(" ".join(drawn[at : at + len(_NOISE)]) for at in range(0, sentences, len(_NOISE)))


def noise_of(material: Material, tokens: int) -> str:
    """The same, for about so many tokens."""
    return noise(fitting(material, tokens, noise))


def fitting(material: Material, tokens: int, write: Callable[[int], str], least: int = 0) -> int:
    """The number of pieces of which `write` makes a text of at most so many tokens, and hardly fewer.

    The text is written and counted whole a few times. Returns less than `least` where even so few are too
    many.
    """
    before, pieces = (least, material.count(write(least))), least + 16
    best = least if before[1] <= tokens else least - 1
    tried = {least}
    for _ in range(_MOST_TRIES):
        size = material.count(write(pieces))
        tried.add(pieces)
        if size <= tokens:
            best = max(best, pieces)
        if 0 <= tokens - size <= _CLOSE * tokens:
            break
        rate = max((size - before[1]) / (pieces - before[0]), _LEAST_RATE)
        before, pieces = (pieces, size), max(least, pieces + int((tokens - size) // rate))
        if pieces in tried:
            break
    return best


def between_lines(text: str, facts: Sequence[str], depths: Sequence[float], after: str = "\n") -> str:
    """Every fact before the line that is at its depth, with `after` behind it."""
    lines = text.split("\n")
    at = [round(depth * len(lines)) for depth in depths]
    parts: list[str] = []
    for number, line in enumerate([*lines, ""]):
        here = [fact for fact, place in zip(facts, at, strict=True) if place == number]
        parts.append("".join(fact + after for fact in here) + line)
    return "\n".join(parts).removesuffix("\n")
