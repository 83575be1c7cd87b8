"""What an answer says, read strictly: hedges, several candidates and denials are not answers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from offload_decode.evals.tasks import scoring
from offload_decode.evals.tasks.hedges import denied, vague, withheld

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
_NOT_ONE = re.compile(r"\b(?:or|between|not|cannot)\b|n't\b", re.IGNORECASE)
# What stands before a count, and after it: then it counts what was asked for, not chapters or years.
_BEFORE = re.compile(
    r"(?:^|[:=]|'s|\b(?:is|are|was|were|be|being|exactly|just|only|mentioned|named|appears?|occurs?|appeared|"
    r"occurred|comes?|came|find|found|counted?|number|total|answer))\W*$",
    re.IGNORECASE,
)
_UNITS = re.compile(
    r"\W*(?:(?:different|separate|distinct|such)\s+)?(?:times?|mentions?|sentences?|occurrences?)\b",
    re.IGNORECASE,
)
_NOTHING_ELSE = re.compile(r"\s*(?:$|[^\w\s])|\s+(?:of|in|throughout|altogether|overall)\b", re.IGNORECASE)
_NAME = re.compile(r"\b[A-Z][^\W\d_]+ [A-Z][^\W\d_]+\b")
# Where a choice stands that is the answer, not a word of a sentence about something else.
_IS = re.compile(
    r"(?:^|[:=>]|\b(?:is|are|was|were|be|kind|answer|mostly|are\s+more))[\s\"'(*`]*(?:(?:the|an?)\s)?[\s\"'(*`]*$",
    re.IGNORECASE,
)
_ENDS = re.compile(
    r"[\"')*`]*\s*(?:$|[.,;!)}\]\n\u2013\u2014]|[:(]\s*\d|-\s|\b(?:as|because|since|with|which|kind|outnumber|"
    r"than\s+(?:of\s+)?any)\b|\b(?:is|are|was|were|has|have|had|comes?|occurs?|appears?)\b[^.!?;\n]*"
    r"\b(?:most|commonest|largest|biggest|main|majority|answer|kind)\b)",
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
    if len(values) != 1 or _NOT_ONE.search(said) or _DIGIT.search(_NUMBER.sub(" ", said)):
        return None
    if withheld(said) or vague(said, found[0]) or denied(said, found[0]):
        return None
    before, after = said[: found[0].start()], said[found[0].end() :]
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


def named(pattern: re.Pattern[str], said: str) -> list[str]:
    """What matches, in small letters, in order, each time again; what is denied in front is marked by `!`."""
    return [("!" if denied(said, match) else "") + match.group().lower() for match in pattern.finditer(said)]


def people(said: str) -> list[str]:
    """First names with surnames, as far as capitals tell them from other words."""
    found = _NAME.findall(said)
    return [name for name in found if not scoring.AROUND & set(name.lower().split())]


def only(pattern: re.Pattern[str], said: str, answer: str, asked: str) -> bool:
    """Whether the answer is the one match that is named, besides those that the question itself gives and
    those that are denied.
    """
    given = set(named(pattern, said)) - {match.group().lower() for match in pattern.finditer(asked)}
    denials = {name for name in given if name.startswith("!")}
    if withheld(said) or f"!{answer.lower()}" in denials:
        return False
    if any(vague(said, match) for match in pattern.finditer(said)):
        return False
    return given - denials == {answer.lower()}


def label(said: str, choices: Iterable[str]) -> str | None:
    """The one choice that is named, singular or plural, where an answer stands: alone, or after `is`, `:` and
    the like. None for none, for several, and where it is denied or only perhaps so; of others that are denied
    it is told.
    """
    pattern = re.compile(rf"\b({'|'.join(map(re.escape, choices))})s?\b", re.IGNORECASE)
    every = list(pattern.finditer(said))
    found = [match for match in every if not denied(said, match)]
    kinds = {match.group(1).lower() for match in found}
    others = {match.group(1).lower() for match in every if match not in found}
    if len(kinds) != 1 or kinds & others or withheld(said) or any(vague(said, match) for match in found):
        return None
    placed = any(_IS.search(said, 0, match.start()) and _ENDS.match(said, match.end()) for match in found)
    return kinds.pop() if placed else None


def overlap(right: int, expected: Sequence[object], given: int) -> float:
    """Right ones of all that were expected, or given where that is more."""
    return right / max(len(expected), given)
