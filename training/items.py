"""What a training row is made of: facts to hide, and questions about them with their answers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

ALTERNATIVES = 9  # a list has ten parts at most
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
    """An answer that follows a chain: its text, the links in their order, and the end of the fact that tells
    each, from the link on (`Y = VAR X`): a link stands in front of what it is found by."""

    text: str
    links: tuple[str, ...]
    told: tuple[str, ...]


Ask = tuple[str, str | Listed | Linked]  # all that is read up to the answer, and the answer


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
        while not np.array_equal(answer[at : at + len(part)], part):
            at += 1
            if at + len(part) > len(answer):
                raise ValueError("a part is cut otherwise in its list than by itself")
        starts.append(at)
        at += len(part)
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


def ends(tokens: np.ndarray, parts: Sequence[np.ndarray]) -> list[int]:
    """Where each part stands in tokens, int64[T], for the first time: the index of its last token, or -1."""
    found = []
    for part in parts:
        windows = np.lib.stride_tricks.sliding_window_view(tokens, len(part))
        at = np.flatnonzero((windows == part).all(1))
        found.append(int(at[0]) + len(part) - 1 if len(at) else -1)
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
