"""Questions about many facts of a text: facts to join, every record as JSON, which kind is most frequent.

The more text, the more facts, and the more of them a question needs, so that its answer is lost with any of
them (compare Oolong, arXiv 2511.02817, The Sparse Frontier, arXiv 2504.17768, and the text-to-JSON task of
arXiv 2604.08426). Prose stands between the facts, and so do facts of other kinds that look alike.
"""

import json
import random
import re
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any, ClassVar

from offload_decode.common import files
from offload_decode.evals.haystack import Material
from offload_decode.evals.tasks import words
from offload_decode.evals.tasks.base import Context, Question, Task, insert, too_short

_SAMPLE = 32  # facts whose tokens are counted to know how many facts fill their share
_OFF = 0.005  # share of the tokens by which a text may miss its length
_ATTEMPTS = 4
_SLACK = 0.05
_GAP = re.compile(r"\n{4,}")
_FENCED = re.compile(r"```[a-zA-Z]*\s*(.*?)```", re.DOTALL)

_SAID: dict[str, Any] = json.loads(Path(__file__).with_name("sentences.json").read_text("utf-8"))
_FIRST: list[str] = _SAID["first names"]
_SURNAMES: list[str] = _SAID["ends of surnames"]
_TOWNS: list[str] = _SAID["ends of towns"]
_RELATIONS = _SAID["relations"]  # from one person ({a}) to the next ({b})
_PLACES = _SAID["places"]  # from a person ({a}) to a town ({b}), with the question about {who}
_RELATED = _RELATIONS | _PLACES
_ASKED, _FIELDS, _RECORDS, _LETTERS = (_SAID[of] for of in ("asked", "fields", "records", "letters"))
_PLAIN = [noun for noun in words.NOUNS if len(noun) <= 6]
_FEW, _MANY = 60, 4000  # more towns, or people, than these need longer names to differ


def surname(rng: random.Random) -> str:
    """A surname such as `Lanternwell`."""
    return rng.choice(_PLAIN).capitalize() + rng.choice(_SURNAMES)


def people(rng: random.Random, count: int) -> list[str]:
    """Different people; where very many are needed, with double names such as `Lanternwell-Ottermann`."""

    def draw() -> str:
        name = f"{rng.choice(_FIRST)} {surname(rng)}"
        return f"{name}-{surname(rng)}" if count > _MANY else name

    return words.distinct(draw, count)


def towns(rng: random.Random, count: int) -> list[str]:
    """Different towns: `Otterham`, of many `Otterham-on-Cliff`, of very many `Otterham-on-Brisk-Cliff`."""

    def draw() -> str:
        name = rng.choice(_PLAIN).capitalize() + rng.choice(_TOWNS)
        if count > _FEW:
            name += f"-on-{rng.choice(words.ADJECTIVES).capitalize()}" if count > _MANY else "-on"
            name += f"-{rng.choice(_PLAIN).capitalize()}"
        return name

    return words.distinct(draw, count)


def _filled(rng: random.Random, sentence: str) -> str:
    """A sentence with a town and a thing (`brisk lantern`) drawn for it, and a person for `{anyone}`."""
    return sentence.format(
        name="{name}", anyone=people(rng, 1)[0], town=towns(rng, 1)[0], thing=words.key(rng).replace("-", " ")
    )


Fact = tuple[str, str]
"""A sentence of the text, and the one that stands in its place in the control."""


@dataclass(frozen=True)
class Draw:
    """Facts in their order, and questions about them."""

    facts: tuple[Fact, ...]
    questions: tuple[Question, ...]


