"""What facts are hidden in: prose, code, tables, words in disorder, other alphabets; each tokenized once."""

from __future__ import annotations

import json
import random
import re
import string
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from offload_decode.evals.tasks import words
from training.items import NOISE

ALPHABETS = (
    (0x0430, 0x044F),  # Cyrillic
    (0x03B1, 0x03C9),  # Greek
    (0x05D0, 0x05EA),  # Hebrew
    (0x0627, 0x064A),  # Arabic
    (0x3041, 0x3096),  # Hiragana
    (0x4E00, 0x5200),  # CJK
    (0x00DF, 0x00FF),  # Latin with accents
    (0xAC00, 0xAE00),  # Hangul
)


def vocabulary(texts: Mapping[str, str], least: int = 3) -> list[str]:
    """Lower-case words of the texts, without those that only evaluation may use as keys."""
    held_out = set(words.EVERY["eval"])
    counts: Counter[str] = Counter()
    for text in texts.values():
        counts.update(re.findall(r"\b[a-z]{3,12}\b", text))
    found = {word for word, count in counts.items() if count >= least} | set(words.EVERY["train"])
    return sorted(found - held_out)


def tables(rng: random.Random, known: list[str], chars: int) -> str:
    """Records as CSV, JSON, Markdown or lines of settings."""
    out: list[str] = []
    size = 0
    while size < chars:
        names = rng.sample(known, rng.randint(2, 6))
        shape = rng.randrange(4)
        lines = []
        for _ in range(rng.randint(3, 30)):
            row = {name: value(rng, known) for name in names}
            if shape == 0:
                lines.append(rng.choice([",", ", ", "\t"]).join(row.values()))
            elif shape == 1:
                lines.append(json.dumps(row))
            elif shape == 2:
                lines.append("| " + " | ".join(row.values()) + " |")
            else:
                lines += [f"{name}{rng.choice([': ', ' = ', '='])}{cell}" for name, cell in row.items()]
        out.append("\n".join(lines))
        size += len(out[-1])
    return "\n\n".join(out)


def value(rng: random.Random, known: list[str]) -> str:
    """A cell: a word, a number, a date, an identifier."""
    return rng.choice(
        [
            rng.choice(known),
            rng.choice(known),
            str(rng.randrange(10 ** rng.randint(1, 7))),
            f"{rng.uniform(0, 1000):.2f}",
            f"{rng.randint(1900, 2030)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}",
            words.identifier(rng, "train")[: rng.choice([8, 13, 36])],
            "".join(rng.choices(string.ascii_uppercase, k=rng.randint(2, 6))),
        ]
    )


def disorder(rng: random.Random, known: list[str], chars: int) -> str:
    """Words drawn at random, cut into sentences."""
    out: list[str] = []
    size = 0
    while size < chars:
        few = rng.choices(known, k=rng.choice([10, 60, 2000]))
        for _ in range(20):
            chosen = rng.choices(few, k=rng.randint(3, 25))
            out.append(" ".join(chosen).capitalize() + rng.choice([". ", ". ", "; ", "? ", ".\n\n"]))
            size += len(out[-1])
    return "".join(out)


def alphabets(rng: random.Random, chars: int) -> str:
    """Made-up words of other scripts."""
    out: list[str] = []
    size = 0
    while size < chars:
        first, last = rng.choice(ALPHABETS)
        letters = [chr(c) for c in range(first, last + 1)]
        known = ["".join(rng.choices(letters, k=rng.randint(2, 8))) for _ in range(200)]
        for _ in range(30):
            out.append(" ".join(rng.choices(known, k=rng.randint(3, 15))) + rng.choice([". ", ". ", ".\n"]))
            size += len(out[-1])
    return "".join(out)


def generated(rng: random.Random, known: list[str], chars: int) -> dict[str, str]:
    """The kinds of filler that no folder holds."""
    made_up = [words.made_up(rng) for _ in range(3000)]
    return {
        "tables": tables(rng, known, chars),
        "disorder": disorder(rng, known, chars),
        "made-up": disorder(rng, made_up, chars),
        "alphabets": alphabets(rng, chars // 3),
    }


class Fillers:
    """Token arrays to cut from. A cut starts where a word starts: it reads as if tokenized in place."""

    def __init__(
        self, tokenizer: Any, texts: Mapping[str, str], cache: Path, seed: int, made: int = 400_000
    ) -> None:
        """made: characters of each kind of generated filler."""
        self.known = vocabulary(texts)
        if not cache.exists():
            every = dict(texts) | generated(random.Random(seed), self.known, made)
            part = cache.with_suffix(".part.npz")
            arrays: dict[str, Any] = {name: encode(tokenizer, text) for name, text in every.items()}
            np.savez(part, **arrays)
            part.replace(cache)
        with np.load(cache) as kept:
            self.arrays = {name: kept[name] for name in kept.files}
        pieces = [tokenizer.convert_ids_to_tokens(i) for i in range(len(tokenizer))]
        self.opens = np.array([piece[0] in "ĠĊĉ" for piece in pieces])
        self.closes = np.array([piece[-1] in ".!?Ċ" for piece in pieces])
        rare = {"tables": 0.06, "disorder": 0.1, "made-up": 0.05, "alphabets": 0.05, "code": 0.06}
        self.prose = [name for name in self.arrays if name not in rare]
        share = (1 - sum(rare.values())) / len(self.prose)
        self.share = {name: rare.get(name, share) for name in self.arrays}
        lines = [NOISE + end for end in (" ", "\n")]
        self.noise = [encode(tokenizer, line * 400) for line in lines]

    def cut(self, rng: random.Random, count: int, noise: bool = False) -> np.ndarray:
        """About count tokens from one to three places of one or two kinds."""
        if noise:
            whole = rng.choice(self.noise)
            return whole[: max(0, count)]
        pieces: list[np.ndarray] = []
        left = count
        names = rng.choices(list(self.share), list(self.share.values()), k=2)
        while left > 0:
            array = self.arrays[rng.choice(names)]
            size = min(left, rng.choice([60, 250, 1000, 4000]))
            at = rng.randrange(max(1, len(array) - size - 64))
            opening = np.flatnonzero(self.opens[array[at : at + 64]])
            at += int(opening[0]) if len(opening) else 0
            pieces.append(array[at : at + size])
            left -= size
        return np.concatenate(pieces) if pieces else np.zeros(0, np.int64)

    def common(self, count: int = 64) -> np.ndarray:
        """The tokens that come most often in prose."""
        every = np.concatenate([self.arrays[name] for name in self.prose])
        counts: np.ndarray = np.bincount(every, minlength=len(self.opens))
        return np.argsort(-counts, kind="stable")[:count]

    def places(self, tokens: np.ndarray) -> np.ndarray:
        """Where a fact may go: behind the end of a sentence, and where there are few, before any word."""
        opens = self.opens[tokens]
        after = np.flatnonzero(opens[1:] & self.closes[tokens[:-1]]) + 1
        if len(after) < 4:
            after = np.flatnonzero(opens)
        return np.unique(np.concatenate([[0], after, [len(tokens)]]).astype(np.int64))


def encode(tokenizer: Any, text: str) -> np.ndarray:
    """Token ids, a piece of the text at a time."""
    size = 100_000
    starts = range(0, len(text), size)
    parts = tokenizer([text[at : at + size] for at in starts], add_special_tokens=False)["input_ids"]
    return np.concatenate([np.array(part, np.int32) for part in parts])
