"""Facts hidden in a text: a sentence, records of keys and values, a list of words, headers of documents, a
pass key.

Records of keys and values are after Liu et al. (arXiv 2307.03172, section 4); the list of words is RULER's
(arXiv 2404.06654, section 3.3), cut into pieces.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from offload_decode.common.errors import ConfigError
from offload_decode.evals.haystack import Material
from offload_decode.evals.tasks import words
from offload_decode.evals.tasks.base import Context, Episode, HiddenFacts, Question, Task, most_common, noise

_SAID: dict[str, Any] = json.loads(Path(__file__).with_name("sentences.json").read_text("utf-8"))["headers"]


class PlainFact(HiddenFacts):
    """`The secret code for brisk lantern is 48213.`, in a text."""

    name: ClassVar[str] = "plain-fact"
    max_new_tokens: ClassVar[int] = 40

    def sample(self, rng: random.Random) -> Episode:
        key = words.key(rng)
        if rng.random() < 0.5:
            key = "the " + key.replace("-", " ")
        value = words.number(rng, rng.choice([4, 5, 6, 7]))
        asked = f"secret code for {key}"
        question = Question(f"What is the {asked}?", f" The {asked} is", (value,))
        return Episode((f"The {asked} is {value}.",), (question,))


@dataclass(frozen=True)
class KeyValue(HiddenFacts):
    """Short identifiers to short identifiers, as lines of one JSON object spread over the text."""

    name: ClassVar[str] = "key-value"
    max_new_tokens: ClassVar[int] = 64
    pairs: int = 8

    def draw(self, rng: random.Random) -> str:
        """A key or a value."""
        return words.identifier(rng)[:13]

    def sample(self, rng: random.Random) -> Episode:
        pairs = {self.draw(rng): self.draw(rng) for _ in range(self.pairs)}
        asked = {f'value of the key "{key}"': value for key, value in pairs.items()}
        return Episode(
            tuple(f'"{key}": "{value}",' for key, value in pairs.items()),
            tuple(Question(f"What is the {it}?", f" The {it} is", (value,)) for it, value in asked.items()),
        )


class WordPairs(KeyValue):
    """Keys and values of words instead."""

    name: ClassVar[str] = "key-value-words"
    max_new_tokens: ClassVar[int] = 40

    def draw(self, rng: random.Random) -> str:
        return words.key(rng)


@dataclass(frozen=True)
class CommonWords(HiddenFacts):
    """A numbered list, cut into pieces that are spread over the text: which words come most often?"""

    name: ClassVar[str] = "common-words"
    common: int = 2
    times: int = 12
    others: int = 16
    per_piece: int = 10

    def sample(self, rng: random.Random) -> Episode:
        chosen = rng.sample(words.NOUNS, self.common + self.others)
        common = chosen[: self.common]
        listed = common * self.times + chosen[self.common :]
        rng.shuffle(listed)
        numbered = [f"{number}. {word}" for number, word in enumerate(listed, 1)]
        starts = range(0, len(numbered), self.per_piece)
        facts = tuple(" ".join(numbered[at : at + self.per_piece]) for at in starts)
        return Episode(facts, (most_common(common),))

    def ordered(self, depths: list[float]) -> list[float]:
        return sorted(depths)


def person(rng: random.Random) -> str:
    """A made-up name, sometimes with an address."""
    first = rng.choice(_SAID["first names"])
    surname = rng.choice(words.NOUNS)[:5].capitalize() + rng.choice(_SAID["ends of surnames"])
    if rng.random() < 0.4:
        surname = words.made_up(rng).capitalize()
    host = rng.choice([rng.choice(words.NOUNS), words.made_up(rng), "gmail", "mail"])
    local = rng.choice([first.lower(), f"{first}.{surname}".lower(), (first[0] + surname).lower()])
    address = f" <{local}@{host}.{rng.choice(['org', 'com', 'net', 'de'])}>" if rng.random() < 0.5 else ""
    return f"{first} {surname}{address}"


def title(rng: random.Random) -> str:
    """One to seven words, some of them in no dictionary, sometimes with a colon or brackets."""
    drawn = [
        rng.choice([rng.choice(words.NOUNS), rng.choice(words.ADJECTIVES), words.made_up(rng)])
        for _ in range(rng.randint(1, 5))
    ]
    for _ in range(rng.randint(0, 2)):
        drawn.insert(rng.randint(0, len(drawn)), rng.choice(_SAID["small words"]))
    if len(drawn) > 2 and rng.random() < 0.2:
        drawn[0] += ":"
    if len(drawn) > 1 and rng.random() < 0.2:
        drawn[-1] = f"({drawn[-1]})"
    joined = " ".join(drawn)
    return rng.choice([joined[0].upper() + joined[1:], joined.title(), joined])


def date(rng: random.Random) -> str:
    """A day between 1990 and 2029, such as `07-Mar-2011`."""
    return f"{rng.randint(1, 28):02d}-{rng.choice(_SAID['months'])}-{rng.randint(1990, 2029)}"


def fields(rng: random.Random) -> dict[str, str]:
    """Five to eleven header fields with made-up values, in a usual order."""
    link = f"https://{words.made_up(rng)}.org/{words.made_up(rng)}/{rng.randint(1, 99999)}"
    created = date(rng)
    posted = [rng.choice([created, date(rng)]) for _ in range(rng.randint(1, 2))]
    every = {
        rng.choice(["Number", "PEP", "RFC", "Id"]): str(rng.randint(1, 9999)),
        "Title": title(rng),
        "Author": ", ".join(person(rng) for _ in range(rng.choice([1, 1, 2, 3]))),
        "Editor": person(rng),
        "Sponsor": person(rng),
        "Discussions-To": link,
        "Status": rng.choice(_SAID["statuses"]),
        "Type": rng.choice(_SAID["types"]),
        "Topic": rng.choice([rng.choice(words.NOUNS).capitalize(), *_SAID["topics"]]),
        "Content-Type": rng.choice(_SAID["content types"]),
        "Requires": str(rng.randint(1, 9999)),
        "Created": created,
        "Version": f"{rng.randint(0, 9)}.{rng.randint(0, 19)}",
        "Python-Version": f"{rng.randint(1, 3)}.{rng.randint(0, 16)}",
        "Language": rng.choice(_SAID["languages"]),
        "Post-History": ", ".join(rng.choice([day, f"`{day} <{link}>`__"]) for day in posted),
        "Replaces": str(rng.randint(1, 9999)),
    }
    usual = {"Title", "Author", "Status", "Type", "Created"} if rng.random() < 0.5 else set()
    kept = usual | set(rng.sample(sorted(every), rng.randint(5, 7)))
    return {name: value for name, value in every.items() if name in kept}


class _Header(HiddenFacts):
    """Questions for a field of a header: its value alone, as whatever stands beside it could be another's."""

    exact: ClassVar[bool] = True

    def guess(self, rng: random.Random, question: Question) -> str:
        """Another header's value of the same field."""
        while True:
            for field, value in fields(rng).items():
                if question.answer_prefix.startswith(f" The {field.lower()} of "):
                    return value