class SpreadFacts(Task):
    """Facts spread over a text: subclasses say which, and what is asked of them (`draw`).

    Questions ask for the answer alone, and are scored by SQuAD's exact match.
    """

    exact: ClassVar[bool] = True
    max_new_tokens: ClassVar[int] = 24
    share: ClassVar[float]  # of the text's tokens that are facts
    fewest: ClassVar[int]  # facts without which there is nothing to ask
    lines: ClassVar[bool] = True  # facts stand as lines, several together; otherwise among the sentences
    asked: ClassVar[int] = 1

    @property
    def per_context(self) -> int:
        return self.asked

    @abstractmethod
    def draw(self, rng: random.Random, facts: int) -> Draw:
        """Draw about so many facts, at least `fewest`, and `per_context` questions about them."""

    def context(self, rng: random.Random, material: Material) -> Context:
        """The facts in runs at places drawn afresh, with filler between them."""
        sample = self.draw(random.Random(rng.getrandbits(64)), _SAMPLE).facts
        cost = material.count("\n".join(text for text, _ in sample)) / len(sample)
        drawn = self.draw(rng, max(self.fewest, int(self.share * material.tokens / cost)))
        runs = self._runs(rng, len(drawn.facts))
        depths = sorted(rng.random() for _ in runs)
        facts, instead = (self._joined(sentences, runs) for sentences in zip(*drawn.facts, strict=True))
        taken = material.count("\n\n".join(facts))
        room = material.tokens - taken
        if room < 1:
            raise too_short(self, material.tokens)
        # Asked for once, a little longer than needed, and then cut by characters: tokenizing takes long.
        most = room + int(_SLACK * material.tokens) + 1
        filler = material.filler(most)

        def written(facts: Sequence[str], room: int) -> str:
            # Facts that fall on the same place do not pile up their empty lines.
            return _GAP.sub("\n\n", insert(filler[: max(0, round(room / most * len(filler)))], facts, depths))

        for _ in range(_ATTEMPTS):
            text = written(facts, room)
            off = material.tokens - material.count(text)
            if abs(off) <= _OFF * material.tokens:
                break
            room += off
        return Context(
            text,
            written(instead, room - material.count("\n\n".join(instead)) + taken),
            drawn.questions,
            (None,) * len(drawn.questions),
        )

    def guess(self, rng: random.Random, question: Question) -> str:
        """One of the choices, or where there are none the answer of another draw."""
        if question.choices:
            return rng.choice(question.choices)
        return rng.choice(self.draw(rng, self.fewest).questions).response

    def _runs(self, rng: random.Random, facts: int) -> list[slice]:
        """The facts in runs of a few that stand together."""
        runs = [slice(0, 0)]
        while runs[-1].stop < facts:
            end = runs[-1].stop + rng.randint(1, 5 if self.lines else 2)
            runs.append(slice(runs[-1].stop, min(facts, end)))
        return runs[1:]

    def _joined(self, facts: Sequence[str], runs: Sequence[slice]) -> list[str]:
        """A paragraph of lines for each run, or sentences."""
        joint, end = ("\n", "\n") if self.lines else (" ", "")
        return [joint.join(facts[run]) + end for run in runs]


def _span(middle: float) -> tuple[int, int]:
    """Half and one and a half times the middle, at least 1: between these the number of facts is drawn."""
    return max(1, round(middle / 2)), max(1, round(1.5 * middle))


