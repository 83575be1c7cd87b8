"""Text to JSON: every record of a kind, with its fields (compare arXiv 2604.08426). Chance: nothing."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from dataclasses import dataclass
from math import sqrt
from typing import Any, ClassVar

from offload_decode import plain_json
from offload_decode.evals.tasks import hedges
from offload_decode.evals.tasks.aggregate import names, reading
from offload_decode.evals.tasks.aggregate.spread import Draw, Fact, SpreadFacts, around
from offload_decode.evals.tasks.base import Material, Question
from offload_decode.evals.tasks.plain_answers import answered, plain
from offload_decode.evals.tasks.words import Split

_RATE = 0.55  # records asked for, for each square root of all records
_FENCE = re.compile(r"```[a-zA-Z]*\s*(.*?)```", re.DOTALL)
_ASK = (
    "Extract every {kind} from the text as a JSON list with one object for each, with the keys {keys}.",
    "Write a JSON list of all {kind}s in the text. Each object has the keys {keys}.",
    "Which {kind}s does the text report? Answer with a JSON list of objects with the keys {keys}.",
    "List each {kind} in the text above as an object with the keys {keys}, all in one JSON list.",
)
_ALONE = " Write nothing else."


@dataclass(frozen=True)
class Kind:
    """A kind of record: what it is called, its fields, and sentences that state one.

    A field is drawn by its name: numbers, towns and things by theirs, people otherwise.
    """

    name: str
    keys: tuple[str, str, str]
    sentences: tuple[str, ...]


_KINDS = (
    Kind(
        "order",
        ("customer", "product", "quantity"),
        (
            "{customer} ordered {quantity} pieces of the {product}.",
            "An order came in from {customer}: the {product}, {quantity} times.",
            "The {product} was ordered by {customer}, {quantity} pieces in all.",
        ),
    ),
    Kind(
        "stay",
        ("guest", "town", "nights"),
        (
            "{guest} stayed in {town} for {nights} nights.",
            "For {nights} nights {guest} had a room in {town}.",
            "In {town} an inn was home to {guest} for {nights} nights.",
        ),
    ),
    Kind(
        "loan",
        ("borrower", "item", "days"),
        (
            "{borrower} borrowed the {item} for {days} days.",
            "The {item} was lent to {borrower} for {days} days.",
            "For {days} days the {item} is on loan to {borrower}.",
        ),
    ),
    Kind(
        "repair",
        ("owner", "item", "price"),
        (
            "{owner} had the {item} repaired for {price} crowns.",
            "The repair of the {item} cost {owner} {price} crowns.",
            "For {price} crowns the {item} of {owner} was mended.",
        ),
    ),
    Kind(
        "sale",
        ("seller", "town", "price"),
        (
            "{seller} sold a house in {town} for {price} crowns.",
            "A house in {town} was sold by {seller} for {price} crowns.",
            "For {price} crowns {seller} parted with a house in {town}.",
        ),
    ),
)


@dataclass(frozen=True)
class EveryRecord(SpreadFacts):
    """Records of five kinds, of which one is asked for.

    An oracle reads every record of the kind: their number grows with the square root of the text's length,
    as they must all be written out. In the control records of other kinds stand in their place.
    """

    name: ClassVar[str] = "every-record"
    max_new_tokens: ClassVar[int] = 512
    share: ClassVar[float] = 0.4
    fewest: ClassVar[int] = 4

    def draw(self, rng: random.Random, facts: int, split: Split) -> Draw:
        asked = rng.choice(_KINDS)
        others = [kind for kind in _KINDS if kind != asked]
        kinds = [asked] * around(rng, _RATE * sqrt(facts))
        kinds += rng.choices(others, k=max(2, facts - len(kinds)))
        rng.shuffle(kinds)
        written: list[Fact] = []
        records: list[dict[str, str | int]] = []
        for kind in kinds:
            record = _record(rng, kind, split)
            text = rng.choice(kind.sentences).format(**record)
            if kind is not asked:
                written.append(Fact(text, text))
                continue
            other = rng.choice(others)
            records.append(record)
            written.append(Fact(text, rng.choice(other.sentences).format(**_record(rng, other, split))))
        keys = "{}, {} and {}".format(*(f'"{key}"' for key in asked.keys))
        question = Question(
            rng.choice(_ASK).format(kind=asked.name, keys=keys) + _ALONE, "", (json.dumps(records),)
        )
        return Draw(tuple(written), (question,), (tuple(i for i, k in enumerate(kinds) if k is asked),))

    def most_tokens(self, question: Question, material: Material) -> int:
        """All records, and as much again."""
        return max(self.max_new_tokens, 2 * material.count(question.response))

    def score(self, question: Question, said: str) -> float:
        """The right records, of all there are or of all that were given where these are more.

        A record is right with all of its fields and no others, whatever the case and spaces; one that is
        given twice counts once. What is no JSON list, alone or in one fenced block, scores nothing, nor
        does a block that is denied or taken back beside it.
        """
        given = parsed(said)
        if given is None:
            return 0.0
        expected = Counter(map(_normal, json.loads(question.answers[0])))
        right = (expected & Counter(map(_normal, given))).total()
        return reading.overlap(right, list(expected.elements()), len(given))


def parsed(said: str) -> list[Any] | None:
    """The JSON list of an answer, from its one fenced block or the whole of it; None where there is none, and
    where what stands around the block disowns it.
    """
    said = answered(said).strip()
    blocks = list(_FENCE.finditer(said))
    if len(blocks) > 1:
        return None
    if blocks:
        around = plain(said[: blocks[0].start()]), plain(said[blocks[0].end() :])
        if hedges.disowned(*around):
            return None
        said = blocks[0].group(1)
    try:
        value = plain_json.parse(said)
    except ValueError:
        return None
    return value if isinstance(value, list) else None


def _normal(record: Any) -> str:
    """Equal for records that say the same."""
    if not isinstance(record, dict):
        return json.dumps([record])
    fields = {str(key).strip().lower(): _plain(value) for key, value in record.items()}
    if len(fields) < len(record):  # `price` and `Price`: neither is the one that is meant
        return json.dumps([record])
    return json.dumps(fields, sort_keys=True)


def _plain(value: Any) -> Any:
    """Numbers as their digits, texts in small letters with single spaces."""
    if isinstance(value, float) and value == int(value):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, str | int):
        return [value]
    return " ".join(str(value).lower().split())


def _record(rng: random.Random, kind: Kind, split: Split) -> dict[str, str | int]:
    return {key: _field(rng, key, split) for key in kind.keys}


def _field(rng: random.Random, key: str, split: Split) -> str | int:
    if key in ("quantity", "nights", "days", "price"):
        return rng.randint(2, 99)
    if key == "town":
        return names.towns(rng, 1, split)[0]
    if key in ("product", "item"):
        return names.thing(rng, split)
    return names.person(rng, split)


TASKS: tuple[type[SpreadFacts], ...] = (EveryRecord,)
