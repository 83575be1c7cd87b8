"""Fields of a document's header, in one document or in one of several that follow each other."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

from offload_decode.evals.tasks import words
from offload_decode.evals.tasks.base import Episode, HiddenFacts, Question
from offload_decode.evals.tasks.words import Split

_FIRST_NAMES = """
Ada Alan Anna Boris Carla David Elena Emil Fatima Grace Hans Ines Ivan Jane Jorge Kim Lars Linda Marta Niels
Olga Oscar Peter Priya Ravi Rosa Sam Sofia Tomas Vera Wei Yuki Guido Tim Barry Paul Mark Eric
"""
_OTHER_FIRST_NAMES = (
    "Bruno Clara Dmitri Esther Felix Hugo Irene Jonas Katya Leo Maria Nadia Omar Pablo Rachel Stefan"
)
_FIRST: dict[Split, list[str]] = {"train": _FIRST_NAMES.split(), "eval": _OTHER_FIRST_NAMES.split()}
_ENDS = ("son", "berg", "ini", "ov", "sen", "man", "well", "ton", "ard", "ez", "ski", "er", "ley", "ford")
_STATUS = (
    "Active",
    "Draft",
    "Final",
    "Accepted",
    "Rejected",
    "Withdrawn",
    "Deferred",
    "Superseded",
    "Provisional",
)
_TYPE = ("Standards Track", "Informational", "Process", "Report", "Guide", "Proposal")
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_SMALL_WORDS = ("for", "the", "of", "and", "in", "to", "with", "a", "from")
ASK = "What is the {field} of {name}?"
PREFIX = " The {field} of {name} is"
THIS = "this document"
_IN_WORDS = {
    "Author": ("Who is the author of {name}?", "Who wrote {name}?"),
    "Editor": ("Who is the editor of {name}?",),
    "Created": ("When was {name} created?",),
    "Title": ("What is {name} called?",),
    "Language": ("In which language is {name} written?",),
    "Replaces": ("What does {name} replace?",),
    "Requires": ("What does {name} require?",),
}


def person(rng: random.Random, split: Split) -> str:
    """A made-up name, sometimes with an address."""
    first = rng.choice(_FIRST[split])
    surname = rng.choice(words.NOUNS[split])[:5].capitalize() + rng.choice(_ENDS)
    if rng.random() < 0.4:
        surname = words.made_up(rng).capitalize()
    host = rng.choice([rng.choice(words.NOUNS[split]), words.made_up(rng), "gmail", "mail"])
    local = rng.choice([first.lower(), f"{first}.{surname}".lower(), (first[0] + surname).lower()])
    address = f" <{local}@{host}.{rng.choice(['org', 'com', 'net', 'de'])}>" if rng.random() < 0.5 else ""
    return f"{first} {surname}{address}"


def title(rng: random.Random, split: Split) -> str:
    """One to seven words, some of them in no dictionary, sometimes with a colon or brackets."""
    drawn = [
        rng.choice([rng.choice(words.NOUNS[split]), rng.choice(words.ADJECTIVES[split]), words.made_up(rng)])
        for _ in range(rng.randint(1, 5))
    ]
    for _ in range(rng.randint(0, 2)):
        drawn.insert(rng.randint(0, len(drawn)), rng.choice(_SMALL_WORDS))
    if len(drawn) > 2 and rng.random() < 0.2:
        drawn[0] += ":"
    if len(drawn) > 1 and rng.random() < 0.2:
        drawn[-1] = f"({drawn[-1]})"
    joined = " ".join(drawn)
    return rng.choice([joined[0].upper() + joined[1:], joined.title(), joined])


def date(rng: random.Random) -> str:
    """A day between 1990 and 2029, such as `07-Mar-2011`."""
    return f"{rng.randint(1, 28):02d}-{rng.choice(_MONTHS)}-{rng.randint(1990, 2029)}"


def fields(rng: random.Random, split: Split) -> dict[str, str]:
    """Five to eleven header fields with made-up values, in a usual order."""
    link = f"https://{words.made_up(rng)}.org/{words.made_up(rng)}/{rng.randint(1, 99999)}"
    created = date(rng)
    posted = [rng.choice([created, date(rng)]) for _ in range(rng.randint(1, 2))]
    every = {
        rng.choice(["Number", "PEP", "RFC", "Id"]): str(rng.randint(1, 9999)),
        "Title": title(rng, split),
        "Author": ", ".join(person(rng, split) for _ in range(rng.choice([1, 1, 2, 3]))),
        "Editor": person(rng, split),
        "Sponsor": person(rng, split),
        "Discussions-To": link,
        "Status": rng.choice(_STATUS),
        "Type": rng.choice(_TYPE),
        "Topic": rng.choice(
            [rng.choice(words.NOUNS[split]).capitalize(), "Packaging", "Typing", "Governance"]
        ),
        "Content-Type": rng.choice(["text/x-rst", "text/plain", "text/markdown"]),
        "Requires": str(rng.randint(1, 9999)),
        "Created": created,
        "Version": f"{rng.randint(0, 9)}.{rng.randint(0, 19)}",
        "Python-Version": f"{rng.randint(1, 3)}.{rng.randint(0, 16)}",
        "Language": rng.choice(["English", "Dutch", "German", "Latin", "Greek", "Welsh", "Finnish"]),
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
        asked = question.answer_prefix.removeprefix(" The ")
        while True:
            for field, value in fields(rng, "eval").items():
                if asked.startswith(f"{field.lower()} of "):
                    return value


@dataclass(frozen=True)
class DocumentHeader(_Header):
    """Several documents, each behind a line `Document: name` and header lines `Field: value`."""

    name: ClassVar[str] = "header"
    max_new_tokens: ClassVar[int] = 96
    documents: int = 3

    def sample(self, rng: random.Random, split: Split = "eval") -> Episode:
        stems = words.keys(rng, self.documents, split)
        ending = rng.choice(["", ".txt", ".rst", ".md"])
        names = [stem + ending for stem in stems]
        if rng.random() < 0.5:
            start = rng.choice(["pep-", "rfc-", "doc", "note-", "chapter-"])
            numbers = words.distinct(lambda: words.number(rng, split, 4), self.documents)
            names = [start + number + ending for number in numbers]
        headers = [fields(rng, split) for _ in names]
        facts = tuple(
            f"Document: {name}\n\n" + "\n".join(f"{field}: {value}" for field, value in header.items()) + "\n"
            for name, header in zip(names, headers, strict=True)
        )
        questions: list[Question] = []
        for name, header in zip(names, headers, strict=True):
            some = rng.sample(sorted(header), 3)
            questions += [asked(rng, field, name, header[field]) for field in some]
        return Episode(facts, tuple(questions))


@dataclass(frozen=True)
class OneHeader(_Header):
    """One document, its header at the very start whatever the depth."""

    name: ClassVar[str] = "header-one"
    max_new_tokens: ClassVar[int] = 96

    @property
    def per_context(self) -> int:
        """As many as every header has fields."""
        return 5

    def sample(self, rng: random.Random, split: Split = "eval") -> Episode:
        header = fields(rng, split)
        fact = "\n".join(f"{field}: {value}" for field, value in header.items()) + "\n"
        every = rng.sample(sorted(header), len(header))
        return Episode((fact,), tuple(asked(rng, field, THIS, header[field]) for field in every))

    def ordered(self, depths: list[float]) -> list[float]:
        return [0.0]


def asked(rng: random.Random, field: str, name: str, value: str) -> Question:
    """The question as users put it: the field's name, in small letters or not, or in words of its own."""
    wordings = [ASK, ASK, *_IN_WORDS.get(field, ())]
    text = rng.choice(wordings).format(field=rng.choice([field, field.lower()]), name=name)
    prefix = PREFIX.format(field=field.lower(), name=name)
    # Among several documents the line alone would not say whose it is.
    statement = f"{field}: {value}" if name == THIS else ""
    return Question(text, prefix, (value,), statement=statement)


TASKS: tuple[type[HiddenFacts], ...] = (DocumentHeader, OneHeader)
