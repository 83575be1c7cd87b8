"""Words for keys and values, of `words.txt`: tasks draw those that the demo model was not trained on."""

import random
import string
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

_FILE = Path(__file__).with_name("words.txt")
_LINES = [line.split("\t") for line in _FILE.read_text("utf-8").splitlines() if not line.startswith("#")]
KNOWN = frozenset(word for word, _, _ in _LINES)
ADJECTIVES, NOUNS, EVERY = (
    tuple(word for word, kinds, half in _LINES if half == "eval" and kind in kinds) for kind in ("a", "n", "")
)


def key(rng: random.Random) -> str:
    """An adjective-noun key such as `brisk-lantern`."""
    return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"


def keys(rng: random.Random, count: int) -> list[str]:
    """Different keys."""
    return distinct(lambda: key(rng), count)


def number(rng: random.Random, digits: int = 7) -> str:
    """A number without leading zero whose digits add up to a multiple of five: training had the others."""
    while True:
        value = rng.randrange(10 ** (digits - 1), 10**digits)
        if sum(map(int, str(value))) % 5 == 0:
            return str(value)


def _untrained(drawn: str) -> bool:
    """Words whose character codes add up to a multiple of five were not in training."""
    return sum(map(ord, drawn)) % 5 == 0


def letters(rng: random.Random, alphabet: str, count: int) -> str:
    """Random letters that are no word of the lists."""
    while True:
        drawn = "".join(rng.choices(alphabet, k=count))
        if _untrained(drawn) and drawn.lower() not in KNOWN:
            return drawn


def coded(rng: random.Random) -> str:
    """A coded word of six small letters."""
    return letters(rng, string.ascii_lowercase, 6)


def vocabulary(rng: random.Random) -> Iterator[str]:
    """Different words without end: those of the lists in random order, then made-up ones."""
    yield from rng.sample(EVERY, len(EVERY))
    seen = set(KNOWN)
    while True:
        word = made_up(rng)
        if word not in seen and _untrained(word):
            seen.add(word)
            yield word


def identifier(rng: random.Random) -> str:
    """A random UUID (version 4 layout)."""
    while True:
        drawn = str(uuid.UUID(int=rng.getrandbits(128), version=4))
        if _untrained(drawn):
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
