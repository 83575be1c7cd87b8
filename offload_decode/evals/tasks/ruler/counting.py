"""Which words come most often? RULER's cwe and fwe (arXiv 2404.06654, section 3.3)."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import pi
from typing import ClassVar

from offload_decode.evals.tasks import scoring, words
from offload_decode.evals.tasks.base import Context, Material, Question, Task, too_short
from offload_decode.evals.tasks.ruler.haystacks import fitting
from offload_decode.evals.tasks.words import Split

_SPARE = 60  # words from which the control's are taken


class _Drawn:
    """The first so many of words that are drawn once, however often they are asked for."""

    def __init__(self, drawing: Iterator[str]) -> None:
        self._drawing = drawing
        self._drawn: list[str] = []

    def first(self, count: int) -> list[str]:
        self._drawn += islice(self._drawing, max(0, count - len(self._drawn)))
        return self._drawn[:count]


def _as_long(material: Material, drawn: Sequence[str], spare: Sequence[str]) -> list[str]:
    """For each word another one, of as many tokens where there is one."""
    sizes = {other: material.count(f" {other}") for other in spare}
    found: list[str] = []
    for word in drawn:
        size = material.count(f" {word}")
        found.append(min(sizes, key=lambda other: abs(sizes[other] - size)))
        del sizes[found[-1]]
    return found


@dataclass(frozen=True)
class CommonWords(Task):
    """A numbered list in which ten words come thirty times each, and the others three times.

    A text of fewer than 4,096 tokens has them six times and once.
    """

    name: ClassVar[str] = "cwe"
    max_new_tokens: ClassVar[int] = 120
    common: int = 10
    times: int = 30
    others_times: int = 3
    short_times: int = 6
    short_others_times: int = 1

    def context(self, rng: random.Random, material: Material, split: Split = "eval") -> Context:
        """As many other words as there is room for; in the control other words are the common ones."""
        short = material.tokens < 4096
        times, others_times = (
            (self.short_times, self.short_others_times) if short else (self.times, self.others_times)
        )
        drawn = _Drawn(words.vocabulary(rng, split))
        common = drawn.first(self.common)
        instead = _as_long(material, common, drawn.first(_SPARE)[self.common :])
        kept_out = {*common, *instead}
        order = rng.getrandbits(64)

        def write(count: int, common: list[str] = common) -> str:
            others = [w for w in drawn.first(2 * self.common + count) if w not in kept_out]
            listed = common * times + others[:count] * others_times
            random.Random(order).shuffle(listed)
            return (
                "Below is a numbered list of words. In these words, some appear more often than others. "
                "Memorize the ones that appear most often.\n"
                + " ".join(f"{number}. {word}" for number, word in enumerate(listed, 1))
            )

        count = fitting(material, material.tokens, write, least=1)
        if count < 1:
            raise too_short(self, material.tokens)
        question = Question(
            f"Question: What are the {self.common} most common words in the above list?",
            f" The top {self.common} words that appear most often in the list are:",
            tuple(common),
        )
        return Context(write(count), write(count, instead), (question,), (None,))

    def guess(self, rng: random.Random, question: Question) -> str:
        """So many words of those that it could have been."""
        return ", ".join(islice(words.vocabulary(rng, "eval"), self.common))

    def score(self, question: Question, said: str) -> float:
        return scoring.words_score(question, said)


@dataclass(frozen=True)
class FrequentWords(Task):
    """Words of six letters in disorder whose frequencies fall by Zipf's law: which three come most often?

    The most frequent of all is `...`, which is to be ignored.
    """

    name: ClassVar[str] = "fwe"
    max_new_tokens: ClassVar[int] = 50
    alpha: ClassVar[float] = 2.0
    asked: int = 3

    def counts(self, total: int, kinds: int) -> list[int]:
        """How often each of so many kinds of word comes, the most frequent first."""
        zeta = pi**2 / 6  # of alpha 2.0
        return [int(total * rank**-self.alpha / zeta) for rank in range(1, kinds + 1)]

    def context(self, rng: random.Random, material: Material, split: Split = "eval") -> Context:
        """As many words as there is room for, of a fiftieth as many kinds as the text has tokens; in the
        control the three have other names.
        """
        kinds = max(material.tokens // 50, self.asked + 2)
        drawn = words.distinct(lambda: words.coded(rng, split), kinds - 1 + _SPARE)
        coded, spare = ["...", *drawn[_SPARE:]], drawn[:_SPARE]
        most = slice(1, 1 + self.asked)
        instead = list(coded)
        instead[most] = _as_long(material, coded[most], spare)
        order = rng.getrandbits(64)

        def write(total: int, named: Sequence[str] = coded) -> str:
            listed = [w for w, n in zip(named, self.counts(total, kinds), strict=True) for _ in range(n)]
            random.Random(order).shuffle(listed)
            return (
                "Read the following coded text and track the frequency of each coded word. Find the "
                f"{_IN_WORDS[self.asked]} most frequently appeared coded words. " + " ".join(listed)
            )

        total = fitting(material, material.tokens, write, least=1)
        counts = self.counts(total, kinds)
        if counts[self.asked] == counts[self.asked + 1]:  # nobody could say which it was
            raise too_short(self, material.tokens)
        asked = f"{_IN_WORDS[self.asked]} most frequently appeared words"
        question = Question(
            "Question: Do not provide any explanation. Please ignore the dots '....'. "
            f"What are the {asked} in the above coded text?",
            f" According to the coded text above, the {asked} are:",
            tuple(coded[most]),
        )
        return Context(write(total), write(total, instead), (question,), (None,))

    def guess(self, rng: random.Random, question: Question) -> str:
        """So many words of six letters."""
        return ", ".join(words.distinct(lambda: words.coded(rng, "eval"), self.asked))

    def score(self, question: Question, said: str) -> float:
        return scoring.words_score(question, said, _CODED)


_CODED = re.compile("[a-z]{6}")
_IN_WORDS = {1: "one", 2: "two", 3: "three", 4: "four"}

TASKS: tuple[type[Task], ...] = (CommonWords, FrequentWords)
