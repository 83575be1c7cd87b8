"""A story whose facts are joined over three steps: `In which town was the landlord of Ada's teacher born?`

The question names the first person only: who is met in the second and third step is said nowhere in it, and
everybody has teachers and employers. Chance: nothing from the question, one in as many towns as the text
names.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

from offload_decode.evals.tasks import scoring
from offload_decode.evals.tasks.aggregate import names, reading
from offload_decode.evals.tasks.aggregate.spread import Draw, Fact, SpreadFacts
from offload_decode.evals.tasks.base import Question
from offload_decode.evals.tasks.plain_answers import plain
from offload_decode.evals.tasks.words import Split

_ASKED = 2
_STEPS = 3
# From one person ({a}) to the next ({b}).
_RELATIONS = {
    "teacher": ("{b} taught {a} everything there was to know.", "{a} had learnt the trade from {b}."),
    "landlord": ("{a} rented two rooms from {b}.", "{b} let the upper floor to {a}."),
    "employer": ("{a} worked for {b} all year round.", "It was {b} who paid {a} every Friday for the work."),
    "guardian": ("{b} had brought up {a} like a child.", "As an orphan {a} came into the care of {b}."),
    "creditor": ("{a} owed a large sum to {b}.", "{b} had lent {a} more money than was wise."),
    "doctor": ("{b} was called whenever {a} fell ill.", "With every fever {a} sent for {b}."),
}
# From a person ({a}) to a town ({b}), with the question about {who}.
_PLACES = {
    "In which town was {who} born?": ("{a} was born in {b}.", "{a} first saw the light of day in {b}."),
    "In which town did {who} marry?": ("{a} was married in {b}.", "The wedding of {a} was held in {b}."),
    "In which town did {who} bury a treasure?": (
        "{a} buried a treasure in {b}.",
        "Somewhere in {b} lay the treasure that {a} had buried.",
    ),
    "In which town does {who} own a mill?": ("{a} owns a mill in {b}.", "The mill in {b} belongs to {a}."),
}
_SENTENCES = _RELATIONS | _PLACES
_EVERYTHING = list(_SENTENCES)
_ALONE = (" Answer with the name of the town alone.", " Name only the town.")


@dataclass(frozen=True)
class JoinStory(SpreadFacts):
    """Two chains of three facts, and more of the same relations between others and from those in the chain.

    An oracle reads three facts, however long the text; what grows is the number of others. In the control the
    middle fact is about others.
    """

    name: ClassVar[str] = "join-story"
    max_new_tokens: ClassVar[int] = 24
    share: ClassVar[float] = 0.3
    fewest: ClassVar[int] = 8
    lines: ClassVar[bool] = False

    @property
    def per_context(self) -> int:
        return _ASKED

    def draw(self, rng: random.Random, facts: int, split: Split) -> Draw:
        people = names.people(rng, max(facts // 2, 5 * _ASKED), split)
        spare = [people.pop() for _ in range(_ASKED)]  # they stand in the control alone
        towns = names.towns(rng, facts + _ASKED, split)
        told: dict[tuple[str, str], Fact] = {}  # by person and relation: nobody has two teachers
        chains: list[list[tuple[str, str]]] = []
        misleading: list[tuple[str, str]] = []  # the relations asked for, of the wrong person in the chain
        questions: list[Question] = []
        for number, other in enumerate(spare):
            a, b, c = people[_STEPS * number : _STEPS * (number + 1)]
            first, second = rng.sample(list(_RELATIONS), 2)
            place, town = rng.choice(list(_PLACES)), towns.pop()
            told[a, first] = _both(_told(rng, first, a, b))
            told[b, second] = Fact(
                _told(rng, second, b, c), _told(rng, second, other, rng.choice(people[_STEPS * _ASKED :]))
            )
            told[c, place] = _both(_told(rng, place, c, town))
            chains.append([(a, first), (b, second), (c, place)])
            misleading += [(a, second), (b, place), (a, place)]
            asked = place.format(who=f"the {second} of the {first} of {a}") + rng.choice(_ALONE)
            questions.append(Question(asked, " The town is", (town,)))
        while len(told) < facts:
            who, what = misleading.pop(0) if misleading else (rng.choice(people), rng.choice(_EVERYTHING))
            target = rng.choice(towns if what in _PLACES else people)
            if (who, what) not in told and target != who:
                told[who, what] = _both(_told(rng, what, who, target))
        order = list(told)
        rng.shuffle(order)
        places = {step: at for at, step in enumerate(order)}
        needed = tuple(tuple(places[step] for step in chain) for chain in chains)
        return Draw(tuple(told[step] for step in order), tuple(questions), needed)

    def score(self, question: Question, said: str) -> float:
        """1 for the one right town."""
        said = plain(said)
        if scoring.rambles(question, said):
            return 0.0
        return float(reading.only(names.TOWN, said, question.answers[0], question.text))


def _told(rng: random.Random, what: str, who: str, target: str) -> str:
    """A sentence that tells what somebody's relation is, or where it was."""
    return rng.choice(_SENTENCES[what]).format(a=who, b=target)


def _both(text: str) -> Fact:
    return Fact(text, text)


TASKS: tuple[type[SpreadFacts], ...] = (JoinStory,)
