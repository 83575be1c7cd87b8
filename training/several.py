"""Sequences of random tokens in which a question has several answers.

All values of a key, the words that came most often, the links of a chain: whoever answers has to leave out
what was said. In text such answers are long and few, and that is learned late if at all; here a window of 256
tokens holds dozens. And records, whose fields belong to a name that stands once, before them all.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from training.items import ALTERNATIVES, HINTS, Said, alternatives, listed

MOST_VALUES = 4
MOST_LINKS = 5
MOST_COMMON = 5
MOST_ASKED = 5
MOST_RECORDS, MOST_FIELDS = 12, 5
MOST_HELD = 20  # values of all records together
ALIKE = 4  # tokens at each place of names that are alike
LEAST_LIST = 24  # tokens
SHARES = (0.26, 0.12, 0.17, 0.15, 0.3)  # of values, chains, counts, queries, records


class Several(NamedTuple):
    """tokens int64[T]; weights float32[T] of predicting each; others int64[T, ALTERNATIVES]: what would be as
    right there, or -1; guided bool[T]: where what is said is found by something; hints int64[T, HINTS]: the
    tokens behind which it is told, or -1 where it is copied from wherever it stands; ends int64[T]: which
    word of a list to count ends there, or 0; origins int64[T]: the token that is copied from there."""

    tokens: np.ndarray
    weights: np.ndarray
    others: np.ndarray
    guided: np.ndarray
    hints: np.ndarray
    ends: np.ndarray
    origins: np.ndarray


def several(
    rng: np.random.Generator, length: int, words: np.ndarray, common: np.ndarray, bos: int
) -> tuple[Several, np.ndarray, tuple[Said, ...]]:
    """One row, which begins with bos as a text does; tokens of values, with the first and the last one of the
    name that they belong to, int64 [R, 3]; and its lists."""
    page = Page(rng, np.setdiff1d(words, common), common)
    page.put(np.array([bos]))
    while page.size < length:
        kinds = (page.values, page.chains, page.counts, page.queries, page.records)
        kinds[rng.choice(len(kinds), p=SHARES)](length - page.size)
    row = Several(*(np.concatenate(parts)[:length] for parts in zip(*page.parts, strict=True)))
    belongs = np.array([found for found in page.belongs if found[0] < length], np.int64).reshape(-1, 3)
    return row, belongs, tuple(said for said in page.lists if said.start + said.size <= length)


class Page:
    """A row while it is written: a few marks that are always the same, and wordings that are drawn afresh."""

    def __init__(self, rng: np.random.Generator, rare: np.ndarray, common: np.ndarray) -> None:
        """rare: what keys, values and words are made of; common: marks, and what wordings are made of."""
        self.rng, self.rare, self.common = rng, rare, common[6:]
        self.comma, self.stop, self.ask, self.colon, self.equals, self.let = common[:6, None]
        self.loose = int(rng.integers(0, 4))  # most words of a wording: none where marks tell all
        self.parts: list[Several] = []
        self.lists: list[Said] = []
        self.belongs: list[tuple[int, int, int]] = []
        self.size = self.words = 0

    def values(self, _: int) -> None:
        """`a K = b V.` for all values of a few keys in disorder; then `? d K e: V, V, V.` for each key."""
        rng = self.rng
        keys = self.distinct(int(rng.integers(1, 4)), 2)
        held = [self.distinct(int(rng.integers(1, MOST_VALUES + 1)), 3) for _ in keys]
        pairs = [(key, value) for key, values in zip(keys, held, strict=True) for value in values]
        spread = int(rng.choice([0, 2]))
        for i in rng.permutation(len(pairs)):
            key, value = pairs[i]
            self.put(self.some(self.rare, 0, spread), self.wording(), key, self.equals, self.wording(), value)
            self.put(self.stop)
        for i in rng.permutation(len(keys)):
            self.put(self.ask, self.wording(), keys[i], self.wording(), self.colon)
            self.say([held[i][j] for j in rng.permutation(len(held[i]))])

    def chains(self, _: int) -> None:
        """`let X = V.`, `let Y = X.` for one or two chains; then `? d V e: X, Y.` in the order of links."""
        rng = self.rng
        links = int(rng.integers(2, MOST_LINKS + 1))
        names = self.distinct(2 * links + 2, 3)
        chains = [names[: links + 1], names[links + 1 :]][: int(rng.integers(1, 3))]
        spread = int(rng.choice([0, 2]))
        told: list[list[int]] = [[] for _ in chains]  # where the links' facts end
        for i in rng.permutation(np.repeat(np.arange(len(chains)), links)):
            old, new = chains[i][len(told[i]) : len(told[i]) + 2]
            self.put(self.some(self.rare, 0, spread), self.let, new, self.equals, old)
            told[i].append(self.size - 1)
            self.put(self.stop)
        for i in rng.permutation(len(chains)):
            self.put(self.ask, self.wording(), chains[i][0], self.wording(), self.colon)
            self.say(chains[i][1:], [{0: at} for at in told[i]])

    def counts(self, room: int) -> None:
        """A list of words in disorder, a few of which come often; then `? d: W, W.`.

        The others come up to three times: that a word has come before tells nothing by itself.
        """
        rng = self.rng
        less = int(rng.integers(1, 4))
        often = int(rng.integers(1, MOST_COMMON // less + 1))
        times = less * int(rng.integers(3, 9 // less + 1))
        size, gap = int(rng.integers(1, 4)), int(rng.integers(0, 3))
        # Short lists are more often drawn than long ones: a list is read for a few words.
        wanted = np.exp(rng.uniform(np.log(LEAST_LIST), np.log(max(room, LEAST_LIST))))
        others = max(2, int((wanted / ((size + 1) / 2 + gap) - often * times) / less))
        drawn = self.distinct(often + others, size)
        listed = [*range(often)] * times + [*range(often, often + others)] * less
        for i in rng.permutation(listed):
            self.put(self.rng.choice(self.common, gap))
            self.put(drawn[i], word=self.words + 1 + int(i))
        self.words += len(drawn)
        self.put(self.ask, self.wording(), self.colon)
        self.say([drawn[i] for i in rng.permutation(often)])

    def queries(self, _: int) -> None:
        """`a K b = c V.` for several keys; then `? d K, K e: K = V, K = V.` in the order of the question."""
        rng = self.rng
        asked = int(rng.integers(2, MOST_ASKED + 1))
        drawn = self.distinct(2 * (asked + int(rng.integers(0, 3))), 3)
        keys, values = drawn[::2], drawn[1::2]
        spread = int(rng.choice([0, 2]))
        told = []  # right before each value
        for key, value in zip(keys, values, strict=True):
            self.put(self.some(self.rare, 0, spread), self.wording(), key, self.equals, self.wording())
            told.append(self.size - 1)
            self.put(value, self.stop)
        chosen = rng.permutation(len(keys))[:asked]
        self.put(self.ask, self.wording())
        named = []  # right before each key
        for i in chosen:
            named.append(self.size - 1)
            self.put(keys[i], self.comma)
        self.put(self.wording(), self.colon)
        hints = [{0: at, len(keys[i]) + 1: told[i]} for i, at in zip(chosen, named, strict=True)]
        self.say([np.concatenate([keys[i], self.equals, values[i]]) for i in chosen], hints)

    def records(self, _: int) -> None:
        """`K a: F = b V, F = c V.` for several names with the same fields; then `? d F e K: V.` for some."""
        rng = self.rng
        count = int(rng.integers(2, MOST_RECORDS + 1))
        width = int(rng.integers(1, min(MOST_FIELDS, MOST_HELD // count) + 1))
        drawn = self.distinct(count + width + count * width, 3)
        keys, fields, values = drawn[:count], drawn[count : count + width], drawn[count + width :]
        if rng.random() < 0.5:  # names that are told apart by two tokens, neither of which does by itself
            heads, ends = rng.choice(self.rare, (2, ALIKE), replace=False)
            keys = [np.array([heads[i // ALIKE], ends[i % ALIKE]]) for i in rng.permutation(ALIKE**2)[:count]]
        spread = int(rng.choice([0, 2]))
        told = []  # right before each value
        for i, key in enumerate(keys):
            self.put(self.some(self.rare, 0, spread), key)
            first, last = self.size - len(key), self.size - 1
            self.put(self.wording(), self.colon)
            for field, value in zip(fields, values[i * width :], strict=False):
                self.put(field, self.equals, self.wording())
                told.append(self.size - 1)
                self.put(value)
                self.belongs += [(at, first, last) for at in range(told[-1] + 1, self.size)]
                self.put(self.comma)
        for i in rng.permutation(len(values))[: int(rng.integers(1, len(values) + 1))]:
            key = keys[i // width]
            self.put(self.ask, self.wording(), fields[i % width], self.wording(), key)
            first, last = self.size - len(key), self.size - 1
            self.put(self.wording(), self.colon)
            start = self.size - 1
            self.say([values[i]], [{0: told[i]}])
            self.belongs += [(at, first, last) for at in range(start, start + len(values[i]))]

    def some(self, of: np.ndarray, least: int, most: int) -> np.ndarray:
        return self.rng.choice(of, int(self.rng.integers(least, most + 1)))

    def wording(self) -> np.ndarray:
        return self.some(self.common, 0, self.loose)

    def distinct(self, count: int, most: int) -> list[np.ndarray]:
        """Different words of at most so many tokens, the first of which tells them apart."""
        firsts = self.rng.choice(self.rare, (count, 1), replace=False)
        return [np.concatenate([first, self.some(self.rare, 0, most - 1)]) for first in firsts]

    def put(self, *parts: np.ndarray, word: int = 0) -> None:
        """What is read and not predicted; word: its number, where it is one to count."""
        part = np.concatenate(parts)
        none = np.full((len(part), ALTERNATIVES), -1, np.int64)
        hints = np.full((len(part), HINTS), -1, np.int64)
        ends, origins = np.zeros(len(part), np.int64), part.copy()
        if word:
            ends[-1], origins[:-1], origins[-1] = word, -1, part[0]
        weights, guided = np.zeros(len(part), np.float32), np.zeros(len(part), bool)
        self.add(Several(part, weights, none, guided, hints, ends, origins))

    def say(self, parts: list[np.ndarray], told: list[dict[int, int]] | None = None) -> None:
        """An answer, in any order; or in this one alone, and then told has for tokens of each part, by their
        place in it, the token behind which the page tells them."""
        answer = np.concatenate([x for part in parts for x in (part, self.comma)])
        answer[-1] = self.stop[0]
        said = listed(self.size, answer, parts)
        others = np.full((len(answer), ALTERNATIVES), -1, np.int64)
        hints = np.full((len(answer), HINTS), -1, np.int64)
        if told is None:
            self.lists.append(said)
            others = alternatives(said)
        else:
            for start, behind in zip(said.starts, told, strict=True):
                for place, at in behind.items():
                    hints[start + place, 0] = at
        size = len(answer)
        ends = np.zeros(size, np.int64)
        self.add(Several(answer, np.ones(size, np.float32), others, np.ones(size, bool), hints, ends, answer))

    def add(self, part: Several) -> None:
        self.parts.append(part)
        self.size += len(part.tokens)
