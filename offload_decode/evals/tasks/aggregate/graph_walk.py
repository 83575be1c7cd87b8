"""A walk through towns from which several lines lead on.

Chance: nothing from the question, one in as many towns as the text names.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from math import sqrt
from typing import ClassVar

from offload_decode.evals.tasks import hedges, scoring
from offload_decode.evals.tasks.aggregate import names, reading
from offload_decode.evals.tasks.aggregate.spread import Draw, Fact, SpreadFacts, around
from offload_decode.evals.tasks.base import Material, Question
from offload_decode.evals.tasks.plain_answers import plain
from offload_decode.evals.tasks.words import Split

_ASKED = 2
_RATE = 0.5  # steps of a walk for each square root of the towns
_MEANS = ("bus", "ferry", "train", "tram", "coach")
_LINES = (
    "From {town} the {one} goes to {first} and the {two} to {second}.",
    "The {one} from {town} ends in {first}, the {two} in {second}.",
    "In {town} you can take the {one} to {first} or the {two} to {second}.",
    "{town}: the {one} leads to {first}, the {two} to {second}.",
)
_END = (
    "Somebody starts in {town} and takes the {means}, {steps} times in a row. In which town does the "
    "journey end? Answer with its name alone.",
    "You are in {town} and travel on by {means}, {steps} times one after the other. Where are you then? "
    "Name only that town.",
)
_PATH = (
    "Somebody starts in {town} and takes the {means}, {steps} times in a row. Name the towns that are "
    "reached, in order.",
    "You are in {town} and travel on by {means}, {steps} times one after the other. List every town where "
    "you arrive, in order.",
)
# What a town is named again after, to go on from it or to end there.
_AGAIN = re.compile(r"\b(?:from|ends?(?:\s+up)?\s+(?:in|at))\s+$", re.IGNORECASE)


@dataclass(frozen=True)
class GraphWalk(SpreadFacts):
    """Two walks, each by one of two means on which every town lies: one is asked for its end, one for all
    its towns.

    An oracle reads the lines of the towns on the walk, whose number grows with the square root of the
    text's length. In the control other towns' lines stand in their place.
    """

    name: ClassVar[str] = "graph-walk"
    max_new_tokens: ClassVar[int] = 128
    share: ClassVar[float] = 0.4
    fewest: ClassVar[int] = 5

    @property
    def per_context(self) -> int:
        return _ASKED

    def draw(self, rng: random.Random, facts: int, split: Split) -> Draw:
        steps = [min(facts - 1, max(2, around(rng, _RATE * sqrt(facts)))) for _ in range(_ASKED)]
        drawn = names.towns(rng, facts + sum(steps), split)
        towns, spare = drawn[:facts], drawn[facts:]
        means = rng.sample(_MEANS, _ASKED)
        rounds = [rng.sample(towns, facts) for _ in means]
        onward = [dict(zip(tour, [*tour[1:], tour[0]], strict=True)) for tour in rounds]
        questions: list[Question] = []
        walks: list[list[str]] = []  # the towns that are left, not the last one
        for by, after, count, wordings in zip(means, onward, steps, (_END, _PATH), strict=True):
            walk = [rng.choice(towns)]
            while len(walk) <= count:
                walk.append(after[walk[-1]])
            walks.append(walk[:-1])
            end = wordings is _END
            asked = rng.choice(wordings).format(town=walk[0], means=by, steps=count)
            prefix = " The town is" if end else " The towns are:"
            questions.append(Question(asked, prefix, tuple(walk[-1:] if end else walk[1:])))
        left = {town for walk in walks for town in walk}
        written: list[Fact] = []
        for town in towns:
            text = _line(rng, town, means, [after[town] for after in onward])
            control = _line(rng, spare.pop(), means, rng.sample(towns, 2)) if town in left else text
            written.append(Fact(text, control))
        needed = tuple(tuple(towns.index(town) for town in walk) for walk in walks)
        return Draw(tuple(written), tuple(questions), needed)

    def most_tokens(self, question: Question, material: Material) -> int:
        """All towns of the walk, and as much again."""
        return max(self.max_new_tokens, 2 * material.count(question.response))

    def score(self, question: Question, said: str) -> float:
        """For the end 1 for the one right town; for the walk the towns that are right up to the first that is
        wrong, of all there are or of all that were given where these are more.
        """
        said = plain(said)
        if scoring.rambles(question, said):
            return 0.0
        if len(question.answers) == 1:
            return float(reading.only(names.TOWN, said, question.answers[0], question.text))
        withheld = hedges.withheld(said) or scoring.none_of(question, said, question.answers)
        given = [] if withheld else _towns(said)
        if given and given[0] in reading.named(names.TOWN, question.text):
            del given[0]  # the walk may be told from its start on
        right = 0
        for town, answer in zip(given, question.answers, strict=False):
            if town != answer.lower():
                break
            right += 1
        return reading.overlap(right, question.answers, len(given))


def _towns(said: str) -> list[str]:
    """`reading.named`, where `to Lilybury, from Lilybury to` is one arrival."""
    found: list[str] = []
    for match, town in zip(names.TOWN.finditer(said), reading.named(names.TOWN, said), strict=True):
        if town != (found or [""])[-1] or not _AGAIN.search(said, 0, match.start()):
            found.append(town)
    return found


def _line(rng: random.Random, town: str, means: list[str], targets: list[str]) -> str:
    """A town's two connections, either first."""
    ways = list(zip(means, targets, strict=True))
    rng.shuffle(ways)
    (one, first), (two, second) = ways
    return rng.choice(_LINES).format(town=town, one=one, first=first, two=two, second=second)


TASKS: tuple[type[SpreadFacts], ...] = (GraphWalk,)
