"""What an eval task is: facts hidden in a text, a question about them, and a score.

A task says which facts it hides and what it asks (`sample`); where they go in the text is the same for all
of them (`build`). The control of an example is the same text and question without the facts: a model that
still answers it has not read the answer from the context.
"""

from __future__ import annotations

import random
import re
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from offload_decode.evals.tasks.words import Split

_BOUNDARY = re.compile(r"(?<=[.!?])\s+|\n\s*\n")


@dataclass(frozen=True)
class Question:
    """A question; `answer_prefix` may be put after `Answer:`; answers are in the order of the text.

    `quote` stands around an answer where it does so in the text: the response a model learns is copied with
    it. `statement` is the answer as a sentence that ends as the fact does, key and all.
    """

    text: str
    answer_prefix: str
    answers: tuple[str, ...]
    quote: str = ""
    statement: str = ""

    @property
    def response(self) -> str:
        """The right answer without a word more."""
        return ", ".join(f"{self.quote}{answer}{self.quote}" for answer in self.answers)


@dataclass(frozen=True)
class Episode:
    """Facts for one context and questions about them; the first question is about the first fact."""

    facts: tuple[str, ...]
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class Example:
    """A context to prefill, a question, the start of the answer, and the strings a right answer holds."""

    context: str
    question: str
    answer_prefix: str
    answers: tuple[str, ...]

    def prompt(self, with_prefix: bool = False) -> str:
        """What follows the context and an empty line: the demo model's chat template, written out."""
        return f"{self.question}\nAnswer:{self.answer_prefix if with_prefix else ''}"


class Task(ABC):
    """One kind of question. Subclasses set `name` and `max_new_tokens` and write `sample`."""

    name: ClassVar[str]
    max_new_tokens: ClassVar[int] = 32

    @abstractmethod
    def sample(self, rng: random.Random, split: Split = "eval") -> Episode:
        """Draw facts and questions; words and values of the two splits do not meet."""

    def build(self, rng: random.Random, filler: str, depth: float | None = None) -> Example:
        """Hide the facts in filler, which is used whole, and ask the first question.

        depth in [0, 1] is the place of the first fact, 0 the start and 1 the end of the text (other facts
        are spread at random); None draws it. Facts go to sentence boundaries.
        """
        return self.examples(rng, filler, depth)[0]

    def pair(self, rng: random.Random, filler: str, depth: float | None = None) -> tuple[Example, Example]:
        """An example and its control: the same text and question without any of the facts."""
        example = self.build(rng, filler, depth)
        return example, replace(example, context=filler)

    def examples(self, rng: random.Random, filler: str, depth: float | None = None) -> list[Example]:
        """One context with every question about its facts, so that it need be prefilled once only."""
        if depth is not None and not 0 <= depth <= 1:
            raise ValueError(f"depth is a share of the text, from 0 to 1, not {depth}.")
        episode = self.sample(rng)
        depths = [rng.random() if depth is None else depth]
        depths += [rng.random() for _ in episode.facts[1:]]
        context = insert(filler, episode.facts, self.ordered(depths))
        return [Example(context, q.text, q.answer_prefix, q.answers) for q in episode.questions]

    def ordered(self, depths: list[float]) -> list[float]:
        """The depths as the task wants them; tasks whose facts must come in order sort them."""
        return depths

    def score(self, example: Example, generated: str) -> float:
        """The share of the answers that are in the generated text as whole words; the prompt is not read."""
        found = sum(holds(generated, answer) for answer in example.answers)
        return found / len(example.answers)


def holds(text: str, answer: str) -> bool:
    """Whether answer occurs in text as whole words: `123` is not in `51234`."""
    return re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", text) is not None


def _nearest(boundaries: list[int], at: float) -> int:
    after = min(bisect_left(boundaries, at), len(boundaries) - 1)
    return min(boundaries[max(after - 1, 0)], boundaries[after], key=lambda boundary: abs(boundary - at))


def insert(filler: str, facts: Sequence[str], depths: Sequence[float]) -> str:
    """Put every fact at the sentence boundary nearest its depth; one of several lines as a paragraph."""
    boundaries = [0, *(m.end() for m in _BOUNDARY.finditer(filler)), len(filler)]
    placed = sorted(
        (_nearest(boundaries, depth * len(filler)), order, fact)
        for order, (fact, depth) in enumerate(zip(facts, depths, strict=True))
    )
    parts: list[str] = []
    last = 0
    for at, _, fact in placed:
        before = filler[last:at]
        parts.append(before)
        if "\n" in fact:
            parts.append(("" if at == 0 else "\n\n") + fact.strip("\n") + "\n\n")
        else:
            gap = "" if at == 0 or filler[at - 1 : at].isspace() else " "
            parts.append(gap + fact + " ")
        last = at
    parts.append(filler[last:])
    return "".join(parts)
