"""Sequences of random tokens that teach copying before any fact is looked up.

Trained on facts alone the model learns which values occur and stays there: that plateau hides the gradient of
matching. `repeats` forms induction heads; `phrase_bank` makes them match several tokens back; `recall` makes
them match the rare ones among the last tokens, as an answer needs that is begun in other words than the fact
is told in.
"""

from __future__ import annotations

import numpy as np

Row = tuple[np.ndarray, np.ndarray]  # tokens int64[T]; weight float32[T] of predicting each token


def repeats(rng: np.random.Generator, length: int, words: np.ndarray) -> Row:
    """A random sequence, again and again: everything after its first time can be predicted."""
    period = int(rng.integers(4, min(length // 2, 400)))
    tokens = np.resize(rng.choice(words, period), length)
    weights = np.zeros(length, np.float32)
    weights[period + 1 :] = 1
    return tokens, weights


def phrase_bank(rng: np.random.Generator, length: int, words: np.ndarray) -> Row:
    """Phrases that share many of their tokens, in random order with random filler between.

    A token counts once its phrase was seen before and the tokens before it fit no other phrase.
    """
    function_words = rng.choice(words, int(rng.integers(2, 5)))
    count = int(rng.integers(2, 6 + length // 128))
    phrases = []
    for _ in range(count):
        phrase = rng.choice(words, int(rng.integers(3, 9)))
        common = rng.random(len(phrase)) < 0.45
        phrase[common] = rng.choice(function_words, int(common.sum()))
        phrases.append(tuple(int(t) for t in phrase))
    tokens: list[int] = []
    weights: list[float] = []
    seen: set[tuple[int, ...]] = set()
    spread = int(rng.choice([1, 3, 8, 20]))
    while len(tokens) < length:
        gap = int(rng.integers(0, spread + 1))
        tokens += [int(t) for t in rng.choice(words, gap)]
        weights += [0.0] * gap
        phrase_ = phrases[int(rng.integers(count))]
        tokens += phrase_
        for j in range(len(phrase_)):
            rivals = [p for p in phrases if p != phrase_ and p[:j] == phrase_[:j]]
            weights.append(float(j > 0 and phrase_ in seen and not rivals))
        seen.add(phrase_)
    return np.array(tokens[:length], np.int64), np.array(weights[:length], np.float32)


def recall(rng: np.random.Generator, length: int, words: np.ndarray, common: np.ndarray) -> Row:
    """Keys with values, told in one wording and asked for in another, as prose words both.

    `a K b V c` in filler, then `d K e V f` for each once, in any order; then others. The wordings `a` to `f`
    are drawn afresh each time, from common tokens alone: a value belongs to the rare tokens that were last
    before it. Values that are asked for count.
    """
    rare = np.setdiff1d(words, common)
    level = rng.random()  # easy rows show what is to be matched, hard ones keep it a few tokens further back

    def some(of: np.ndarray, least: int, most: float) -> np.ndarray:
        return rng.choice(of, int(rng.integers(least, least + 1 + round(max(0, most - least)))))

    spread = float(rng.choice([0, 1, 8]))
    wide = rare if rng.random() < 0.5 else rng.choice(rare, 24)  # keys that share their tokens are harder
    size = int(rng.integers(1, 2 + round(2 * level)))
    tokens: list[np.ndarray] = []
    weights: list[np.ndarray] = []
    seen: set[bytes] = set()

    def put(part: np.ndarray, weight: float = 0.0) -> None:
        tokens.append(part)
        weights.append(np.full(len(part), weight, np.float32))

    while sum(map(len, tokens)) < length:
        pairs = []
        for _ in range(int(rng.integers(2, 4 + round(5 * level)))):
            key, value = rng.choice(wide, size), some(rare, 1, 3)
            if key.tobytes() in seen:
                continue
            seen.add(key.tobytes())
            pairs.append((key, value))
            for part in (some(words, 0, spread), some(common, 0, 3), key, some(common, 0, 3 * level), value):
                put(part)
            put(some(common, 1, 2))
        for i in rng.permutation(len(pairs)):
            key, value = pairs[i]
            for part in (some(common, 1, 4), key, some(common, 0, 8 * level)):
                put(part)
            put(value, 1.0)
            put(some(common, 1, 2))
        if len(seen) > len(wide) ** size // 2:
            wide = rare
    return np.concatenate(tokens)[:length].astype(np.int64), np.concatenate(weights)[:length]