def _asked(rng: random.Random, field: str, name: str, value: str) -> Question:
    """The question as users put it: the field's name, in small letters or not, or in words of its own."""
    plain = "What is the {field} of {name}?"
    wording = rng.choice([plain, plain, *_SAID["asked"].get(field, ())])
    text = wording.format(field=rng.choice([field, field.lower()]), name=name)
    return Question(text, f" The {field.lower()} of {name} is", (value,))


@dataclass(frozen=True)
class DocumentHeader(_Header):
    """Several documents, each behind a line `Document: name` and header lines `Field: value`."""

    name: ClassVar[str] = "header"
    max_new_tokens: ClassVar[int] = 96
    documents: int = 3

    def sample(self, rng: random.Random) -> Episode:
        stems = words.keys(rng, self.documents)
        ending = rng.choice(["", ".txt", ".rst", ".md"])
        if rng.random() < 0.5:
            start = rng.choice(["pep-", "rfc-", "doc", "note-", "chapter-"])
            stems = [start + it for it in words.distinct(lambda: words.number(rng, 4), self.documents)]
        headers = [(stem + ending, fields(rng)) for stem in stems]
        return Episode(
            tuple(f"Document: {name}\n\n{_lines(header)}" for name, header in headers),
            tuple(
                _asked(rng, field, name, header[field])
                for name, header in headers
                for field in rng.sample(sorted(header), 3)
            ),
        )


class OneHeader(_Header):
    """One document, its header at the very start whatever the depth."""

    name: ClassVar[str] = "header-one"
    max_new_tokens: ClassVar[int] = 96

    @property
    def per_context(self) -> int:
        """As many as every header has fields."""
        return 5

    def sample(self, rng: random.Random) -> Episode:
        header = fields(rng)
        asked = rng.sample(sorted(header), len(header))
        return Episode(
            (_lines(header),), tuple(_asked(rng, field, "this document", header[field]) for field in asked)
        )

    def ordered(self, depths: list[float]) -> list[float]:
        return [0.0]


def _lines(header: dict[str, str]) -> str:
    return "".join(f"{field}: {value}\n" for field, value in header.items())


_TELL = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there."
)
_DIGITS = 5
_SAMPLE = 200  # sentences of noise whose tokens are counted


class Passkey(Task):
    """A number of five digits among five sentences that repeat, at a depth drawn evenly.

    Quest's protocol (arXiv 2406.10774, section 4.2.2), in the wording of Mohtashami and Jaggi (arXiv
    2305.16300), which Quest has by way of YaRN.

    In the control the five sentences go on instead. Chance: 1 in 18,000, as many keys as there are.
    """

    name: ClassVar[str] = "passkey"
    max_new_tokens: ClassVar[int] = 16

    def context(self, rng: random.Random, material: Material) -> Context:
        key = words.number(rng, _DIGITS)
        fact = f"The pass key is {key}. Remember it. {key} is the pass key."
        size = material.count(_one_line(_SAMPLE)) / _SAMPLE
        sentences = int((material.tokens - material.count(f"{_TELL}\n\n{fact}\n\n")) / size)
        if sentences < 1:
            raise ConfigError(f"{material.tokens:,} tokens do not hold a pass key: take a longer text")
        before = round(rng.random() * sentences)
        instead = _one_line(round(material.count(fact) / size))
        text, control = (
            "\n".join([_TELL, _one_line(before), middle, _one_line(sentences - before)])
            for middle in (fact, instead)
        )
        question = Question("What is the pass key?", " The pass key is", (key,))
        return Context(text, control, (question,), (before / sentences,), (material.count(fact),))

    def guess(self, rng: random.Random, question: Question) -> str:
        return words.number(rng, _DIGITS)


def _one_line(sentences: int) -> str:
    return noise(sentences).replace("\n", " ")


TASKS: tuple[type[Task], ...]
TASKS = (PlainFact, KeyValue, WordPairs, CommonWords, DocumentHeader, OneHeader, Passkey)
