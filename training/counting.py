"""Lists in which some words come most often: RULER's common words and frequent coded words, of any size.

A list is asked for its words many times, each time in another order: it is long, and an answer short.
"""

from __future__ import annotations

import random
import string

from offload_decode.evals.tasks import words
from training.items import Item, Listed
from training.names import Names

COMMON = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n"
)
COMMON_ASK = "Question: What are the {n} most common words in the above list?"
COMMON_PREFIX = " The top {n} words that appear most often in the list are:"
CODED = (
    "Read the following coded text and track the frequency of each coded word. "
    "Find the three most frequently appeared coded words. "
)
CODED_ASK = (
    "Question: Do not provide any explanation. Please ignore the dots '....'. What are the three most "
    "frequently appeared words in the above coded text?"
)
CODED_PREFIX = " According to the coded text above, the three most frequently appeared words are:"
ASKED = 12  # questions for a list, as far as there is room


def numbered(
    rng: random.Random, names: Names, common: int, times: int, others: int, less: int
) -> tuple[str, list[str]]:
    """A shuffled numbered list, and its common words."""
    # Made-up words in every fourth list: which words there are is to be read, not known.
    kind, vocabulary = rng.random(), words.vocabulary(rng, "train")
    draw = words.made_up if kind < 0.25 else names.word if kind < 0.6 else lambda _: next(vocabulary)
    chosen = words.distinct(lambda: draw(rng), common + others)
    listed = chosen[:common] * times + chosen[common:] * less
    rng.shuffle(listed)
    return " ".join(f"{i}. {word}" for i, word in enumerate(listed, 1)), chosen[:common]


def common_words(rng: random.Random, names: Names, room: int) -> Item:
    """room: tokens that the list may take."""
    per_word = 5.2
    ruler = rng.random() < 0.6
    most = 10 if room > 700 else 4
    common = rng.randint(1, most)
    if room > 700 and rng.random() < 0.5:
        common = 10
    less = rng.choice([1, 2, 3, 3])
    times = less * rng.choice([4, 6, 10, 10])
    shown = ""
    if ruler and room > 900 and rng.random() < 0.6:
        example, answer = numbered(rng, names, common, 3, 10, 1)
        shown = (
            COMMON
            + example
            + "\n"
            + COMMON_ASK.format(n=common)
            + " Answer:"
            + COMMON_PREFIX.format(n=common)
        )
        shown += " " + " ".join(f"{i}. {w}" for i, w in enumerate(answer, 1)) + "\n"
        room -= int((30 + 10) * per_word) + 80
    while times > 2 * less and common * times * per_word > 0.8 * room:
        if common > 2 and rng.random() < 0.5 and not shown:
            common -= 1
        else:
            times -= 1
    others = max(2, int((room / per_word - common * times) / less * rng.uniform(0.5, 1)))
    text, answer = numbered(rng, names, common, times, others, less)
    ask = COMMON_ASK.format(n=common)
    if ruler:
        begun, after = answer_begun(rng)
        asked = (f"{ask}{begun}{COMMON_PREFIX.format(n=common)}", Listed(tuple(answer), numbered=True))
        return Item([text], [asked] * ASKED, far=False, before=shown + COMMON, after=after)
    prefix = COMMON_PREFIX.format(n=common) if rng.random() < 0.5 else ""
    return Item([text], [(f"{ask}\nAnswer:{prefix}", Listed(tuple(answer)))] * ASKED, far=False)


def answer_begun(rng: random.Random) -> tuple[str, str]:
    """What stands between question and answer, and between text and question: as RULER has it, or as a
    question is put to the models here."""
    return (" Answer:", "\n") if rng.random() < 0.4 else ("\nAnswer:", "\n\n")


def coded_words(rng: random.Random, names: Names, room: int) -> Item:
    """Coded words with frequencies that fall with the square of their rank."""
    per_word = 3.6
    count = int(room / per_word)
    alpha = rng.choice([2.0, 2.0, 1.8, 2.3])
    letters = rng.choice([6, 6, 6, 5, 7])
    weights = [k**-alpha for k in range(1, 200)]
    total = sum(weights)
    counts = [int(count * w / total) for w in weights]
    dots = rng.random() < 0.75
    drawn = words.distinct(lambda: words.letters(rng, "train", string.ascii_lowercase, letters), 200)
    if dots:
        drawn[0] = "..."
    listed = [word for word, times in zip(drawn, counts, strict=False) for _ in range(times)]
    rng.shuffle(listed)
    answer = Listed(tuple(drawn[1:4] if dots else drawn[:3]))
    text = " ".join(listed)
    if rng.random() < 0.7:
        begun, after = answer_begun(rng)
        asked = (f"{CODED_ASK}{begun}{CODED_PREFIX}", answer)
        return Item([text], [asked] * ASKED, far=False, before=CODED, after=after)
    prefix = CODED_PREFIX if rng.random() < 0.5 else ""
    return Item([text], [(f"{CODED_ASK}\nAnswer:{prefix}", answer)] * ASKED, far=False)
