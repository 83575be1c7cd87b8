"""What a training row is made of: facts to hide, and questions about them with their answers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

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


Ask = tuple[str, str | Listed]  # all that is read up to the answer, and the answer


@dataclass
class Item:
    """Facts for one context, in order where `ordered`, and questions about them.

    far: whether texts far away may be simulated behind it; they would disturb a count.
    backwards: what is asked for stands in front of what it is found by, where nothing tells it yet.
    """

    facts: list[str]
    asks: Sequence[Ask]
    ordered: bool = False
    far: bool = True
    before: str = ""  # an instruction in front of the text
    after: str = "\n\n"  # between the text and the first question
    backwards: bool = False
    noise: bool = False  # whether the text is RULER's five sentences over and over
