"""Following assignments through a text: RULER's vt (arXiv 2404.06654, section 3.2)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from offload_decode.evals.tasks import words
from offload_decode.evals.tasks.base import Episode, HiddenFacts, Material, Question
from offload_decode.evals.tasks.ruler.haystacks import between_lines, noise_of
from offload_decode.evals.tasks.words import Split

ASK = "Question: Find all variables that are assigned the value {value} in the text above."
PREFIX = (
    " According to the chain(s) of variable assignment in the text above, {count} variables are assigned"
    " the value {value}, they are:"
)


@dataclass(frozen=True)
class VariableTracking(HiddenFacts):
    """Chains `VAR ABCDE = 12345 … VAR FGHIJ = VAR ABCDE …`, in lines that are all alike.

    The links of a chain come in order; each chain's variables are asked for by themselves.
    """

    name: ClassVar[str] = "vt"
    max_new_tokens: ClassVar[int] = 96
    instruction: ClassVar[str] = (
        "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
    )
    hops: int = 4
    chains: int = 1

    def sample(self, rng: random.Random, split: Split = "eval") -> Episode:
        links = 1 + self.hops
        names = words.distinct(lambda: words.variable(rng, split), links * self.chains)
        values = words.distinct(lambda: words.number(rng, split, 5), self.chains)
        facts: list[str] = []
        questions: list[Question] = []
        for number, value in enumerate(values):
            chain = names[number * links : (number + 1) * links]
            sources = [value, *(f"VAR {name}" for name in chain)]
            facts += [f"VAR {name} = {source}" for name, source in zip(chain, sources, strict=False)]
            questions.append(
                Question(ASK.format(value=value), PREFIX.format(count=links, value=value), tuple(chain))
            )
        return Episode(tuple(facts), tuple(questions))

    def ordered(self, depths: list[float]) -> list[float]:
        """In order within each chain; the chains are mingled."""
        links = 1 + self.hops
        return [depth for at in range(0, len(depths), links) for depth in sorted(depths[at : at + links])]

    def haystack(self, material: Material, tokens: int) -> str:
        return noise_of(material, tokens)

    def placed(self, haystack: str, facts: Sequence[str], depths: Sequence[float]) -> str:
        return between_lines(haystack, facts, depths, after=" ")


TASKS: tuple[type[HiddenFacts], ...] = (VariableTracking,)
