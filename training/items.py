"""What a training row is made of: facts to hide, and questions about them with their answers."""

from __future__ import annotations

from dataclasses import dataclass

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
Ask = tuple[str, str]  # all that is read up to the answer, and the answer


@dataclass
class Item:
    """Facts for one context, in order where `ordered`, and questions about them.

    far: whether texts far away may be simulated behind it; they would disturb a count.
    block: the facts are lines that follow each other and stand alone.
    """

    facts: list[str]
    asks: list[Ask]
    ordered: bool = False
    far: bool = True
    before: str = ""  # an instruction in front of the text
    after: str = "\n\n"  # between the text and the first question
    noise: bool = False  # whether the text is RULER's five sentences over and over
