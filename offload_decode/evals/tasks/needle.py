"""Needles in a haystack, in RULER's wording (arXiv 2404.06654, appendix B), and a plain fact."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

from offload_decode.evals.tasks import words
from offload_decode.evals.tasks.base import Episode, HiddenFacts, Question
from offload_decode.evals.tasks.words import Split

FACT = "One of the special magic numbers for {key} is: {value}."
ASK = "What is the special magic number for {key} mentioned in the provided text?"
PREFIX = " The special magic number for {key} mentioned in the provided text is"
STATEMENT = "The special magic number for {key} is: {value}."
ASK_ALL = "What are all the special magic numbers for {key} mentioned in the provided text?"
PREFIX_ALL = " The special magic numbers for {key} mentioned in the provided text are"


def several(parts: list[str]) -> str:
    """`a, b, and c`, as RULER lists keys."""
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + ", and " + parts[-1]


@dataclass(frozen=True)
class Needle(HiddenFacts):
    """One number for one key (RULER niah_single_2)."""

    name: ClassVar[str] = "needle"
    max_new_tokens: ClassVar[int] = 40
    distractors: int = 0

    def sample(self, rng: random.Random, split: Split = "eval") -> Episode:
        count = 1 + self.distractors
        keys = words.keys(rng, count, split)
        values = words.distinct(lambda: words.number(rng, split), count)
        facts = tuple(FACT.format(key=k, value=v) for k, v in zip(keys, values, strict=True))
        questions = tuple(
            Question(
                ASK.format(key=k), PREFIX.format(key=k), (v,), statement=STATEMENT.format(key=k, value=v)
            )
            for k, v in zip(keys, values, strict=True)
        )
        return Episode(facts, questions)


@dataclass(frozen=True)
class MultiKeyNeedle(Needle):
    """The same among needles of other keys (RULER niah_multikey_1)."""

    name: ClassVar[str] = "needle-multikey"
    distractors: int = 3


@dataclass(frozen=True)
class MultiValueNeedle(HiddenFacts):
    """All numbers of one key (RULER niah_multivalue)."""

    name: ClassVar[str] = "needle-multivalue"
    max_new_tokens: ClassVar[int] = 48
    values: int = 4

    def sample(self, rng: random.Random, split: Split = "eval") -> Episode:
        key = words.key(rng, split)
        values = words.distinct(lambda: words.number(rng, split), self.values)
        facts = tuple(FACT.format(key=key, value=v) for v in values)
        return Episode(facts, (Question(ASK_ALL.format(key=key), PREFIX_ALL.format(key=key), tuple(values)),))

    def ordered(self, depths: list[float]) -> list[float]:
        return sorted(depths)


@dataclass(frozen=True)
class MultiQueryNeedle(HiddenFacts):
    """The numbers of several keys in one answer (RULER niah_multiquery)."""

    name: ClassVar[str] = "needle-multiquery"
    max_new_tokens: ClassVar[int] = 128
    keys: int = 4

    def sample(self, rng: random.Random, split: Split = "eval") -> Episode:
        keys = words.keys(rng, self.keys, split)
        values = words.distinct(lambda: words.number(rng, split), self.keys)
        facts = tuple(FACT.format(key=k, value=v) for k, v in zip(keys, values, strict=True))
        asked = several(keys)
        statement = " ".join(STATEMENT.format(key=k, value=v) for k, v in zip(keys, values, strict=True))
        question = Question(
            ASK_ALL.format(key=asked), PREFIX_ALL.format(key=asked), tuple(values), statement=statement
        )
        return Episode(facts, (question,))


@dataclass(frozen=True)
class PlainFact(HiddenFacts):
    """A fact in everyday words: `The secret code for brisk lantern is 48213.`"""

    name: ClassVar[str] = "plain-fact"
    max_new_tokens: ClassVar[int] = 40

    def sample(self, rng: random.Random, split: Split = "eval") -> Episode:
        key = words.key(rng, split)
        if rng.random() < 0.5:
            key = "the " + key.replace("-", " ")
        value = words.number(rng, split, rng.choice([4, 5, 6, 7]))
        fact = f"The secret code for {key} is {value}."
        question = Question(
            f"What is the secret code for {key}?", f" The secret code for {key} is", (value,), statement=fact
        )
        return Episode((fact,), (question,))


TASKS: tuple[type[HiddenFacts], ...] = (Needle, MultiKeyNeedle, MultiValueNeedle, MultiQueryNeedle, PlainFact)
