"""Eval tasks that need much of a text at once, drawn with the training half of their words and values."""

from __future__ import annotations

import random
from typing import Any

from offload_decode.errors import ConfigError
from offload_decode.evals import tasks
from training.fillers import Fillers
from training.items import Ask, Item

NAMES = (
    "count-mentions",
    "filter-records",
    "join-story",
    "every-record",
    "tally-lines",
    "graph-walk",
    "header",
)


class Cut:
    """What a task's text is made of (`tasks.Material`): pieces of the fillers."""

    def __init__(self, rng: random.Random, tokenizer: Any, fillers: Fillers, tokens: int) -> None:
        self.rng, self.tokenizer, self.fillers = rng, tokenizer, fillers
        self._tokens = tokens

    @property
    def tokens(self) -> int:
        """How long a text is to be."""
        return self._tokens

    def filler(self, tokens: int) -> str:
        """About so many tokens."""
        return str(self.tokenizer.decode(self.fillers.cut(self.rng, tokens)))

    def count(self, text: str) -> int:
        """How many tokens a text takes."""
        return len(self.tokenizer.encode(text, add_special_tokens=False))


def drawn(rng: random.Random, tokenizer: Any, fillers: Fillers, length: int) -> Item:
    """A task's text as one fact, and its questions, with the answer begun for the model or not."""
    while True:
        task = tasks.get(rng.choice(NAMES))
        tokens = int(length * rng.uniform(0.4, 0.85))
        try:
            context = task.context(rng, Cut(rng, tokenizer, fillers, tokens), "train")
        except ConfigError:  # so short a window does not hold this task
            continue
        return Item([context.text], [asked(rng, question) for question in context.questions], far=False)


def asked(rng: random.Random, question: tasks.Question) -> Ask:
    """The question up to the answer, and the answer: begun, or whole, as a sentence where there is one."""
    if question.answer_prefix and rng.random() < 0.5:
        return f"{question.text}\nAnswer:{question.answer_prefix}", f" {question.response}"
    return f"{question.text}\nAnswer:", f" {question.statement or question.response}"
