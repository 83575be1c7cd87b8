"""Sequences of random tokens that teach copying before any fact is looked up.

Trained on facts alone the model learns which values occur and stays there: that plateau hides the gradient of
matching. `repeats` forms induction heads; `phrase_bank` makes them match several tokens back; `recall` makes
them match a key wherever it stands in the last tokens, as an answer needs that is begun in other words than
the fact is told in.
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


def recall(rng: np.random.Generator, length: int, words: np.ndarray) -> Row:
    """Keys with values, told in one wording and asked for in another; both are the same throughout the row.

    Some `a K b V c` in filler, then each `d K e V f` once, in any order; then others. The values that are
    asked for count, but for the first, which shows the wording.
    """

    def some(least: int, most: int) -> np.ndarray:
        return rng.choice(words, int(rng.integers(least, most + 1)))

    level = rng.random()  # easy rows show what is to be matched, hard ones keep it a few tokens further back
    told = [some(0, 2), some(1, 1 + round(3 * level)), some(1, 1)]
    asked = [some(0, 2), some(1, 1 + round(7 * level)), some(1, 1)]
    size, spread = int(rng.integers(1, 2 + round(2 * level))), int(rng.choice([0, 1, 8]))
    wide = words if rng.random() < 0.5 else rng.choice(words, 24)  # keys that share their words are harder
    tokens: list[np.ndarray] = []
    weights: list[np.ndarray] = []
    seen: set[bytes] = set()

    def put(part: np.ndarray, weight: float = 0.0) -> None:
        tokens.append(part)
        weights.append(np.full(len(part), weight, np.float32))

    while sum(map(len, tokens)) < length:
        pairs = []
        for _ in range(int(rng.integers(2, 4 + round(5 * level)))):
            key, value = rng.choice(wide, size), some(1, 3)
            if key.tobytes() in seen:
                continue
            seen.add(key.tobytes())
            pairs.append((key, value))
            for part in (some(0, spread), told[0], key, told[1], value, told[2]):
                put(part)
        first = not any(w.any() for w in weights)
        for i in rng.permutation(len(pairs)):
            key, value = pairs[i]
            for part in (asked[0], key, asked[1]):
                put(part)
            put(value, float(not first))
            put(asked[2])
            first = False
        if len(seen) > len(wide) ** size // 2:
            wide = words
    return np.concatenate(tokens)[:length].astype(np.int64), np.concatenate(weights)[:length]
