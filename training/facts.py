"""Facts to hide and questions about them: needles, records, plain facts, chains, each in several wordings.

Rivals are drawn near the fact that is asked for: keys that share a word or differ in one character, other
attributes of the same key. Only a match of the whole key tells them apart.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable
from dataclasses import dataclass

from offload_decode.evals.tasks import words
from offload_decode.evals.tasks.header import date, person, title

MONTHS = ("March", "June", "May", "October")
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
Ask = tuple[str, str]  # all that is read up to the answer, and the answer


@dataclass
class Item:
    """Facts for one context, in order where `ordered`, and questions about them.

    far: whether texts far away may be simulated behind it; they would disturb a count.
    block: the facts are lines that follow each other and stand alone.
    """

    facts: list[str]
    asks: list[Ask]
    ordered: bool = False
    far: bool = True
    before: str = ""  # an instruction in front of the text
    after: str = "\n\n"  # between the text and the first question
    noise: bool = False  # whether the text is RULER's five sentences over and over


class Names:
    """Draws keys and values from the training half of the lists and from the words of the texts."""

    def __init__(self, known: list[str]) -> None:
        self.known = known

    def word(self, rng: random.Random) -> str:
        kind = rng.random()
        if kind < 0.2:
            return words.key(rng, "train").split("-")[rng.randrange(2)]
        return words.made_up(rng) if kind < 0.3 else rng.choice(self.known)

    def key(self, rng: random.Random) -> str:
        """A key as RULER has them, or as people write them."""
        kind = rng.random()
        if kind < 0.25:
            return words.key(rng, "train")
        if kind < 0.6:
            return f"{self.word(rng)}-{self.word(rng)}"
        if kind < 0.68:
            return words.identifier(rng, "train")[: rng.choice([8, 13, 36, 36])]
        two = f"{self.word(rng)} {self.word(rng)}"
        return rng.choice(
            [
                two,
                "the " + two,
                "the " + self.word(rng),
                two.title(),
                f"{self.word(rng).capitalize()} {rng.randint(2, 99)}",
                f"{self.word(rng)}_{self.word(rng)}",
                self.code(rng),
                words.number(rng, "train", rng.randint(3, 7)),
                self.word(rng),
                words.made_up(rng).capitalize(),
            ]
        )

    def code(self, rng: random.Random) -> str:
        return (
            "".join(rng.choices(string.ascii_uppercase, k=rng.randint(2, 3)))
            + "-"
            + str(rng.randint(100, 9999))
        )

    def rival(self, rng: random.Random, key: str) -> str:
        """Another key that shares much with this one."""
        for mark in ("-", " ", "_"):
            parts = key.split(mark)
            if 2 <= len(parts) <= 3 and rng.random() < 0.8:
                at = rng.randrange(len(parts))
                if parts[at] == "the":
                    continue
                new = self.word(rng)
                parts[at] = new.capitalize() if parts[at][:1].isupper() else new
                return mark.join(parts)
        at = rng.randrange(len(key))
        old = key[at]
        if old.isdigit():
            new = rng.choice(string.digits)
        elif old.isalpha():
            new = rng.choice("abcdef" if len(key) > 7 and key.count("-") > 0 else string.ascii_lowercase)
            new = new.upper() if old.isupper() else new
        else:
            return self.key(rng)
        return key[:at] + new + key[at + 1 :]

    def keys(self, rng: random.Random, count: int) -> list[str]:
        """Different keys, of which the later ones are often rivals of the earlier ones."""
        near = rng.choice([0.0, 0.3, 0.8])
        like = rng.choice([True, False])
        made = self.key(rng)
        out = {made: None}
        uuids = made.count("-") == 4
        while len(out) < count:
            if rng.random() < near:
                new = self.rival(rng, rng.choice(list(out)))
            elif uuids:
                new = words.identifier(rng, "train")
            elif like and "-" in made:
                new = f"{self.word(rng)}-{self.word(rng)}" if rng.random() < 0.5 else words.key(rng, "train")
            else:
                new = self.key(rng)
            out[new] = None
        drawn = list(out)
        rng.shuffle(drawn)
        return drawn

    def value(self, rng: random.Random) -> str:
        """A value as people write them."""
        return rng.choice(
            [
                words.number(rng, "train", rng.randint(3, 9)),
                words.number(rng, "train", rng.randint(4, 7)),
                f"{self.word(rng)}-{self.word(rng)}",
                self.word(rng),
                words.made_up(rng).capitalize(),
                self.code(rng),
                self.word(rng).capitalize() + " " + words.made_up(rng).capitalize(),
                date(rng),
                f"{rng.randint(1, 28)} {rng.choice(MONTHS)} {rng.randint(1600, 2029)}",
                words.identifier(rng, "train")[: rng.choice([8, 13])],
            ]
        )


def several(parts: list[str]) -> str:
    """`a, b, and c`, as RULER lists keys."""
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + ", and " + parts[-1]


def distinct(draw: Callable[[], str], count: int) -> list[str]:
    """Different draws whose beginnings differ too where that can be had."""
    return words.distinct(draw, count)


MAGIC = "One of the special magic {kind}s for {key} is: {value}."
HIDDEN_ONE = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. I will quiz you "
    "about the {kind} afterwards.\n"
)
HIDDEN_ALL = (
    "Some special magic {kind}s are hidden within the following text. Make sure to memorize it. I will quiz "
    "you about the {kind}s afterwards.\n"
)


def magic_value(rng: random.Random, names: Names, kind: str) -> str:
    if kind == "number":
        return words.number(rng, "train", 7)
    return words.identifier(rng, "train") if kind == "uuid" else f"{names.word(rng)}-{names.word(rng)}"


def needles(rng: random.Random, names: Names, count: int) -> Item:
    """RULER's needles: one or several keys, values or questions, asked in our form or in RULER's."""
    kind = rng.choices(["number", "word", "uuid"], [8, 1, 2 if count <= 4 else 1])[0]
    uuids = kind == "uuid" and rng.random() < 0.6
    keys = words.distinct(lambda: words.identifier(rng, "train"), count) if uuids else names.keys(rng, count)
    values = distinct(lambda: magic_value(rng, names, kind), count)
    facts = [MAGIC.format(kind=kind, key=k, value=v) for k, v in zip(keys, values, strict=True)]
    ruler = rng.random() < 0.4
    asks: list[Ask] = []
    for k, v in zip(keys, values, strict=True):
        asks.append(one_ask(rng, kind, k, v, ruler))
    if count > 1 and rng.random() < 0.3:
        chosen = rng.sample(range(count), min(count, rng.randint(2, 4)))
        some = [keys[i] for i in chosen]
        pairs = [(keys[i], values[i]) for i in chosen]
        question = (
            f"What are all the special magic {kind}s for {several(some)} mentioned in the provided text?"
        )
        prefix = f" The special magic {kind}s for {several(some)} mentioned in the provided text are"
        listed = ": " + ", ".join(f"{k}: {v}" for k, v in pairs) + "."
        said = " " + " ".join(f"The special magic {kind} for {k} is: {v}." for k, v in pairs)
        if ruler:
            asks.append((f"{question}{prefix}", listed))
        elif rng.random() < 0.4:
            asks.append((f"{question}\nAnswer:{prefix}", listed))
        else:
            asks.append((f"{question}\nAnswer:", said))
    before = (HIDDEN_ONE if rng.random() < 0.5 else HIDDEN_ALL).format(kind=kind)
    noise = rng.random() < 0.1
    if ruler:
        return Item(facts, asks, before=before, after="\n", noise=noise)
    return Item(facts, asks, before=before if rng.random() < 0.5 else "", noise=noise)


def one_ask(rng: random.Random, kind: str, key: str, value: str, ruler: bool) -> Ask:
    question = f"What is the special magic {kind} for {key} mentioned in the provided text?"
    prefix = f" The special magic {kind} for {key} mentioned in the provided text is"
    if ruler:
        return question + prefix, f" {value}."
    if rng.random() < 0.4:
        return f"{question}\nAnswer:{prefix}", f" {value}."
    return f"{question}\nAnswer:", f" The special magic {kind} for {key} is: {value}."


def many_values(rng: random.Random, names: Names, count: int) -> Item:
    """All values of one key, among needles of other keys."""
    kind = rng.choice(["number", "number", "number", "word"])
    others = rng.choice([0, 0, 1, 2])
    keys = names.keys(rng, 1 + others)
    facts, asks = [], []
    ruler = rng.random() < 0.4
    lists: dict[str, list[str]] = {key: [] for key in keys}
    for key in [keys[0]] * count + keys[1:]:
        new = magic_value(rng, names, kind)
        lists[key].append(new)
    order = [(key, v) for key, vs in lists.items() for v in vs]
    rng.shuffle(order)
    facts = [MAGIC.format(kind=kind, key=k, value=v) for k, v in order]
    for key in keys:
        mine = [v for k, v in order if k == key]
        question = f"What are all the special magic {kind}s for {key} mentioned in the provided text?"
        prefix = f" The special magic {kind}s for {key} mentioned in the provided text are"
        answer = " " + ", ".join(mine) + "."
        if ruler:
            asks.append((question + prefix, answer))
        else:
            asks.append((f"{question}\nAnswer:{prefix if rng.random() < 0.4 else ''}", answer))
    before = HIDDEN_ALL.format(kind=kind)
    if ruler:
        return Item(facts, asks, ordered=True, before=before, after="\n")
    return Item(facts, asks, ordered=True, before=before if rng.random() < 0.5 else "")


SHAPES = (
    ("The {a} {l} {k} is {v}.", "The {a} {l} {k} is {v}."),
    ("The {a} {l} {k} is: {v}.", "The {a} {l} {k} is: {v}."),
    ("Note that the {a} {l} {k} is {v}.", "The {a} {l} {k} is {v}."),
    ("{A} {l} {k}: {v}.", "The {a} {l} {k}: {v}."),
    ("{K} has the {a} {v}.", "{K} has the {a} {v}."),
    ("Remember: the {a} {l} {k} was {v}.", "The {a} {l} {k} was {v}."),
)
ATTRIBUTES = ("secret code", "password", "phone number", "color", "name", "number", "pass key", "code", "age")


def plain(rng: random.Random, names: Names, count: int) -> Item:
    """`The secret code for brisk lantern is 48213.`: keys with one or several attributes, in one shape."""
    fact, said = rng.choice(SHAPES)
    link = rng.choice(["of", "for", "in"])
    attributes = list(
        dict.fromkeys(rng.choice([rng.choice(ATTRIBUTES), names.word(rng)]) for _ in range(rng.randint(1, 3)))
    )
    keys = names.keys(rng, max(1, count // len(attributes)))
    facts, asks = [], []
    for k in keys:
        for a in attributes:
            v = names.value(rng)
            filled = {"a": a, "A": a.capitalize(), "l": link, "k": k, "K": k[0].upper() + k[1:], "v": v}
            facts.append(fact.format(**filled))
            ask = rng.choice(
                ["What is the {a} {l} {k}?", "What is the {a} {l} {k}?", "Tell me the {a} {l} {k}."]
            )
            prefix = f" The {a} {link} {k} is"
            if rng.random() < 0.4:
                asks.append((ask.format(**filled) + "\nAnswer:" + prefix, f" {v}."))
            else:
                asks.append((ask.format(**filled) + "\nAnswer:", " " + said.format(**filled)))
    return Item(facts, asks)


def records(rng: random.Random, names: Names, count: int) -> Item:
    """Lines of one JSON object."""
    keys = names.keys(rng, count)
    if rng.random() < 0.5:
        keys = words.distinct(lambda: words.identifier(rng, "train")[:13], count)
    facts, asks = [], []
    for key in keys:
        v = words.identifier(rng, "train")[:13] if rng.random() < 0.3 else names.value(rng)
        facts.append(f'"{key}": "{v}",')
        question = f'What is the value of the key "{key}"?'
        if rng.random() < 0.4:
            asks.append((f'{question}\nAnswer: The value of the key "{key}" is', f' "{v}"'))
        else:
            asks.append((f"{question}\nAnswer:", f' "{key}": "{v}"'))
    if rng.random() < 0.3:
        facts = ["\n".join(["", *facts, ""])]
    return Item(facts, asks)


def pairs(rng: random.Random, names: Names, count: int) -> Item:
    """Bare keys and values, asked for by the key in the same shape: the most to learn from few tokens."""
    shape = rng.choice(["{k}: {v}", "{k} = {v}", "{k} is {v}.", "{k} -> {v}", "{k}, {v}", "The {k} is {v}."])
    start = shape.index("{v}") - 1
    keys = names.keys(rng, count)
    kind = rng.choice(["any", "number", "word"])
    lines = []
    for key in keys:
        v = names.value(rng) if kind == "any" else magic_value(rng, names, kind)
        lines.append((shape[:start].format(k=key), shape[start:].format(v=v)))
    facts = [asked + answer for asked, answer in lines]
    if rng.random() < 0.6:
        facts = [rng.choice(["\n", " ", "\n\n"]).join(facts)]
    return Item(facts, lines)


TRACK = "Question: Find all variables that are assigned the value {value} in the text above."
TRACK_BEFORE = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
TRACK_PREFIX = (
    " According to the chain(s) of variable assignment in the text above, {count} variables are {assigned} "
    "the value {value}, they are:"
)


def chain(rng: random.Random, length: int, letters: int) -> tuple[str, list[str], list[str]]:
    draw = lambda: words.letters(rng, "train", string.ascii_uppercase, letters)  # noqa: E731
    names = words.distinct(draw, length)
    value = words.number(rng, "train", 5)
    sources = [value, *(f"VAR {name}" for name in names)]
    return value, names, [f"VAR {n} = {s}" for n, s in zip(names, sources, strict=False)]


def tracking(rng: random.Random, names: Names, links: int) -> Item:
    """Chains of variables; one to three of them, in RULER's form with its example or in ours."""
    chains = [chain(rng, links, 5) for _ in range(rng.choice([1, 1, 2, 3]))]
    facts: list[str] = []
    left = [list(lines) for _, _, lines in chains]
    while any(left):
        mine = rng.choice([lines for lines in left if lines])
        facts.append(mine.pop(0))
    ruler = rng.random() < 0.5
    asks: list[Ask] = []
    for value, variables, _ in chains:
        question = TRACK.format(value=value)
        prefix = TRACK_PREFIX.format(
            count=links, value=value, assigned=rng.choice(["assigned", "assgined"]) if ruler else "assigned"
        )
        if ruler:
            asks.append((f"{question} Answer:{prefix}", " " + " ".join(variables)))
        else:
            asks.append(
                (f"{question}\nAnswer:{prefix if rng.random() < 0.5 else ''}", " " + ", ".join(variables))
            )
    noise = rng.random() < 0.6
    if not ruler:
        lines = facts if noise else [fact + "." for fact in facts]
        return Item(lines, asks, ordered=True, before=TRACK_BEFORE if rng.random() < 0.5 else "", noise=noise)
    before = TRACK_BEFORE
    if rng.random() < 0.3:
        value, variables, lines = chain(rng, links, 3)
        before += " ".join(f"{line}  {NOISE}\n" for line in lines)
        before += f"{TRACK.format(value=value)} Answer:" + TRACK_PREFIX.format(
            count=links, value=value, assigned="assgined"
        )
        before += " " + " ".join(variables) + "\n\n\n" + TRACK_BEFORE
    return Item([fact + " " for fact in facts], asks, ordered=True, before=before, after="\n", noise=noise)


