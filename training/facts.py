"""Facts in everyday words, records, and bare keys with values."""

from __future__ import annotations

import random

from offload_decode.evals.tasks import words
from training.items import Item
from training.names import Names
from training.needles import magic_value

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
