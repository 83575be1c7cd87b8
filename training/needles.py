"""RULER's needles (arXiv 2404.06654, appendix B) for training: one or several keys, values or questions."""

from __future__ import annotations

import random

from offload_decode.evals.tasks import words
from training.items import Ask, Item, Linked, Listed
from training.names import Names

MAGIC = "One of the special magic {kind}s for {key} is: {value}."
HIDDEN_ONE = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. I will quiz you "
    "about the {kind} afterwards.\n"
)
HIDDEN_ALL = (
    "Some special magic {kind}s are hidden within the following text. Make sure to memorize it. I will quiz "
    "you about the {kind}s afterwards.\n"
)


# Parts of a list, as RULER has them more often than not: short lists alone teach to end early.
LISTED = (2, 3, 4, 4, 4, 5)


def magic_value(rng: random.Random, names: Names, kind: str) -> str:
    if kind == "number":
        return words.number(rng, "train", 7)
    return words.identifier(rng, "train") if kind == "uuid" else f"{names.word(rng)}-{names.word(rng)}"


def needles(rng: random.Random, names: Names, count: int, identifiers: bool = False) -> Item:
    """RULER's needles: one or several keys, values or questions, asked in our form or in RULER's.

    identifiers: keys and values are long hexadecimal ones, all alike.
    """
    kind = "uuid" if identifiers else rng.choices(["number", "word", "uuid"], [6, 1, 4])[0]
    uuids = kind == "uuid" and (identifiers or rng.random() < 0.6)
    keys = words.distinct(lambda: words.identifier(rng, "train"), count) if uuids else names.keys(rng, count)
    values = words.distinct(lambda: magic_value(rng, names, kind), count)
    facts = [MAGIC.format(kind=kind, key=k, value=v) for k, v in zip(keys, values, strict=True)]
    ruler = rng.random() < 0.4
    asks: list[Ask] = []
    for k, v in zip(keys, values, strict=True):
        asks.append(one_ask(rng, kind, k, v, ruler))
    if count > 1 and not identifiers and rng.random() < 0.5:
        chosen = rng.sample(range(count), min(count, rng.choice(LISTED)))
        some = [keys[i] for i in chosen]
        pairs = [(keys[i], values[i]) for i in chosen]
        question = (
            f"What are all the special magic {kind}s for {several(some)} mentioned in the provided text?"
        )
        prefix = f" The special magic {kind}s for {several(some)} mentioned in the provided text are"
        # In the question's order: which key is next stands behind the last one there.
        said = Linked(" " + ", ".join(f"{k}: {v}" for k, v in pairs) + ".", tuple(k for k, _ in pairs))
        begun = prefix if ruler or rng.random() < 0.4 else ""
        asks.append((question + ("" if ruler else "\nAnswer:") + begun, said))
    before = (HIDDEN_ONE if rng.random() < 0.5 else HIDDEN_ALL).format(kind=kind)
    noise = rng.random() < 0.1
    if ruler:
        return Item(facts, asks, before=before, after="\n", noise=noise)
    return Item(facts, asks, before=before if rng.random() < 0.5 else "", noise=noise)


def one_ask(rng: random.Random, kind: str, key: str, value: str, ruler: bool) -> Ask:
    question = f"What is the special magic {kind} for {key} mentioned in the provided text?"
    prefix = f" The special magic {kind} for {key} mentioned in the provided text is"
    said = f"The special magic {kind} for {key} is: {value}."
    # Said whole behind the prefix too: the key is then right before the value, as in the text.
    if ruler:
        return question + prefix, f": {said}"
    if rng.random() < 0.4:
        return f"{question}\nAnswer:{prefix}", f": {said}"
    return f"{question}\nAnswer:", f" {said}"


def many_values(rng: random.Random, names: Names) -> Item:
    """All values of one key, among needles of other keys."""
    kind = rng.choice(["number", "number", "number", "word"])
    others = rng.choice([0, 0, 0, 1])
    keys = names.keys(rng, 1 + others)
    facts, asks = [], []
    ruler = rng.random() < 0.4
    lists: dict[str, list[str]] = {key: [] for key in keys}
    for key in [keys[0]] * rng.choice(LISTED) + keys[1:] * rng.randint(1, 4):
        new = magic_value(rng, names, kind)
        lists[key].append(new)
    order = [(key, v) for key, vs in lists.items() for v in vs]
    facts = [MAGIC.format(kind=kind, key=k, value=v) for k, v in order]
    for key, mine in lists.items():
        question = f"What are all the special magic {kind}s for {key} mentioned in the provided text?"
        prefix = f" The special magic {kind}s for {key} mentioned in the provided text are"
        answer = Listed(tuple(mine))
        if ruler:
            asks.append((question + prefix, answer))
        else:
            asks.append((f"{question}\nAnswer:{prefix if rng.random() < 0.4 else ''}", answer))
    before = HIDDEN_ALL.format(kind=kind)
    if ruler:
        return Item(facts, asks, before=before, after="\n")
    return Item(facts, asks, before=before if rng.random() < 0.5 else "")


def several(parts: list[str]) -> str:
    """`a, b, and c`, as RULER lists keys."""
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + ", and " + parts[-1]
