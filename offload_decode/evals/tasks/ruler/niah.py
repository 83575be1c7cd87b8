"""Needles in a haystack: eight of RULER's tasks (arXiv 2404.06654, section 3.1 and appendix B)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from offload_decode.evals.tasks import words
from offload_decode.evals.tasks.base import (
    Context,
    Episode,
    HiddenFacts,
    Material,
    Question,
    Task,
    too_short,
)
from offload_decode.evals.tasks.ruler.haystacks import between_lines, fitting, noise_of
from offload_decode.evals.tasks.words import Split

FACT = "One of the special magic numbers for {key} is: {value}."
ASK = "What is the special magic number for {key} mentioned in the provided text?"
PREFIX = " The special magic number for {key} mentioned in the provided text is"
STATEMENT = "The special magic number for {key} is: {value}."
ASK_ALL = "What are all the special magic numbers for {key} mentioned in the provided text?"
PREFIX_ALL = " The special magic numbers for {key} mentioned in the provided text are"
INSTRUCTION = (
    "A special magic number is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the number afterwards.\n"
)
INSTRUCTION_ALL = (
    "Some special magic numbers are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the numbers afterwards.\n"
)
Kind = Literal["number", "uuid"]


def several(parts: list[str]) -> str:
    """`a, b, and c`, as RULER lists keys."""
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + ", and " + parts[-1]


def _values(rng: random.Random, split: Split, kind: Kind, count: int) -> list[str]:
    draw = words.identifier if kind == "uuid" else words.number
    return words.distinct(lambda: draw(rng, split), count)


def _hidden(key: str, value: str, kind: Kind) -> tuple[str, Question]:
    """A needle and the question for it."""
    fact, *asked = (text.replace("number", kind) for text in (FACT, ASK, PREFIX, STATEMENT))
    question, prefix, statement = (text.format(key=key, value=value) for text in asked)
    return fact.format(key=key, value=value), Question(question, prefix, (value,), statement=statement)


@dataclass(frozen=True)
class Needle(HiddenFacts):
    """One number for one key, in prose."""

    name: ClassVar[str] = "niah_single_2"
    max_new_tokens: ClassVar[int] = 40
    instruction: ClassVar[str] = INSTRUCTION
    kind: ClassVar[Kind] = "number"
    distractors: int = 0

    def sample(self, rng: random.Random, split: Split = "eval") -> Episode:
        count = 1 + self.distractors
        keys = words.keys(rng, count, split)
        values = _values(rng, split, self.kind, count)
        pairs = [_hidden(key, value, self.kind) for key, value in zip(keys, values, strict=True)]
        return Episode(tuple(fact for fact, _ in pairs), tuple(question for _, question in pairs))


@dataclass(frozen=True)
class NeedleInNoise(Needle):
    """One number for one key, on a line among lines that are all alike."""

    name: ClassVar[str] = "niah_single_1"

    def haystack(self, material: Material, tokens: int) -> str:
        return noise_of(material, tokens)

    def placed(self, haystack: str, facts: Sequence[str], depths: Sequence[float]) -> str:
        return between_lines(haystack, facts, depths)


@dataclass(frozen=True)
class UuidNeedle(Needle):
    """One UUID for one key, in prose."""

    name: ClassVar[str] = "niah_single_3"
    max_new_tokens: ClassVar[int] = 96
    instruction: ClassVar[str] = INSTRUCTION.replace("number", "uuid")
    kind: ClassVar[Kind] = "uuid"


@dataclass(frozen=True)
class MultiKeyNeedle(Needle):
    """One number for each of four keys, in prose; each is asked for by itself."""

    name: ClassVar[str] = "niah_multikey_1"
    distractors: int = 3


@dataclass(frozen=True)
class MultiValueNeedle(HiddenFacts):
    """Four numbers for one key, in prose: all are asked for."""

    name: ClassVar[str] = "niah_multivalue"
    max_new_tokens: ClassVar[int] = 96
    instruction: ClassVar[str] = INSTRUCTION_ALL
    values: int = 4

    def sample(self, rng: random.Random, split: Split = "eval") -> Episode:
        key = words.key(rng, split)
        values = _values(rng, split, "number", self.values)
        facts = tuple(FACT.format(key=key, value=v) for v in values)
        return Episode(facts, (Question(ASK_ALL.format(key=key), PREFIX_ALL.format(key=key), tuple(values)),))

    def ordered(self, depths: list[float]) -> list[float]:
        return sorted(depths)


@dataclass(frozen=True)
class MultiQueryNeedle(HiddenFacts):
    """One number for each of four keys, in prose: all are asked for at once."""

    name: ClassVar[str] = "niah_multiquery"
    max_new_tokens: ClassVar[int] = 128
    instruction: ClassVar[str] = INSTRUCTION_ALL
    keys: int = 4

    def sample(self, rng: random.Random, split: Split = "eval") -> Episode:
        keys = words.keys(rng, self.keys, split)
        values = _values(rng, split, "number", self.keys)
        facts = tuple(FACT.format(key=k, value=v) for k, v in zip(keys, values, strict=True))
        asked = several(keys)
        statement = " ".join(STATEMENT.format(key=k, value=v) for k, v in zip(keys, values, strict=True))
        question = Question(
            ASK_ALL.format(key=asked),
            PREFIX_ALL.format(key=asked),
            tuple(values),
            statement=statement,
            keys=tuple(keys),
        )
        return Episode(facts, (question,))


@dataclass(frozen=True)
class NeedleAmongNeedles(Task):
    """Every line is a needle of another key; some of them are asked for, each by itself."""

    name: ClassVar[str] = "niah_multikey_2"
    max_new_tokens: ClassVar[int] = 40
    kind: ClassVar[Kind] = "number"
    asked: int = 4

    @property
    def per_context(self) -> int:
        """How many of the needles are asked for."""
        return self.asked

    def key(self, rng: random.Random, split: Split) -> str:
        """A key."""
        return words.key(rng, split)

    def context(self, rng: random.Random, material: Material, split: Split = "eval") -> Context:
        """As many lines as there is room for. The control has others in place of those asked for."""
        drawn: dict[str, str] = {}
        used: set[str] = set()

        def more(count: int) -> list[tuple[str, str]]:
            while len(drawn) < count:
                (key,), (value,) = [self.key(rng, split)], _values(rng, split, self.kind, 1)
                if key not in drawn and value not in used:
                    used.add(value)
                    drawn[key] = value
            return list(drawn.items())[:count]

        instruction = INSTRUCTION.replace("number", self.kind)

        def write(pairs: list[tuple[str, str]]) -> str:
            return instruction + "\n".join(_hidden(*pair, self.kind)[0] for pair in pairs)

        count = fitting(material, material.tokens, lambda count: write(more(count)), least=self.asked)
        if count < self.asked:
            raise too_short(self, material.tokens)
        pairs, others = more(count), more(count + self.asked)[count:]
        at = rng.sample(range(count), self.asked)
        control = list(pairs)
        for place, other in zip(at, others, strict=True):
            control[place] = other
        text = write(pairs)
        hidden = [_hidden(*pairs[place], self.kind) for place in at]
        return Context(
            text,
            write(control),
            tuple(question for _, question in hidden),
            tuple(text.index(fact) / len(text) for fact, _ in hidden),
        )

    def guess(self, rng: random.Random, question: Question) -> str:
        """A value of the right kind."""
        return _values(rng, "eval", self.kind, 1)[0]


@dataclass(frozen=True)
class UuidAmongUuids(NeedleAmongNeedles):
    """The same with UUIDs for keys and values."""

    name: ClassVar[str] = "niah_multikey_3"
    max_new_tokens: ClassVar[int] = 96
    kind: ClassVar[Kind] = "uuid"

    def key(self, rng: random.Random, split: Split) -> str:
        return words.identifier(rng, split)


TASKS: tuple[type[Task], ...] = (
    NeedleInNoise,
    Needle,
    UuidNeedle,
    MultiKeyNeedle,
    NeedleAmongNeedles,
    UuidAmongUuids,
    MultiValueNeedle,
    MultiQueryNeedle,
)