ASKED_IN_WORDS = {
    "Author": ("Who is the author of {n}?", "Who wrote {n}?"),
    "Editor": ("Who is the editor of {n}?",),
    "Created": ("When was {n} created?",),
    "Title": ("What is {n} called?",),
    "Language": ("In which language is {n} written?",),
    "Requires": ("What does {n} require?",),
}


def documents(rng: random.Random, names: Names, count: int) -> Item:
    """Documents with a name, a title and other fields; the questions name the document by either."""
    every = ("Author", "Editor", "Status", "Type", "Created", "Topic", "Language", "Version", "Requires")
    chosen = rng.sample(every, rng.randint(2, 5))
    number = rng.random() < 0.5
    start, ending = rng.choice(["pep-", "rfc-", "doc", "note-", "chapter-"]), rng.choice(["", ".txt", ".md"])
    stems = (
        words.distinct(lambda: start + words.number(rng, "train", 4), count)
        if number
        else names.keys(rng, count)
    )
    titles = words.distinct(lambda: title(rng, "train"), count)
    facts, asks = [], []
    head = rng.choice(["Document: {n}\n\n", "Document: {n}\n", "# {n}\n\n", "{n}\n\n", ""])
    for stem, called in zip(stems, titles, strict=True):
        name = stem + ending
        fields = {"Title": called} | {f: field_value(rng, names, f) for f in chosen}
        facts.append("\n" + head.format(n=name) + "\n".join(f"{f}: {v}" for f, v in fields.items()) + "\n")
        for f in rng.sample(sorted(fields), min(3, len(fields))):
            by_title = not head or (f != "Title" and rng.random() < 0.5)
            if by_title and f == "Title":
                continue
            whom = (
                rng.choice(["the document titled {t}", 'the document titled "{t}"', "{t}"])
                if by_title
                else "{n}"
            )
            whom = whom.format(t=called, n=name)
            wordings = ("What is the {f} of {n}?", *ASKED_IN_WORDS.get(f, ()))
            ask = rng.choice(wordings).format(f=rng.choice([f, f.lower()]), n=whom)
            prefix = f" The {f.lower()} of {whom} is" if rng.random() < 0.4 else ""
            asks.append((f"{ask}\nAnswer:{prefix}", f" {fields[f]}"))
    return Item(facts, asks, ordered=True)


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
