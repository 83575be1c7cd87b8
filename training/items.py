"""What a training row is made of: facts to hide, and questions about them with their answers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

ALTERNATIVES = 9  # a list has ten parts at most
HINTS = 2  # places at most that tell the same token
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


@dataclass(frozen=True)
class Listed:
    """An answer that lists some things, in any order: what has not been said yet is right at every place."""

    parts: tuple[str, ...]
    numbered: bool = False  # `1. one 2. other`, or `one, other.`

    def drawn(self, rng: random.Random) -> tuple[str, list[str]]:
        """The answer in an order of chance, and its parts in that order."""
        order = rng.sample(self.parts, len(self.parts))
        if self.numbered:
            return "".join(f" {i}. {part}" for i, part in enumerate(order, 1)), order
        return f" {', '.join(order)}.", order


@dataclass(frozen=True)
class Linked:
    """An answer whose parts come in one order: its text, the parts, and what tells them.

    told: for a chain the end of the fact that tells each link, from the link on (`Y = VAR X`): a link stands
    in front of what it is found by. Without it, the question names the parts in their order.
    """

    text: str
    links: tuple[str, ...]
    told: tuple[str, ...] = ()


Ask = tuple[str, str | Listed | Linked]  # all that is read up to the answer, and the answer


@dataclass(frozen=True)
class Named:
    """A fact's name, the first of its letters that tell it from others and the one behind the last of these,
    and where in the fact's letters its values stand: the first of each, and the one behind its last."""

    name: str
    telling: tuple[int, int]
    values: Sequence[tuple[int, int]]


@dataclass
class Item:
    """Facts for one context, in order where `ordered`, and questions about them.

    far: whether texts far away may be simulated behind it; they would disturb a count.
    """

    facts: list[str]
    asks: Sequence[Ask]
    ordered: bool = False
    far: bool = True
    before: str = ""  # an instruction in front of the text
    after: str = "\n\n"  # between the text and the first question
    noise: bool = False  # whether the text is RULER's five sentences over and over
    named: Sequence[Named] = ()  # for each fact, where any is named


def spoken(rng: random.Random, answer: str | Listed | Linked) -> tuple[str, Sequence[str]]:
    """An answer's text, and its parts in their order where it has any."""
    if isinstance(answer, Listed):
        return answer.drawn(rng)
    return (answer.text, answer.links) if isinstance(answer, Linked) else (answer, ())


@dataclass(frozen=True)
class Said:
    """An answer that lists parts in any order: where it starts in its row, how many tokens it has, the parts,
    and where each starts in it."""

    start: int
    size: int
    parts: tuple[np.ndarray, ...]
    starts: tuple[int, ...]

    def moved(self, order: Sequence[int]) -> np.ndarray:
        """Which token of the answer stands at each place once the parts are in this order: int64[size]."""
        pieces, end = [], 0
        for old, new in enumerate(order):
            pieces += [np.arange(end, self.starts[old]), self.starts[new] + np.arange(len(self.parts[new]))]
            end = self.starts[old] + len(self.parts[old])
        return np.concatenate([*pieces, np.arange(end, self.size)])


def listed(start: int, answer: np.ndarray, parts: Sequence[np.ndarray]) -> Said:
    """Finds the parts, in this order, in the tokens of an answer."""
    at, starts = 0, []
    for part in parts:
        found = occurrences(answer[at:], part)
        if not len(found):
            raise ValueError("a part is cut otherwise in its list than by itself")
        starts.append(at + int(found[0]))
        at = starts[-1] + len(part)
    return Said(start, len(answer), tuple(parts), tuple(starts))


def alternatives(said: Said) -> np.ndarray:
    """What an answer may say instead at each token: int64[size, ALTERNATIVES].

    That is, the next tokens of parts that are still to come and begin as what was said of this one; else -1.
    """
    found = np.full((said.size, ALTERNATIVES), -1, np.int64)
    for i, (at, part) in enumerate(zip(said.starts, said.parts, strict=True)):
        for j in range(len(part)):
            rest = {int(p[j]) for p in said.parts[i + 1 :] if len(p) > j and np.array_equal(p[:j], part[:j])}
            rest.discard(int(part[j]))
            found[at + j, : len(rest)] = sorted(rest)
    return found


def occurrences(tokens: np.ndarray, part: np.ndarray) -> np.ndarray:
    """Where a part begins in tokens, int64[T]."""
    if len(part) > len(tokens):
        return np.zeros(0, np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(tokens, len(part))
    return np.flatnonzero((windows == part).all(1))


def hinted(
    linked: Linked,
    parts: Sequence[np.ndarray],
    told: Sequence[np.ndarray],
    text: np.ndarray,
    asked: np.ndarray,
) -> np.ndarray:
    """Behind which tokens each part is told: int64[parts, HINTS], counted from the text's first one, or -1.

    That is the end of what tells it in the text, int64[T], or where the question, which follows the text,
    is about to name it.
    """
    found = np.full((len(parts), HINTS), -1, np.int64)
    for i, part in enumerate(parts):
        if linked.told:
            at = occurrences(text, told[i])[:1] + len(told[i]) - 1
        else:
            at = occurrences(asked, part)[:HINTS] + len(text) - 1
        found[i, : len(at)] = at
    return found


def inside(said: Said) -> np.ndarray:
    """Which tokens of an answer are of its parts: bool[size]."""
    found = np.zeros(said.size, bool)
    for at, part in zip(said.starts, said.parts, strict=True):
        found[at : at + len(part)] = True
    return found


def turning(said: Said) -> np.ndarray:
    """Which tokens of an answer say whether another part follows the one before: bool[size]."""
    own = inside(said)
    found = ~own
    found[0] = False
    found[1:] &= own[:-1]
    return found
