"""How often is somebody mentioned? Chance: one in as many counts as are likely, which grow with the text."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

from offload_decode.evals.tasks import scoring
from offload_decode.evals.tasks.aggregate import names, reading
from offload_decode.evals.tasks.aggregate.spread import Choice, Draw, Fact, SpreadFacts, around, span
from offload_decode.evals.tasks.base import Question
from offload_decode.evals.tasks.plain_answers import plain
from offload_decode.evals.tasks.words import Split

_ASKED = 2
_SENTENCES = (
    "On the way to {town}, {name} stopped to look at a {thing}.",
    "Nobody in {town} had told {name} about the {thing}.",
    "In the autumn {name} wrote a long letter to a friend in {town}.",
    "That evening {name} came home later than usual.",
    "It was {name} who first noticed the {thing}.",
    "The {thing} had once belonged to {name}.",
    "For a whole week {name} spoke of nothing but the {thing}.",
    "Everybody in {town} knew {name} by sight.",
    "In the spring {name} moved to {town}.",
    "At the market of {town} a stranger greeted {name}.",
    "As for the {thing}, {name} did not believe a word of it.",
    "Without {name} the {thing} would have been lost.",
    "The road to {town} was well known to {name}.",
    "Early in the morning {name} was seen with a {thing}.",
)
_ASK = (
    "How many times is {name} mentioned in the text? Answer with the number alone.",
    "How often does the name {name} occur in the text above? Give only the number.",
    "Count the sentences that mention {name}. How many are there? Answer with a number.",
    "In how many sentences is {name} named? Answer with the number alone.",
)


@dataclass(frozen=True)
class CountMentions(SpreadFacts):
    """Sentences about two people, asked for in turn, and others who share a name with them.

    An oracle reads every sentence about the person. In the control these are about the others instead, so
    that the count is 0, which no answer is.
    """

    name: ClassVar[str] = "count-mentions"
    max_new_tokens: ClassVar[int] = 24
    share: ClassVar[float] = 0.2
    fewest: ClassVar[int] = 6
    lines: ClassVar[bool] = False

    @property
    def per_context(self) -> int:
        return _ASKED

    def draw(self, rng: random.Random, facts: int, split: Split) -> Draw:
        middle = max(2, facts // (2 * _ASKED))
        people = names.people(rng, _ASKED, split)
        others = [name for person in people for name in _alike(rng, person, people, split)]
        about = [person for person in people for _ in range(around(rng, middle))]
        about += rng.choices(others, k=max(_ASKED, facts - len(about)))
        rng.shuffle(about)
        written: list[Fact] = []
        for name in about:
            sentence = _sentence(rng, split)
            text = sentence.replace("{name}", name)
            control = sentence.replace("{name}", rng.choice(others) if name in people else name)
            written.append(Fact(text, control))
        low, high = span(middle)
        counts = tuple(str(count) for count in range(low, high + 1))
        questions = tuple(
            Choice(
                rng.choice(_ASK).format(name=person),
                " The number is",
                (str(about.count(person)),),
                choices=counts,
            )
            for person in people
        )
        needed = tuple(tuple(i for i, name in enumerate(about) if name == person) for person in people)
        return Draw(tuple(written), questions, needed)

    def score(self, question: Question, said: str) -> float:
        """1 for the one right number, of the person who was asked for."""
        said = plain(said)
        if scoring.rambles(question, said) or any(name not in question.text for name in reading.people(said)):
            return 0.0
        return float(reading.number(said) == int(question.answers[0]))


def _alike(rng: random.Random, person: str, people: list[str], split: Split) -> list[str]:
    """Somebody with the same first name, and somebody with the same surname."""
    first, last = person.split()
    while True:
        found = [f"{first} {names.surname(rng, split)}", f"{names.first(rng, split)} {last}"]
        if not set(found) & set(people):
            return found


def _sentence(rng: random.Random, split: Split) -> str:
    """With a place for the name."""
    return rng.choice(_SENTENCES).format(
        name="{name}", town=names.towns(rng, 1, split)[0], thing=names.thing(rng, split)
    )


TASKS: tuple[type[SpreadFacts], ...] = (CountMentions,)
