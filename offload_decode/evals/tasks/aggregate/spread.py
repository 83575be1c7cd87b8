"""Facts spread over a text: the more text, the more facts, and the more of them a question needs.

A question here is about all facts of a kind, so that its answer is lost with any of them (compare Oolong,
arXiv 2511.02817, and The Sparse Frontier, arXiv 2504.17768). Prose stands between the facts, and so do
facts of other kinds that look alike.
"""

from __future__ import annotations

import random
import re
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from offload_decode.errors import ConfigError
from offload_decode.evals.tasks.base import Context, Material, Question, Task, insert
from offload_decode.evals.tasks.words import Split

_SAMPLE = 32  # facts whose tokens are counted to know how many facts fill their share
_OFF = 0.005  # share of the tokens by which a text may miss its length
_ATTEMPTS = 4
_SLACK = 0.05
_GAP = re.compile(r"\n{4,}")


@dataclass(frozen=True)
class Fact:
    """A sentence of the text, and the one that stands in its place in the control."""

    text: str
    control: str


@dataclass(frozen=True)
class Choice(Question):
    """A question of which even a guess knows what the answer may be."""

    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Draw:
    """Facts in their order, questions, and for each question which facts it cannot be answered without."""

    facts: tuple[Fact, ...]
    questions: tuple[Question, ...]
    needed: tuple[tuple[int, ...], ...]


class SpreadFacts(Task):
    """Subclasses say which facts there are, and what is asked of them (`draw`)."""

    share: ClassVar[float]  # of the text's tokens that are facts
    fewest: ClassVar[int]  # facts without which there is nothing to ask
    lines: ClassVar[bool] = True  # facts stand as lines, several together; otherwise among the sentences

    @abstractmethod
    def draw(self, rng: random.Random, facts: int, split: Split) -> Draw:
        """Draw about so many facts, at least `fewest`, and `per_context` questions about them."""

    def context(self, rng: random.Random, material: Material, split: Split = "eval") -> Context:
        """The facts in runs at places drawn afresh, with filler between them."""
        drawn = self.draw(rng, self._how_many(rng, material, split), split)
        runs = self._runs(rng, len(drawn.facts))
        depths = sorted(rng.random() for _ in runs)
        facts = self._joined([fact.text for fact in drawn.facts], runs)
        instead = self._joined([fact.control for fact in drawn.facts], runs)
        taken = material.count("\n\n".join(facts))
        room = material.tokens - taken
        if room < 1:
            raise ConfigError(
                f"{material.tokens:,} tokens do not hold the facts of the task '{self.name}': "
                "take a longer text, or ask other tasks"
            )
        # Asked for once, a little longer than needed, and then cut by characters: tokenizing takes long.
        most = room + int(_SLACK * material.tokens) + 1
        filler = material.filler(most)
        for _ in range(_ATTEMPTS):
            text = _put(_cut(filler, room / most), facts, depths)
            off = material.tokens - material.count(text)
            if abs(off) <= _OFF * material.tokens:
                break
            room += off
        longer = material.count("\n\n".join(instead)) - taken
        return Context(
            text,
            _put(_cut(filler, (room - longer) / most), instead, depths),
            drawn.questions,
            (None,) * len(drawn.needed),
            tuple(material.count("\n".join(drawn.facts[i].text for i in which)) for which in drawn.needed),
        )

    def guess(self, rng: random.Random, question: Question) -> str:
        """One of the choices, or where there are none the answer of another draw."""
        if isinstance(question, Choice):
            return rng.choice(question.choices)
        return rng.choice(self.draw(rng, self.fewest, "eval").questions).response

    def _how_many(self, rng: random.Random, material: Material, split: Split) -> int:
        """As many facts as fill their share of the text."""
        sample = self.draw(random.Random(rng.getrandbits(64)), max(_SAMPLE, self.fewest), split).facts
        cost = material.count("\n".join(fact.text for fact in sample)) / len(sample)
        return max(self.fewest, int(self.share * material.tokens / cost))

    def _runs(self, rng: random.Random, facts: int) -> list[range]:
        """The facts in runs of a few that stand together."""
        runs: list[range] = []
        at = 0
        while at < facts:
            end = min(facts, at + rng.randint(1, 5 if self.lines else 2))
            runs.append(range(at, end))
            at = end
        return runs

    def _joined(self, facts: Sequence[str], runs: Sequence[range]) -> list[str]:
        """A paragraph of lines for each run, or sentences."""
        if self.lines:
            return ["\n".join(facts[run.start : run.stop]) + "\n" for run in runs]
        return [" ".join(facts[run.start : run.stop]) for run in runs]


def around(rng: random.Random, middle: float) -> int:
    """A number from half to one and a half times the middle, all alike, at least 1."""
    low, high = span(middle)
    return rng.randint(low, high)


def span(middle: float) -> tuple[int, int]:
    """The least and the largest number that `around` draws."""
    return max(1, round(middle / 2)), max(1, round(1.5 * middle))


def _cut(filler: str, share: float) -> str:
    """The first part of the filler; all of it, or none, where that is more or less than there is."""
    return filler[: max(0, round(share * len(filler)))]


def _put(filler: str, facts: Sequence[str], depths: Sequence[float]) -> str:
    """Facts that fall on the same place do not pile up their empty lines."""
    return _GAP.sub("\n\n", insert(filler, facts, depths))
