"""Who meets two conditions? Chance: nothing, as names are drawn afresh."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from itertools import product
from math import sqrt
from typing import ClassVar

from offload_decode.evals.tasks import hedges, scoring
from offload_decode.evals.tasks.aggregate import names, reading
from offload_decode.evals.tasks.aggregate.spread import Draw, Fact, SpreadFacts, around
from offload_decode.evals.tasks.base import Material, Question
from offload_decode.evals.tasks.plain_answers import plain
from offload_decode.evals.tasks.words import Split

_ASKED = 2
_SIDE = 5  # trades and towns in one text
_RATE = 0.66  # matches for each square root of the records
_TRADES = (
    *("baker", "carpenter", "teacher", "nurse", "gardener"),
    *("weaver", "miller", "clerk", "printer", "glazier"),
)
_TRADE = re.compile(rf"\b(?:{'|'.join(_TRADES)})(?=s?\b)")  # in small letters: some are surnames, too
_RECORDS = (
    "{name}, {age}, is a {trade} in {town}.",
    "{name} works as a {trade} in {town} and is {age} years old.",
    "In {town} lives {name}, a {trade} of {age}.",
    "The {trade} {name}, aged {age}, lives in {town}.",
    "{name} is {age} and earns a living in {town} as a {trade}.",
    "{town} has been the home of {name}, a {trade}, for {age} years.",
)
_ASK = (
    "Who works as a {trade} and lives in {town}? List all of their names.",
    "List the names of all people who are a {trade} in {town}.",
    "Which people from {town} have the trade of a {trade}? Give every name.",
    "Name everybody in the text who is both a {trade} and at home in {town}.",
)
_ANY_NAME = re.compile(r"\b(?!(?:All|And|In|The|These|Yes)\b)[A-Z][^\W\d_]+ [A-Z][^\W\d_]+\b")


@dataclass(frozen=True)
class FilterRecords(SpreadFacts):
    """Records of people with a trade and a town; two pairs of these are asked for in turn.

    Half of the others meet one of the conditions. An oracle reads every record that matches: their number
    grows with the square root of the text's length, as they must all be written out. In the control other
    people, with other pairs, stand in their place.
    """

    name: ClassVar[str] = "filter-records"
    max_new_tokens: ClassVar[int] = 256
    share: ClassVar[float] = 0.5
    fewest: ClassVar[int] = 6

    @property
    def per_context(self) -> int:
        return _ASKED

    def draw(self, rng: random.Random, facts: int, split: Split) -> Draw:
        trades, towns = rng.sample(_TRADES, _SIDE), names.towns(rng, _SIDE, split)
        asked = list(zip(trades, towns, strict=True))[:_ASKED]
        others = [pair for pair in product(trades, towns) if pair not in asked]
        near = [pair for pair in others if pair[0] in trades[:_ASKED] or pair[1] in towns[:_ASKED]]
        pairs = [pair for pair in asked for _ in range(around(rng, _RATE * sqrt(facts)))]
        left = max(_ASKED, facts - len(pairs))
        pairs += [rng.choice(near if rng.random() < 0.5 else others) for _ in range(left)]
        rng.shuffle(pairs)
        matching = [i for i, pair in enumerate(pairs) if pair in asked]
        people = names.people(rng, len(pairs) + len(matching), split)
        written: list[Fact] = []
        for name, pair in zip(people, pairs, strict=False):
            text = _record(rng, name, pair)
            control = _record(rng, people.pop(), rng.choice(others)) if pair in asked else text
            written.append(Fact(text, control))
        needed = tuple(tuple(i for i in matching if pairs[i] == pair) for pair in asked)
        questions = tuple(
            Question(
                rng.choice(_ASK).format(trade=trade, town=town),
                " The names are:",
                tuple(people[i] for i in numbers),
            )
            for (trade, town), numbers in zip(asked, needed, strict=True)
        )
        return Draw(tuple(written), questions, needed)

    def most_tokens(self, question: Question, material: Material) -> int:
        """All names, and as much again."""
        return max(self.max_new_tokens, 2 * material.count(question.response))

    def score(self, question: Question, said: str) -> float:
        """The right names, of all that are right or of all that were given where these are more."""
        said = plain(said)
        if (
            scoring.rambles(question, said)
            or hedges.unsure(said)
            or scoring.none_of(question, said, question.answers)
            or _of_others(question, said)
        ):
            return 0.0
        right, others = 0, 0
        for answer in question.answers:
            found = re.compile(rf"(?<![\w-]){re.escape(answer)}(?![\w-])", re.IGNORECASE)
            places = list(found.finditer(said))
            wrong = any(hedges.denied(said, match) or hedges.vague(said, match) for match in places)
            right += bool(places) and not wrong
            others += wrong
            said = found.sub(";", said)
        extra: set[str] = set()
        for kind in (names.PERSON, _ANY_NAME):
            extra |= {match.group().lower() for match in kind.finditer(said)}
            said = kind.sub(";", said)
        return reading.overlap(right, question.answers, right + others + len(extra))


def _of_others(question: Question, said: str) -> bool:
    """Whether another trade or town is named than those that are asked for, and not denied."""
    named = [name for kind in (_TRADE, names.TOWN) for name in reading.named(kind, said)]
    asked = question.text.lower()
    return any(not name.startswith("!") and name not in asked for name in named)


def _record(rng: random.Random, name: str, pair: tuple[str, str]) -> str:
    trade, town = pair
    return rng.choice(_RECORDS).format(name=name, trade=trade, town=town, age=rng.randint(19, 80))


TASKS: tuple[type[SpreadFacts], ...] = (FilterRecords,)
