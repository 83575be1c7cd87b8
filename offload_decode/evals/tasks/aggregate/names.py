"""Made-up people and towns, from the two halves of the words; their endings tell which is which."""

from __future__ import annotations

import random
import re

from offload_decode.evals.tasks import words
from offload_decode.evals.tasks.words import Split

_FIRST_NAMES = """
Ada Adele Agnes Albert Alice Amos Andrew Anton Arthur Astrid Beatrice Bernard Bridget Carla Cecil Charles
Daisy Daniel Dora Edgar Edith Edmund Eleanor Emil Emma Ernest Esther Ethel Eva Fanny Florence Francis Frank
Freda George Grace Hanna Harriet Harry Helen Henry Ida Isaac Ivan Jacob Jane Jasper Joan
"""
_OTHER_FIRST_NAMES = """
Bruno Clara Conrad Dmitri Elsa Felix Gerda Hugo Irene Jonas Katya Leo Lydia Mabel Magnus Nadia Omar Pablo
Rachel Rufus Selma Stefan Thea Ursula Viktor Wanda
"""
_FIRST: dict[Split, list[str]] = {"train": _FIRST_NAMES.split(), "eval": _OTHER_FIRST_NAMES.split()}
_SURNAMES = ("son", "well", "sen", "berg", "ley", "mann", "ett", "ovsky", "smith", "grove", "croft", "worth")
_TOWNS = ("ham", "wick", "bury", "stead", "mouth", "dale")
_FEW, _MANY = 60, 4000  # more towns, or people, than these need longer names to differ

# In small letters too, as answers may be; but `the only person` is nobody.
PERSON = re.compile(
    r"\b[^\W\d_]+ (?!(?-i:person|reason|lesson|season|prison))"
    rf"[^\W\d_]+(?:{'|'.join(_SURNAMES)})(?:-[^\W\d_]+)?(?![\w-])",
    re.IGNORECASE,
)
TOWN = re.compile(
    rf"(?<![\w-])[^\W\d_]{{3,}}(?:{'|'.join(_TOWNS)})(?:-on(?:-[^\W\d_]+)+)?(?![\w-])", re.IGNORECASE
)


def first(rng: random.Random, split: Split) -> str:
    """A first name."""
    return rng.choice(_FIRST[split])


def surname(rng: random.Random, split: Split) -> str:
    """A surname such as `Lanternwell`."""
    return rng.choice(words.NOUNS[split]).capitalize() + rng.choice(_SURNAMES)


def person(rng: random.Random, split: Split) -> str:
    """A first name and a surname."""
    return f"{first(rng, split)} {surname(rng, split)}"


def people(rng: random.Random, count: int, split: Split) -> list[str]:
    """Different people; where very many are needed, with double names such as `Lanternwell-Ottermann`."""

    def draw() -> str:
        return f"{person(rng, split)}-{surname(rng, split)}" if count > _MANY else person(rng, split)

    return words.distinct(draw, count)


def towns(rng: random.Random, count: int, split: Split) -> list[str]:
    """Different towns: `Otterham`, of many `Otterham-on-Cliff`, of very many `Otterham-on-Brisk-Cliff`."""

    def draw() -> str:
        name = rng.choice(words.NOUNS[split]).capitalize() + rng.choice(_TOWNS)
        if count > _FEW:
            name += "-on"
        if count > _MANY:
            name += f"-{rng.choice(words.ADJECTIVES[split]).capitalize()}"
        return f"{name}-{rng.choice(words.NOUNS[split]).capitalize()}" if count > _FEW else name

    return words.distinct(draw, count)


def thing(rng: random.Random, split: Split) -> str:
    """A thing such as `brisk lantern`."""
    return words.key(rng, split).replace("-", " ")
