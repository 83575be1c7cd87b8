"""Whether what an answer holds is what it says: denials (`not 12`), hedges (`maybe 12`), refusals."""

from __future__ import annotations

import re
from collections.abc import Collection

_NO = (
    r"(?:\b(?:not|no|never|neither|nor|except|excluding|unlike|without|cannot|than|instead of|anything but)"
    r"|n't)"
)
# Words in small letters may stand between; after `not 12 but` another answer begins; `no doubt` is no denial.
_DENIED_BEFORE = re.compile(
    rf"{_NO}(?:(?:\s+(?!but\b|rather\b|doubt\b|question\b)[\"'(*]*(?-i:[a-z]+)\b){{0,4}}|:)[\s\"'(*]*$",
    re.IGNORECASE,
)
_DENIED_AFTER = re.compile(
    r"[\"')*]*\s*,?\s*(?:which\s+|that\s+)?"
    r"(?:(?:is|was|are|were)(?:\s+not\b|n't\b)|(?:is|was)\s+(?:wrong|incorrect|false)\b)",
    re.IGNORECASE,
)
_UNSURE = re.compile(
    r"\b(?:maybe|perhaps|probably|possibly|presumably|likely|might|may|could|unsure|uncertain|unknown|guess)\b"
    r"|\b(?:(?:not|never)\s+|\w+n't\s+)(?:\w+\s+)?(?:sure|certain|know)\b|\bno\s+idea\b",
    re.IGNORECASE,
)
# That the text does not tell; `no other`, and `not why`, are said by those who do answer.
_REFUSED = re.compile(
    r"(?:\b(?:do|does|did)(?:\s+not|n't)\s+(?:say|state|mention|tell|specify|contain|include|provide|give)"
    r"|\b(?:cannot|can't|can\s+not|could\s+not|couldn't|unable\s+to)\s+(?:find|tell|say|answer|determine)"
    r"|\b(?:is|are|was|were)\s+no\s+(?:mention|information))\b"
    r"(?!\s+(?:any\s+(?:other|more)|an?other|others?|anything\s+else|more|why)\b)",
    re.IGNORECASE,
)
_VAGUE_BEFORE = re.compile(
    r"(?:\b(?:about|around|approximately|approx\.?|roughly|nearly|almost|at least|at most|more than|"
    r"less than|fewer than|over|under|(?<!add )(?<!adds )(?<!sum )(?<!sums )up to|some)"
    r"|[~≈≤≥±]|(?<![\w/\"'=-])[<>])\s*$",
    re.IGNORECASE,
)
_VAGUE_AFTER = re.compile(r"\s*(?:[+?%°€£]|-?ish\b|or so\b)", re.IGNORECASE)


def denied(said: str, match: re.Match[str]) -> bool:
    """Whether it is said not to be so: by `not`, `except` and the like shortly before, `is not` after it."""
    return bool(_DENIED_BEFORE.search(said, 0, match.start()) or _DENIED_AFTER.match(said, match.end()))


def unsure(said: str, words: Collection[str] = ()) -> bool:
    """Whether anything is said to be so perhaps; `words` are none that would say it."""
    return any(match.group().lower() not in words for match in _UNSURE.finditer(said))


def refused(said: str) -> bool:
    """Whether it is said that the text does not tell, whatever is said beside it."""
    return bool(_REFUSED.search(said))


def withheld(said: str) -> bool:
    """Whether no answer is given that one could hold the model to: it is unsure, or refused."""
    return unsure(said) or refused(said)


def vague(said: str, match: re.Match[str]) -> bool:
    """Whether it is said to be so roughly, or asked."""
    return bool(_VAGUE_BEFORE.search(said, 0, match.start()) or _VAGUE_AFTER.match(said, match.end()))
