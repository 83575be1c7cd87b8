"""Questions about documents among others: RULER's qa_1 and qa_2 (arXiv 2404.06654, section 3.4)."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from offload_decode.errors import ConfigError
from offload_decode.evals.tasks import squad
from offload_decode.evals.tasks.base import Context, Material, Question, Task, too_short
from offload_decode.evals.tasks.ruler.qa_files import Asked, Questions, ours, read
from offload_decode.evals.tasks.words import Split

__all__ = ["MultiHop", "Questions", "SingleHop", "read", "task_of"]

_TELL = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other "
    "words."
)
_INSTRUCTION = f"{_TELL}\n\nThe following are given documents.\n\n"
_NAME = r"(?<!\S)[A-Z0-9][^\s,]*"
_MISSES = 200  # documents that are tried for what is left of the room


@dataclass(frozen=True)
class Either(Question):
    """A question whose answers are several ways to say the same."""

    @property
    def response(self) -> str:
        return self.answers[0]


@dataclass(frozen=True)
class SingleHop(Task):
    """Questions that one document answers, among others: those of its article first, then any.

    Several questions share a text, which holds the documents of all of them; the control holds none of these.
    """

    name: ClassVar[str] = "qa_1"
    max_new_tokens: ClassVar[int] = 32
    hops: ClassVar[int] = 1
    source: Questions | None = None
    asked: int = 4

    @property
    def questions(self) -> Questions:
        """Where questions and documents are from."""
        return self.source or ours(self.hops)

    @property
    def per_context(self) -> int:
        """How many questions share a text."""
        return self.asked

    def parameters(self) -> dict[str, Any]:
        return {"asked": self.asked, "file": self.questions.name, "file_sha256": self.questions.sha256}

    def context(self, rng: random.Random, material: Material, split: Split = "eval") -> Context:
        """As many documents as there is room for. Raises `ConfigError` also where there are too few of them,
        and for the split to train on, of which these questions have none.
        """
        if split == "train":
            raise ConfigError(f"The questions of the task '{self.name}' are for evaluation alone.")
        files = self.questions
        room = material.tokens - material.count(_INSTRUCTION)
        costs = _Costs(material, files.documents)
        wanted = min(self.asked, len(files.asked))
        chosen, needed = costs.chosen(rng.sample(files.asked, len(files.asked)), wanted, room)
        if len(chosen) < wanted:  # those whose documents are the shortest: no draw decides what fits
            shortest = sorted(files.asked, key=lambda one: costs.total(one.needed))
            chosen, needed = costs.chosen(shortest, wanted, room)
        if len(chosen) < wanted:
            raise too_short(self, material.tokens)
        near = sorted({at for one in chosen for at in one.near} - needed)
        others = sorted(set(range(len(files.documents))) - needed - set(near))
        around = [*rng.sample(near, len(near)), *rng.sample(others, len(others))]
        taken = costs.fill(sorted(needed), around, room)
        instead = costs.fill([], around, room)
        every = costs.total(instead) + costs.total(needed)
        if len(instead) == len(around) and every < room:
            raise ConfigError(
                f"all documents of {files.name} come to {every:,} tokens, fewer than {material.tokens:,}: "
                "name a larger file, or take a shorter text"
            )
        rng.shuffle(taken)
        rng.shuffle(instead)
        text = costs.fitted(taken, needed)
        return Context(
            text,
            costs.fitted(instead, set()),
            tuple(_question(one) for one in chosen),
            tuple(_depth(text, taken, one) for one in chosen),
        )

    def guess(self, rng: random.Random, question: Question) -> str:
        """Of `A or B?` one, of yes-or-no questions `yes` (the more frequent answer), else the answer to a
        question that begins alike.
        """
        asked = question.text.rsplit("Question: ", 1)[-1]
        if either := _either(asked):
            return rng.choice(either)
        first, *_ = asked.lower().split()
        if first in ("is", "are", "was", "were", "do", "does", "did", "has", "have", "can"):
            return "yes"
        others = [one for one in self.questions.asked if one.question != asked]
        alike = [one for one in others if one.question.lower().startswith(f"{first} ")] or others
        return rng.choice(alike).answers[0] if alike else ""

    def score(self, question: Question, said: str) -> float:
        """SQuAD's exact match; `squad.token_f1` is its other measure."""
        return squad.exact(question.answers, said)

    def ruler_score(self, question: Question, said: str) -> float:
        """RULER's `string_match_part`: whether any of the answers occurs anywhere in what was said."""
        return float(any(answer.lower() in said.lower() for answer in question.answers))


