"""Counting words over the whole text, in RULER's wording (arXiv 2404.06654, section 3.3)."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

from offload_decode.evals.tasks import words
from offload_decode.evals.tasks.base import Episode, HiddenFacts, Question
from offload_decode.evals.tasks.words import Split


@dataclass(frozen=True)
class CommonWords(HiddenFacts):
    """A numbered list, cut into pieces that are spread over the text: which words come most often?"""

    name: ClassVar[str] = "common-words"
    max_new_tokens: ClassVar[int] = 32
    common: int = 2
    times: int = 12
    others: int = 16
    per_piece: int = 10

    def sample(self, rng: random.Random, split: Split = "eval") -> Episode:
        chosen = rng.sample(words.NOUNS[split], self.common + self.others)
        common = chosen[: self.common]
        listed = common * self.times + chosen[self.common :]
        rng.shuffle(listed)
        numbered = [f"{number}. {word}" for number, word in enumerate(listed, 1)]
        facts = tuple(
            " ".join(numbered[at : at + self.per_piece]) for at in range(0, len(numbered), self.per_piece)
        )
        question = Question(
            f"Question: What are the {self.common} most common words in the above list?",
            f" The top {self.common} words that appear most often in the list are:",
            tuple(common),
        )
        return Episode(facts, (question,))

    def ordered(self, depths: list[float]) -> list[float]:
        return sorted(depths)


TASKS: tuple[type[HiddenFacts], ...] = (CommonWords,)
