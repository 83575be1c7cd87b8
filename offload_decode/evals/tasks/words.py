"""Words for keys and values, in two halves: one to train on, one that only evaluation sees.

`words.txt` holds them, with where they are from.
"""

from __future__ import annotations

import random
import string
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

Split = Literal["train", "eval"]

_FILE = Path(__file__).with_name("words.txt")


def _read() -> dict[tuple[str, Split], tuple[str, ...]]:
    found: dict[tuple[str, Split], list[str]] = defaultdict(list)
    for line in _FILE.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            word, kinds, half = line.split("\t")
            split: Split = "train" if half == "train" else "eval"
            for kind in (*kinds, "all"):
                found[kind, split].append(word)
    return {which: tuple(listed) for which, listed in found.items()}


def _halves(kind: str) -> dict[Split, tuple[str, ...]]:
    return {"train": _WORDS[kind, "train"], "eval": _WORDS[kind, "eval"]}


_WORDS = _read()
ADJECTIVES = _halves("a")
NOUNS = _halves("n")
EVERY = _halves("all")
KNOWN = frozenset(EVERY["train"] + EVERY["eval"])


def key(rng: random.Random, split: Split) -> str:
    """An adjective-noun key such as `brisk-lantern`. Neither word occurs in the other split."""
    return f"{rng.choice(ADJECTIVES[split])}-{rng.choice(NOUNS[split])}"


def keys(rng: random.Random, count: int, split: Split) -> list[str]:
    """Different keys."""
    return distinct(lambda: key(rng, split), count)


def number(rng: random.Random, split: Split, digits: int = 7) -> str:
    """A number without leading zero. Digit sums that are multiples of five are for evaluation."""
    while True:
        value = rng.randrange(10 ** (digits - 1), 10**digits)
        if (sum(map(int, str(value))) % 5 == 0) == (split == "eval"):
            return str(value)


def _belongs(drawn: str, split: Split) -> bool:
    """Words whose codes add up to a multiple of five are for evaluation."""
    return (sum(map(ord, drawn)) % 5 == 0) == (split == "eval")


def letters(rng: random.Random, split: Split, alphabet: str, count: int) -> str:
    """Letters in disorder that are no word of the lists."""
    while True:
        drawn = "".join(rng.choices(alphabet, k=count))
        if _belongs(drawn, split) and drawn.lower() not in KNOWN:
            return drawn


def coded(rng: random.Random, split: Split) -> str:
    """A coded word of six small letters."""
    return letters(rng, split, string.ascii_lowercase, 6)


def variable(rng: random.Random, split: Split) -> str:
    """A variable's name, of five capitals."""
    return letters(rng, split, string.ascii_uppercase, 5)


def vocabulary(rng: random.Random, split: Split) -> Iterator[str]:
    """Different words without end: those of the lists in disorder, then made-up ones."""
    listed = EVERY[split]
    yield from rng.sample(listed, len(listed))
    seen = set(KNOWN)
    while True:
        word = made_up(rng)
        if word not in seen and _belongs(word, split):
            seen.add(word)
            yield word


def identifier(rng: random.Random, split: Split) -> str:
    """A random UUID (version 4 layout)."""
    while True:
        drawn = str(uuid.UUID(int=rng.getrandbits(128), version=4))
        if _belongs(drawn, split):
            return drawn


def distinct(draw: Callable[[], str], count: int) -> list[str]:
    """count different draws, in the order drawn."""
    found: dict[str, None] = {}
    while len(found) < count:
        found[draw()] = None
    return list(found)


def made_up(rng: random.Random) -> str:
    """A word of two to four syllables that is in no dictionary."""
    return "".join(
        rng.choice("bcdfghjklmnprstvwz")
        + rng.choice(["a", "e", "i", "o", "u", "ai", "ou"])
        + rng.choice(["", "", "n", "r", "s", "l"])
        for _ in range(rng.randint(2, 4))
    )
