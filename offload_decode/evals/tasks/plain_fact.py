"""A fact in everyday words."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

from offload_decode.evals.tasks import words
from offload_decode.evals.tasks.base import Episode, HiddenFacts, Question
from offload_decode.evals.tasks.words import Split


@dataclass(frozen=True)
class PlainFact(HiddenFacts):
    """`The secret code for brisk lantern is 48213.`, in a text."""

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


TASKS: tuple[type[HiddenFacts], ...] = (PlainFact,)
