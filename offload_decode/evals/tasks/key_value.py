"""Looking up one of many records: UUIDs (Liu et al., arXiv 2307.03172, section 4) and pairs of words."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

from offload_decode.evals.tasks import words
from offload_decode.evals.tasks.base import Episode, HiddenFacts, Question
from offload_decode.evals.tasks.words import Split


@dataclass(frozen=True)
class KeyValue(HiddenFacts):
    """Short identifiers to short identifiers, as lines of one JSON object spread over the text."""

    name: ClassVar[str] = "key-value"
    max_new_tokens: ClassVar[int] = 64
    pairs: int = 8

    def draw(self, rng: random.Random, split: Split) -> tuple[str, str]:
        """A key and its value."""
        return words.identifier(rng, split)[:13], words.identifier(rng, split)[:13]

    def sample(self, rng: random.Random, split: Split = "eval") -> Episode:
        pairs = dict(self.draw(rng, split) for _ in range(self.pairs))
        facts = tuple(f'"{key}": "{value}",' for key, value in pairs.items())
        questions = tuple(
            Question(
                f'What is the value of the key "{key}"?',
                f' The value of the key "{key}" is',
                (value,),
                '"',
                f'"{key}": "{value}"',
            )
            for key, value in pairs.items()
        )
        return Episode(facts, questions)


@dataclass(frozen=True)
class WordPairs(KeyValue):
    """Keys and values of words instead."""

    name: ClassVar[str] = "key-value-words"
    max_new_tokens: ClassVar[int] = 40

    def draw(self, rng: random.Random, split: Split) -> tuple[str, str]:
        return words.key(rng, split), words.key(rng, split)


TASKS: tuple[type[HiddenFacts], ...] = (KeyValue, WordPairs)