class JoinStory(SpreadFacts):
    """Facts joined over three steps: `In which town was the landlord of the teacher of Ada Foxley born?`

    The question names the first person only: who is met in the second and third step is said nowhere in it,
    and the same is told of others, and of those in the chain. An oracle reads three facts, however long the
    text; what grows is the number of others. In the control the middle fact is about others. Chance: one in
    as many towns as the text names.
    """

    name: ClassVar[str] = "join-story"
    share: ClassVar[float] = 0.3
    fewest: ClassVar[int] = 8
    lines: ClassVar[bool] = False
    asked: ClassVar[int] = 2

    def draw(self, rng: random.Random, facts: int) -> Draw:
        persons = people(rng, max(facts // 2, 5 * self.asked))
        spare = [persons.pop() for _ in range(self.asked)]  # they stand in the control alone
        places = towns(rng, facts + self.asked)
        told: dict[tuple[str, str], Fact] = {}  # by person and relation: nobody has two teachers
        misleading: list[tuple[str, str]] = []  # the relations asked for, of the wrong person in the chain
        questions: list[Question] = []

        def tell(who: str, what: str, target: str, control: str | None = None) -> None:
            text = rng.choice(_RELATED[what]).format(a=who, b=target)
            told[who, what] = text, control or text

        for number, other in enumerate(spare):
            a, b, c = persons[3 * number : 3 * (number + 1)]
            first, second = rng.sample(list(_RELATIONS), 2)
            place, town = rng.choice(list(_PLACES)), places.pop()
            unrelated = rng.choice(persons[3 * self.asked :])
            tell(a, first, b)
            tell(b, second, c, rng.choice(_RELATED[second]).format(a=other, b=unrelated))
            tell(c, place, town)
            misleading += [(a, second), (b, place), (a, place)]
            text = place.format(who=f"the {second} of the {first} of {a}") + " Name only the town."
            questions.append(Question(text, " The town is", (town,)))
        while len(told) < facts:
            who, what = misleading.pop(0) if misleading else (rng.choice(persons), rng.choice([*_RELATED]))
            target = rng.choice(places if what in _PLACES else persons)
            if (who, what) not in told and target != who:
                tell(who, what, target)
        order = list(told)
        rng.shuffle(order)
        return Draw(tuple(told[step] for step in order), tuple(questions))


_RATE = 0.55  # records asked for, for each square root of all records


class EveryRecord(SpreadFacts):
    """Text to JSON: every record of one of four kinds, with its fields.

    An oracle reads every record of the kind: their number grows with the square root of the text's length,
    as they must all be written out. In the control records of other kinds stand in their place. Chance:
    nothing.
    """

    name: ClassVar[str] = "every-record"
    max_new_tokens: ClassVar[int] = 512
    exact: ClassVar[bool] = False
    short_answer: ClassVar[bool] = False
    share: ClassVar[float] = 0.4
    fewest: ClassVar[int] = 4

    def draw(self, rng: random.Random, facts: int) -> Draw:
        asked = rng.choice(list(_FIELDS))
        others = [kind for kind in _FIELDS if kind != asked]
        kinds = [asked] * rng.randint(*_span(_RATE * sqrt(facts)))
        kinds += rng.choices(others, k=max(2, facts - len(kinds)))
        rng.shuffle(kinds)
        written: list[Fact] = []
        records: list[dict[str, str | int]] = []

        def stated(kind: str) -> tuple[dict[str, str | int], str]:
            record = {key: _field(rng, key) for key in _FIELDS[kind]}
            return record, rng.choice(_RECORDS[kind]).format(**record)

        for kind in kinds:
            record, text = stated(kind)
            if kind == asked:
                records.append(record)
            written.append((text, stated(rng.choice(others))[1] if kind == asked else text))
        keys = "{}, {} and {}".format(*(f'"{key}"' for key in _FIELDS[asked]))
        text = rng.choice(_ASKED["records"]).format(kind=asked, keys=keys) + " Write nothing else."
        return Draw(tuple(written), (Question(text, "", (json.dumps(records),)),))

    def most_tokens(self, question: Question, material: Material) -> int:
        """All records, and as much again."""
        return max(self.max_new_tokens, 2 * material.count(question.response))

    def complete(self, said: str) -> str:
        """A list that was cut by its length, closed behind its last whole record."""
        begun = re.sub(r"^\s*```\w*", "", said)
        return begun[: begun.rfind("}") + 1] + "]" if "}" in begun else said

    def score(self, question: Question, said: str) -> float:
        """The right records, of all there are or of all that were given where these are more.

        Records are compared as JSON, in any order; one that is given twice counts once. What is no JSON list,
        bare or in one fenced block, scores nothing.
        """
        blocks = _FENCED.findall(said)
        try:
            given = files.parse(blocks[0] if len(blocks) == 1 else said)
        except ValueError:
            return 0.0
        if not isinstance(given, list):
            return 0.0
        expected: list[Any] = files.parse(question.answers[0])
        missing = list(expected)
        for record in given:
            if record in missing:
                missing.remove(record)
        return (len(expected) - len(missing)) / max(len(expected), len(given))


def _field(rng: random.Random, key: str) -> str | int:
    if key in ("quantity", "nights", "days", "price"):
        return rng.randint(2, 99)
    kind = {"town": "{town}", "product": "{thing}", "item": "{thing}"}.get(key, "{anyone}")
    return _filled(rng, kind)


_LEAD = 0.15  # by which the most frequent kind is ahead of the second
_FEWEST = 0.6  # the least frequent kind, as a share of the second


class TallyLines(SpreadFacts):
    """Letters to a shop, of five kinds that are to be told from what they say: which is the most frequent?

    The most frequent kind is a little ahead of the second, so that an oracle reads all letters: one more
    that is unread could be of any kind. In the control letters of other kinds stand in place of the most
    frequent one's, which is then the rarest. Chance: one in five.
    """

    name: ClassVar[str] = "tally-lines"
    max_new_tokens: ClassVar[int] = 16
    share: ClassVar[float] = 0.5
    fewest: ClassVar[int] = 6

    def draw(self, rng: random.Random, facts: int) -> Draw:
        kinds = rng.sample(list(_LETTERS), len(_LETTERS))
        shares = [1 + _LEAD, 1.0, *(rng.uniform(_FEWEST, 1) for _ in kinds[2:])]
        second = max(1, int(facts / sum(shares)))
        counts = [second + max(1, round(_LEAD * second)), *(int(share * second) for share in shares[1:])]
        listed = [kind for kind, count in zip(kinds, counts, strict=True) for _ in range(count)]
        rng.shuffle(listed)

        def letter(kind: str) -> str:
            return _filled(rng, rng.choice(_SAID["openings of letters"]) + rng.choice(_LETTERS[kind]))

        written: list[Fact] = []
        for kind in listed:
            text = letter(kind)
            written.append((text, letter(rng.choice(kinds[1:])) if kind == kinds[0] else text))
        named = rng.sample(kinds, len(kinds))
        asked = rng.choice(_ASKED["kind"]).format(kinds=", ".join(named[:-1]) + f" or {named[-1]}")
        question = Question(asked, " The most frequent kind is", (kinds[0],), choices=tuple(sorted(_LETTERS)))
        return Draw(tuple(written), (question,))


TASKS: tuple[type[SpreadFacts], ...] = (JoinStory, EveryRecord, TallyLines)
SUITE = tuple(task.name for task in TASKS)
