"""Documents with a name, a title and other fields, and questions that name the document by either."""

from __future__ import annotations

import random
from collections.abc import Mapping

from offload_decode.evals.tasks import words
from offload_decode.evals.tasks.header import date, fields, person, title
from training.items import Ask, Item, Named
from training.names import Names

ALIKE = 0.2  # of the fields, whose value is an earlier document's
LONGEST_ASKED = 150  # letters of a value: histories are read, not asked for
WRITERS = (1, 1, 1, 2, 2, 3, 4)
PARTICLES = ("van", "von", "de", "della", "J.", "M.", "St.")
SMALL_WORDS = ("a", "the", "of", "for", "to", "in", "and", "with", "or", "from", "is", "on", "by", "as")
ASKED_IN_WORDS = {
    "Author": ("Who is the author of {n}?", "Who wrote {n}?"),
    "Editor": ("Who is the editor of {n}?",),
    "Created": ("When was {n} created?",),
    "Title": ("What is {n} called?",),
    "Language": ("In which language is {n} written?",),
    "Requires": ("What does {n} require?",),
}


def documents(rng: random.Random, names: Names, length: int) -> Item:
    """Documents with a name, a title and other fields; the questions name the document by either.

    length: tokens of the row. Two fifths have the long headers of real documents, where a field may stand two
    hundred tokens behind the name; three tenths have a field or two and no title, and are many.
    """
    size = rng.random()
    long, brief = size < 0.4, size > 0.7
    count = rng.randint(2, max(2, length // (250 if long else 45 if brief else 100)))
    every = ("Author", "Editor", "Status", "Type", "Created", "Topic", "Language", "Version", "Requires")
    chosen = rng.sample(every, rng.randint(1, 2) if brief else rng.randint(2, 5))
    number = rng.random() < 0.5
    start = rng.choice(["pep-", "rfc-", "doc", "note-", "chapter-"])
    ending = rng.choice(["", ".txt", ".md", ".rst"])
    padded = rng.random() < 0.5
    stems = words.distinct(lambda: start + digits(rng, padded), count) if number else names.keys(rng, count)
    titles = words.distinct(lambda: headline(rng, names), count)
    facts: list[str] = []
    asks: list[Ask] = []
    named: list[Named] = []
    known: dict[str, list[str]] = {}
    head = rng.choice(
        ["Document: {n}\n\n", "Document: {n}\n", "# {n}\n\n", "{n}\n\n", *([] if brief else [""])]
    )
    for stem, called in zip(stems, titles, strict=True):
        name = stem + ending
        drawn = fields(rng, "train") if long else {f: field_value(rng, names, f) for f in chosen}
        if "Author" in drawn and rng.random() < 0.5:
            drawn["Author"] = ", ".join(writer(rng, names) for _ in range(rng.choice(WRITERS)))
        for f, value in drawn.items():  # one person writes several documents
            if f in known and rng.random() < ALIKE:
                drawn[f] = rng.choice(known[f])
            known.setdefault(f, []).append(value)
        lines = drawn if brief else {"Title": called} | drawn | {"Title": called}
        begun = "\n" + head.format(n=name)
        facts.append(begun + "\n".join(f"{f}: {v}" for f, v in lines.items()) + "\n")
        named.append(Named(name, (len(start) if number else 0, len(stem)), spans(len(begun), lines)))
        asked = drawn if not head else lines  # without a head it is the title that names a document
        short = sorted(f for f in asked if len(lines[f]) <= LONGEST_ASKED)
        for f in rng.sample(short, min(3, len(short))):
            by_title = not head or ("Title" in lines and f != "Title" and rng.random() < 0.3)
            whom = (
                rng.choice(["the document titled {t}", 'the document titled "{t}"', "{t}"])
                if by_title
                else "{n}"
            )
            whom = whom.format(t=called, n=name)
            wordings = ("What is the {f} of {n}?", *ASKED_IN_WORDS.get(f, ()))
            ask = rng.choice(wordings).format(f=rng.choice([f, f.lower()]), n=whom)
            prefix = f" The {f.lower()} of {whom} is" if rng.random() < 0.4 else ""
            asks.append((f"{ask}\nAnswer:{prefix}", f" {lines[f]}"))
    return Item(facts, asks, ordered=True, named=named if head else ())


def headline(rng: random.Random, names: Names) -> str:
    """A title as people write them: words of the texts, with small words, marks and hyphens between."""
    if rng.random() < 0.4:
        return title(rng, "train")
    drawn = [names.word(rng) for _ in range(rng.choice([1, 2, 3, 3, 4, 4, 5, 6, 7]))]
    for at in range(len(drawn)):
        kind = rng.random()
        if kind < 0.08:
            drawn[at] = f"{drawn[at]}-{names.word(rng)}"
        elif kind < 0.14:
            drawn[at] = drawn[at].upper()[: rng.randint(2, 5)]
        elif kind < 0.19 and at + 1 < len(drawn):
            drawn[at] += rng.choice([",", ":", "'s", "/", " -", "."])
        elif kind < 0.22:
            drawn[at] = rng.choice(["``{}``", '"{}"', "({})", "{}()", "__{}__"]).format(drawn[at])
        elif kind < 0.25:
            drawn[at] = f"{rng.randint(1, 9)}.{rng.randint(0, 19)}"
    for _ in range(rng.randint(0, len(drawn) // 2)):
        drawn.insert(rng.randint(0, len(drawn)), rng.choice(SMALL_WORDS))
    case = rng.random()
    if case < 0.5:
        drawn = [w if w in SMALL_WORDS and i else w[:1].upper() + w[1:] for i, w in enumerate(drawn)]
    elif case < 0.9:
        drawn[0] = drawn[0][:1].upper() + drawn[0][1:]
    return " ".join(drawn)


def writer(rng: random.Random, names: Names) -> str:
    """A name of two or three parts from the texts, with an address or none."""
    parts = [rng.choice([names.word(rng).capitalize(), words.made_up(rng).capitalize()]) for _ in range(2)]
    if rng.random() < 0.2:
        parts.insert(1, rng.choice(PARTICLES))
    if rng.random() < 0.4:
        return " ".join(parts)
    local = rng.choice(
        [parts[0], parts[-1], f"{parts[0]}.{parts[-1]}", parts[0][0] + parts[-1], names.word(rng)]
    )
    host = rng.choice([names.word(rng), "python", "gmail", "users.github", words.made_up(rng)])
    return (
        f"{' '.join(parts)} <{local.lower()}@{host}.{rng.choice(['org', 'com', 'net', 'us', 'io', 'co.uk'])}>"
    )


def spans(at: int, lines: Mapping[str, str]) -> list[tuple[int, int]]:
    """Where the values of fields that begin at a letter stand: the first of each, and the one behind it."""
    values = []
    for f, value in lines.items():
        at += len(f) + 2
        values.append((at, at + len(value)))
        at += len(value) + 1
    return values


def digits(rng: random.Random, padded: bool) -> str:
    """Four, with zeros in front as files are often counted, or without."""
    return f"{rng.randint(1, 999):04d}" if padded else words.number(rng, "train", 4)


def field_value(rng: random.Random, names: Names, name: str) -> str:
    """A value of a header field."""
    if name in ("Author", "Editor"):
        return ", ".join(person(rng, "train") for _ in range(rng.choice([1, 1, 2])))
    if name == "Status":
        return rng.choice(
            ["Active", "Draft", "Final", "Accepted", "Rejected", "Withdrawn", "Deferred", "Superseded"]
        )
    if name == "Created":
        return date(rng)
    if name == "Version":
        return f"{rng.randint(0, 9)}.{rng.randint(0, 19)}"
    if name == "Requires":
        return str(rng.randint(1, 9999))
    if name == "Language":
        return rng.choice(["English", "Dutch", "German", "Latin", "Greek", "Welsh", "Finnish"])
    return rng.choice([names.word(rng).capitalize(), "Standards Track", "Informational", "Report", "Guide"])
