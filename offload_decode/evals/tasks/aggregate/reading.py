"""What an answer says, read strictly: hedges, several candidates and denials are not answers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_ONES = """
zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
seventeen eighteen nineteen
"""
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_VALUES = {word: n for n, word in enumerate(_ONES.split())} | {
    word: 10 * n for n, word in enumerate(_TENS.split(), 2)
}
_SCALES = {"hundred": 100, "thousand": 1000, "million": 1_000_000}
_TIMES = {"once": 1, "twice": 2, "thrice": 3, "none": 0, "never": 0}
_WORD = "|".join(sorted([*_VALUES, *_SCALES], key=len, reverse=True))
_NUMBER = re.compile(
    rf"(?<![\w.,])-?\d+(?:,\d{{3}})*(?:\.\d+)?(?![\w])"
    rf"|\b(?:a (?=hundred|thousand))?(?:{_WORD})(?:(?:[\s-]+and)?[\s-]+(?:{_WORD}))*\b"
    rf"|\b(?:{'|'.join(_TIMES)})\b",
    re.IGNORECASE,
)
_WRAPPED = re.compile(r"</?[a-z]+>|\\boxed\b|[{}$]", re.IGNORECASE)  # in which some models put an answer
_DIGIT = re.compile(r"\d")
_UNSURE = re.compile(
    r"\b(?:maybe|perhaps|probably|possibly|might|may|could|or|between|not|cannot|unsure|uncertain|unknown|guess)\b|n't\b",
    re.IGNORECASE,
)
_VAGUE_BEFORE = re.compile(
    r"(?:\b(?:about|around|approximately|approx\.?|roughly|nearly|almost|at least|at most|more than|"
    r"less than|fewer than|over|under|up to|some)|[~≈<>≤≥±])\s*$",
    re.IGNORECASE,
)
_VAGUE_AFTER = re.compile(r"\s*(?:[+?%°$€£]|-?ish\b)", re.IGNORECASE)
# What stands before a count, and after it: then it counts what was asked for, not chapters or years.
_BEFORE = re.compile(
    r"(?:^|[:=]|\b(?:is|are|was|were|be|being|exactly|just|only|mentioned|named|appears?|occurs?|appeared|"
    r"occurred|comes?|came|find|found|counted?|number|total|answer))\W*$",
    re.IGNORECASE,
)
_UNITS = re.compile(
    r"\W*(?:(?:different|separate|distinct|such)\s+)?(?:times?|mentions?|sentences?|occurrences?)\b",
    re.IGNORECASE,
)
_NOTHING_ELSE = re.compile(r"\s*(?:$|[^\w\s])|\s+(?:of|in|throughout|altogether|overall)\b", re.IGNORECASE)
_DENIED = re.compile(
    r"(?:\b(?:not|no|never|neither|nor|except|excluding|unlike|without|cannot|anything but)|n't)"
    r"(?:\s+[\w*\"']+){0,3}\s*\W?$",
    re.IGNORECASE,
)
_DENIED_AFTER = re.compile(
    r"\W{0,3}(?:(?:is|was|are|were)(?:\s+not\b|n't\b)|(?:is|was)\s+(?:wrong|incorrect|false)\b)",
    re.IGNORECASE,
)


def number(said: str) -> int | None:
    """The one number that an answer gives; None where there is none, more than one, or a hedge.

    It may be written in digits, with thousands separators, or in words. It stands where a count stands:
    alone, after `is`, `:` and the like, or before `times` and the like; `Chapter 12` gives no count.
    """
    said = _WRAPPED.sub(" ", said)
    found = list(_NUMBER.finditer(said))
    values = {_value(match.group()) for match in found}
    if len(values) != 1 or _UNSURE.search(said) or _DIGIT.search(_NUMBER.sub(" ", said)):
        return None
    before, after = said[: found[0].start()], said[found[0].end() :]
    if _VAGUE_BEFORE.search(before) or _VAGUE_AFTER.match(after):
        return None
    counts = (
        found[0].group().lower() in _TIMES
        or _UNITS.match(after)
        or (_BEFORE.search(before) and _NOTHING_ELSE.match(after))
    )
    value = values.pop()
    return int(value) if counts and value >= 0 and value == int(value) else None


def _value(written: str) -> float:
    written = written.lower()
    if written in _TIMES:
        return _TIMES[written]
    if written.lstrip("-")[0].isdigit():
        return float(written.replace(",", ""))
    total = group = 0
    for word in re.split(r"[\s-]+", written):
        if word in _VALUES:
            group += _VALUES[word]
        elif word == "hundred":
            group = 100 * (group or 1)
        elif word in _SCALES:
            total, group = total + _SCALES[word] * (group or 1), 0
    return total + group


def denied(said: str, match: re.Match[str]) -> bool:
    """Whether it is said not to be so: by `not`, `except` and the like shortly before, `is not` after it."""
    before, after = said[: match.start()], said[match.end() :]
    return bool(_DENIED.search(before) or _DENIED_AFTER.match(after))


def named(pattern: re.Pattern[str], said: str) -> list[str]:
    """What matches, in small letters, in order, each time again; what is denied in front is marked by `!`."""
    return [("!" if denied(said, match) else "") + match.group().lower() for match in pattern.finditer(said)]


def only(pattern: re.Pattern[str], said: str, answer: str, asked: str) -> bool:
    """Whether the answer is the one match that is named, besides those that the question itself gives."""
    known = {match.group().lower() for match in pattern.finditer(asked)}
    return set(named(pattern, said)) - known == {answer.lower()}


def label(said: str, choices: Iterable[str]) -> str | None:
    """The one choice that is named, singular or plural; None for none, for several, or where it is denied."""
    pattern = re.compile(rf"\b({'|'.join(map(re.escape, choices))})s?\b", re.IGNORECASE)
    found = {match.group(1).lower(): denied(said, match) for match in pattern.finditer(said)}
    return next(iter(found)) if len(found) == 1 and not any(found.values()) else None


def overlap(right: int, expected: Sequence[object], given: int) -> float:
    """Right ones of all that were expected, or given where that is more."""
    return right / max(len(expected), given)