@dataclass(frozen=True)
class MultiHop(SingleHop):
    """Questions that take two documents."""

    name: ClassVar[str] = "qa_2"
    hops: ClassVar[int] = 2


def task_of(questions: Questions, asked: int = 4) -> SingleHop:
    """The task that asks the questions of a file: `qa_2` for HotpotQA's, else `qa_1`."""
    return (MultiHop if questions.hops == 2 else SingleHop)(questions, min(asked, len(questions.asked)))


class _Costs:
    """What documents take of the room for a text."""

    def __init__(self, material: Material, documents: Sequence[str]) -> None:
        self._material = material
        self._documents = documents
        self._known: dict[int, int] = {}

    def of(self, at: int) -> int:
        if at not in self._known:
            self._known[at] = self._material.count(_one(100, self._documents[at]))
        return self._known[at]

    def total(self, taken: Iterable[int]) -> int:
        return sum(map(self.of, taken))

    def chosen(self, asked: Iterable[Asked], count: int, room: int) -> tuple[list[Asked], set[int]]:
        """The first `count` questions whose documents fit together, and these documents."""
        chosen: list[Asked] = []
        needed: set[int] = set()
        for one in asked:
            if len(chosen) == count:
                break
            together = needed | set(one.needed)
            if self.total(together) <= 0.9 * room:
                chosen.append(one)
                needed = together
        return chosen, needed

    def fill(self, taken: list[int], others: Iterable[int], room: int) -> list[int]:
        """As many of the others besides as there is room for."""
        found, size, misses = list(taken), self.total(taken), 0
        for at in others:
            if size + self.of(at) <= room:
                found.append(at)
                size += self.of(at)
            else:
                misses += 1
                if misses == _MISSES:
                    break
        return found

    def fitted(self, taken: list[int], needed: set[int]) -> str:
        """The documents as a text. Some of the last, which are not needed, are left out of it and of `taken`
        where together they take more tokens than each by itself, and too many.
        """
        while True:
            text = _written(self._documents, taken)
            over = self._material.count(text) - self._material.tokens
            spare = [at for at in taken if at not in needed]
            if over <= 0 or not spare:
                return text
            while over > 0 and spare:
                at = spare.pop()
                taken.remove(at)
                over -= self.of(at)


def _either(asked: str) -> tuple[str, str] | None:
    """The two things of `Which came first, the hen or the egg?`, names of several words whole."""
    parts = re.search(r"^(.*[^,\s]),?\s+or\s+([^?]+?)\s*\?$", asked)
    if parts is None:
        return None
    before, second = parts.groups()
    listed = before.rpartition(", ")[2] if ", " in before else ""
    named = re.search(rf"(?:{_NAME}\s+(?:(?:of|the|for|and|in|de)\s+)*)*{_NAME}$", before)
    first = listed or (named.group() if named else (before.split() or [""])[-1])
    return first, second


def _one(number: int, document: str) -> str:
    return f"Document {number}:\n{document}\n\n"


def _written(documents: Sequence[str], taken: Sequence[int]) -> str:
    return _INSTRUCTION + "".join(_one(n, documents[at]) for n, at in enumerate(taken, 1)).rstrip("\n")


def _question(one: Asked) -> Question:
    return Either(f"{_TELL}\n\nQuestion: {one.question}", "", one.answers)


def _depth(text: str, taken: Sequence[int], one: Asked) -> float | None:
    if len(one.needed) > 1:
        return None
    return text.index(f"Document {taken.index(one.needed[0]) + 1}:\n") / len(text)


TASKS: tuple[type[Task], ...] = (SingleHop, MultiHop)
