"""Looking up one short value: passkeys, UUIDs and pairs of words.

Passkey retrieval follows Quest's protocol (arXiv 2406.10774, section 4.2.2) in the wording of Mohtashami and
Jaggi (arXiv 2305.16300), which Quest has by way of YaRN. Records of keys and values are after Liu et al.
(arXiv 2307.03172, section 4).
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

from offload_decode.common.errors import ConfigError
from offload_decode.evals.tasks import words
from offload_decode.evals.tasks.base import Context, Episode, HiddenFacts, Material, Question, Task
from offload_decode.evals.tasks.words import Split

LENGTHS = (10_000, 100_000)  # tokens of text, as in Quest's table 1
BUDGETS = (64, 128, 256, 512, 1024, 2048, 4096)

TELL = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there."
)
NOISE = (
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "Here we go.",
    "There and back again.",
)
FACT = "The pass key is {key}. Remember it. {key} is the pass key."
ASK = "What is the pass key?"
PREFIX = " The pass key is"
_DIGITS = 5
_ROUNDS = 40  # of the five sentences, to count their tokens


@dataclass(frozen=True)
class Passkey(Task):
    """A number of five digits among five sentences that repeat, at a depth drawn evenly.

    In the control the five sentences go on instead. Chance: 1 in 18,000, as many keys as the split for
    evaluation has.
    """

    name: ClassVar[str] = "passkey"
    max_new_tokens: ClassVar[int] = 16

    def context(self, rng: random.Random, material: Material, split: Split = "eval") -> Context:
        key = words.number(rng, split, _DIGITS)
        fact = FACT.format(key=key)
        size = material.count(_noise(_ROUNDS * len(NOISE))) / (_ROUNDS * len(NOISE))
        sentences = int((material.tokens - material.count(f"{TELL}\n\n{fact}\n\n")) / size)
        if sentences < 1:
            raise ConfigError(f"{material.tokens:,} tokens do not hold a pass key: take a longer text")
        before = round(rng.random() * sentences)
        after = sentences - before
        instead = round(material.count(fact) / size)
        question = Question(ASK, PREFIX, (key,), statement=f"The pass key is {key}.")
        return Context(
            "\n".join([TELL, _noise(before), fact, _noise(after)]),
            "\n".join([TELL, _noise(before), _noise(instead), _noise(after)]),
            (question,),
            (before / sentences,),
            (material.count(fact),),
        )

    def guess(self, rng: random.Random, question: Question) -> str:
        """Another key."""
        return words.number(rng, "eval", _DIGITS)


def _noise(sentences: int) -> str:
    """So many sentences, the five in turn."""
    rounds, rest = divmod(sentences, len(NOISE))
    return " ".join([*NOISE * rounds, *NOISE[:rest]])


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


TASKS: tuple[type[Task], ...] = (Passkey, KeyValue, WordPairs)
