"""Where the words of a list end, and which values belong to which name: attention is led by both."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from training.items import Item, Named

NOTHING = np.zeros((0, 3), np.int64)
"""Of values that belong to names, where there are none."""

WORD = re.compile(r"(?<!\S)(?!\d+\.)\S+")  # of a list, but not its number


def covering(encoding: Any, letter: int) -> int:
    """The token that has a letter of the text that was encoded."""
    return next(i for i, (_, end) in enumerate(encoding.offsets) if end > letter)


def listed_words(encoding: Any, text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each token of a list the number of the word that ends there, from 1 on, or 0; that word's first
    token, or -1; and the number of what of a word has been read by then, or 0: int64[T] all."""
    ends, so_far = np.zeros((2, len(encoding.ids)), np.int64)
    origins = np.full(len(encoding.ids), -1, np.int64)
    closing = np.array([end for _, end in encoding.offsets])
    numbers: dict[str, int] = {}
    beginnings: dict[tuple[int, ...], int] = {}
    for word in WORD.finditer(text):
        first = int(np.searchsorted(closing, word.start(), side="right"))
        last = int(np.searchsorted(closing, word.end()))
        ends[last] = numbers.setdefault(word[0], len(numbers) + 1)
        origins[last] = encoding.ids[first]
        for at in range(first, last + 1):
            beginning = tuple(encoding.ids[first : at + 1])
            so_far[at] = beginnings.setdefault(beginning, len(beginnings) + 1)
    return ends, origins, so_far


def belongings(encoding: Any, text: str, named: Named) -> np.ndarray:
    """Each token of a named fact's values with the first and the last one that tell its name: int64
    [tokens, 3]; text: the fact as it was encoded, with blanks in front of it or nothing."""
    before = len(text) - len(text.lstrip(" "))
    name = telling(encoding, text.find(named.name), named)
    spans: Sequence[tuple[int, int]] = [
        (covering(encoding, before + start), covering(encoding, before + end - 1))
        for start, end in named.values
    ]
    return np.concatenate([belonging(start, end + 1, name) for start, end in spans])


def belonging(start: int, end: int, name: tuple[int, int]) -> np.ndarray:
    """Tokens from start to before end, each with the first and the last one of a name: int64[tokens, 3]."""
    return np.array([(at, *name) for at in range(start, end)], np.int64)


def telling(encoding: Any, start: int, named: Named) -> tuple[int, int]:
    """The first and the last token that tell a name, which begins at a letter, from others."""
    first, behind = named.telling
    return covering(encoding, start + first), covering(encoding, start + behind - 1)


def asked_for(encoding: Any, text: str, known: Sequence[Named]) -> tuple[int, int] | None:
    """The last place where a question names one of the facts, as `telling` has it."""
    found = [named for named in known if named.name in text]
    if not found:
        return None
    named = max(found, key=lambda each: len(each.name))  # a name may begin as another
    return telling(encoding, text.rfind(named.name), named)


def held(items: list[Item], spaced: list[Any], starts: Mapping[int, int]) -> Iterator[np.ndarray]:
    """Tokens of values with those of the names that they belong to, int64[R, 3], by the text's tokens.

    spaced: all facts with a blank in front; starts: where those of them that have one in the text begin.
    """
    index = 0
    for item in items:
        for fact, named in enumerate(item.named, index):
            if fact in starts:
                yield starts[fact] + belongings(spaced[fact], " " + item.facts[fact - index], named)
        index += len(item.facts)
