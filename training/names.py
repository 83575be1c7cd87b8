"""Keys and values for training facts, and rivals of a key that only a match of the whole tells apart."""

from __future__ import annotations

import random
import string

from offload_decode.evals.tasks import words
from offload_decode.evals.tasks.header import date

MONTHS = ("March", "June", "May", "October")


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
