"""Answers without what is no part of them: thoughts before, good wishes behind, markdown, and the many forms
of quotes, spaces and digits.
"""

from __future__ import annotations

import re
import unicodedata

LEAD = re.compile(r"^\W*(?:the\s+)?(?:final\s+|correct\s+)?answer\W*(?:\bis\b)?\s*:?", re.IGNORECASE)
"""What leads to an answer: `The final answer is:`."""

_QUOTES = str.maketrans("\u2018\u2019\u201c\u201d\u00ab\u00bb\u2010\u066c", '\'\'""""-,')
_THOUGHT = re.compile(r"\A.*</(think|thinking|reasoning)>|\A\s*<(?:think|thinking|reasoning)>.*", re.DOTALL)
_FOREIGN_DIGIT = re.compile(r"[^\D0-9]")
_MARKS = re.compile(r"(?<!\d)\*+|\*+(?!\d)|[`_\u200b\u200c\u200d\ufeff]+")  # `4*3` is no 43
_POLITE = re.compile(
    r"\A\W*(?:sure|certainly|absolutely|of course|okay|ok)[,!.]+\s+(?=\S)"
    r"|\b(?:please\s+)?(?:let me know|feel free|i hope|hope this|if you (?:need|have|would|want))\b"
    r"[^.!?\n]*[.!?]?",
    re.IGNORECASE,
)


def answered(said: str) -> str:
    """What is said when the thinking is done: of `<think>…</think> 12` the 12, and nothing of `<think>…`."""
    return _THOUGHT.sub("", said)


def plain(said: str) -> str:
    """The answer without markdown and good wishes, with plain quotes, spaces and digits."""
    text = _POLITE.sub(" ", unicodedata.normalize("NFKC", answered(said)).translate(_QUOTES))
    text = _FOREIGN_DIGIT.sub(lambda found: str(unicodedata.decimal(found.group())), text)
    return re.sub(r"[^\S\n]+", " ", _MARKS.sub("", text)).strip()
