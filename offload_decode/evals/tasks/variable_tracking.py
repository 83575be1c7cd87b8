"""Following assignments through a text, in RULER's wording (arXiv 2404.06654, section 3.2)."""

from __future__ import annotations

import random
import string
from dataclasses import dataclass
from typing import ClassVar

from offload_decode.evals.tasks import words
from offload_decode.evals.tasks.base import Episode, HiddenFacts, Question
from offload_decode.evals.tasks.words import Split

ASK = "Question: Find all variables that are assigned the value {value} in the text above."
PREFIX = (
    " According to the chain(s) of variable assignment in the text above, {count} variables are assigned"
    " the value {value}, they are:"
)


@dataclass(frozen=True)
class VariableTracking(HiddenFacts):
    """A chain `VAR ABCDE = 12345 ... VAR FGHIJ = VAR ABCDE`, whose links come in order."""

    name: ClassVar[str] = "variable-tracking"
    max_new_tokens: ClassVar[int] = 48
    links: int = 3

    def sample(self, rng: random.Random, split: Split = "eval") -> Episode:
        names = words.distinct(lambda: "".join(rng.choices(string.ascii_uppercase, k=5)), self.links)
        value = words.number(rng, split, 5)
        sources = [value, *(f"VAR {name}" for name in names)]
        facts = tuple(f"VAR {name} = {source}." for name, source in zip(names, sources, strict=False))
        question = Question(
            ASK.format(value=value), PREFIX.format(count=self.links, value=value), tuple(names)
        )
        return Episode(facts, (question,))

    def ordered(self, depths: list[float]) -> list[float]:
        return sorted(depths)


TASKS: tuple[type[HiddenFacts], ...] = (VariableTracking,)
