"""Whether what an answer holds is what it says: denials (`not 12`), hedges (`maybe 12`), refusals."""

from __future__ import annotations

import re
from collections.abc import Collection

_NO = (
    r"(?:\b(?:not|no|never|neither|nor|except|excluding|unlike|without|cannot|than|instead of|"
    r"(?:any|every)(?:thing|one|where) but|ignore|forget|disregard|"
    r"nicht|kein\w*|jamais|non|pas|não|nunca|не|нет|"  # `no` is Spanish and Italian, too
    r"(?<!no )(?<!a )doubt (?:it|that|if|whether))"
    r"|n't)"
)
_WRONG = r"(?:wrong|incorrect|false|untrue|mistaken|lies?|decoys?|fakes?|mistakes?)"
_BETWEEN = r"(?:\s+(?!but\b|rather\b|doubt\b|question\b)[\"'(*]*(?-i:[a-z]+(?:'[a-z]+)?)\b){0,4}"
# Words in small letters may stand between; after `not 12 but` another answer begins; `no doubt` is no denial.
_DENIED_BEFORE = re.compile(
    rf"(?:{_NO}(?:{_BETWEEN}|:)|\b{_WRONG}{_BETWEEN}:?"
    rf"|(?:\b{_WRONG}|(?:\bnot|n't)\s+(?:true|correct|right|so|the case))\s+that\b[^.!?;\n]*|不是)"
    r"[\s\"'(*]*$",
    re.IGNORECASE,
)
_DENIED_AFTER = re.compile(
    r"[\"')*]*\s*,?\s*(?:(?:but|and)\s+)?(?:(?:which|that|this|it)\s+)?"
    r"(?:(?:is|was|are|were)(?:\s+(?:(?:almost|\w+ly)\s+){0,2}(?:not|never)\b|n't\b)"
    rf"|(?:is|was|are|were)\s+(?:the\s+|an?\s+)?{_WRONG}\b"
    r"|(?:(?:is|was|belongs)\b[^.!?\n]*|for\s+an?)(?:\b|(?<=an))(?:other|different)"
    r"\s+(?:key|one|question|name|person)\b)",
    re.IGNORECASE,
)
# What takes back whatever was said before it: `12. No, that is a mistake`.
_RETRACTED = re.compile(
    r"(?:\A|[.!?;:,\n(\u2013\u2014-])\W*(?:(?:wait|sorry|oops|hmm|oh|ah|actually|hold on|but|and)\b\W*)*"
    rf"(?:(?:no|nope)\b(?=\s*(?:[^\w\s]|\Z)|\s+(?:that|this|it|i)\b)|(?:{_WRONG}|not\s+(?:true|right|correct)|rejected)\b)"
    r"|\b(?:that|this|it|which|what|all|these|those|they|above|answer|list|i)"
    r"(?:'s|'re|'m|\s+(?:is|was|are|were|am|has|have|had|said|gave|wrote|been)\b)*\s+"
    rf"(?:(?:all|quite|just|\w+ly)\s+)*(?:(?:the|an?)\s+)?(?:{_WRONG}|rejected)\b"
    r"|(?:\bnot|n't)\s+(?:(?:quite|all|\w+ly)\s+)?(?:right|true|correct)\b"
    r"|\b(?:made|making)\s+(?:\w+\s+){0,2}up\b|\b(?:scratch|strike)\s+(?:that|this|it|all)\b|\bnever\s*mind\b"
    r"|\b(?:ignore|disregard|forget)\s+(?:that|this|it|these|them|the\s+above)\b|\bI\s+(?:lied|was\s+lying)\b"
    r"|\btake\s+(?:that|this|it)\s+back\b",
    re.IGNORECASE,
)
# What denies a whole list that follows: `none of these: 1, 2`, `all but 1 and 2`, `they are not: 1, 2`.
_ALL_DENIED = re.compile(
    rf"(?:\b(?:none|neither of|except|excluding|{_WRONG}"
    r"|(?:all|every\w*|any\w*)(?:\s+[a-z]+){0,2}\s+(?:but|besides|(?:apart|aside) from))\b[^.!?;\n]*"
    r"|(?:\bnot|n't)(?:(?:\s+\w+){0,3}:\s*|\W+))$",
    re.IGNORECASE,
)
_UNSURE = re.compile(
    r"\b(?:maybe|perhaps|probably|possibly|presumably|supposedly|apparently|plausible|likely|might|may|could|"
    r"seems?|unsure|uncertain|unclear|unknown|guess(?:ing|ed)?|suppose|hopefully|kidding|joking)\b"
    r"|\b(?:(?:not|never)\s+|\w+n't\s+)(?:\w+\s+)?(?:sure|certain|know)\b|\bno\s+idea\b"
    r"|\bor\s+not\b|\bor\s+(?:an|some\s*)?(?:other|something|somewhere|someone)\b|\bhypothetical",
    re.IGNORECASE,
)
# That the text does not tell, or nobody is meant; `no other`, and `not why`, are said by those who do answer.
_TOLD = r"(?:given|mentioned|stated|specified|provided|found|named|listed|said|told|known|clear|available)"
_REFUSED = re.compile(
    r"(?:\b(?:do|does|did)(?:\s+not|n't)\s+(?:say|state|mention|tell|specify|contain|include|provide|give)"
    r"|\b(?:cannot|can't|can\s+not|could\s+not|couldn't|unable\s+to)\s+(?:find|tell|say|answer|determine)"
    r"|\b(?:refuse|decline)[sd]?\s+to|\bn/a"
    r"|\b(?:is|are|was|were)\s+no(?!\s+(?:doubt|question|need|further|additional|mistake|ambiguity)\b)"
    rf"|\b(?:no\s+(?!other|doubt)(?:\w+\s+){{1,5}}(?:is|are|was|were)|not)\s+{_TOLD}"
    r"|\A\W*(?:none|nobody|no[- ]one|nothing|nowhere)(?!\s+(?:but|except|besides|other\s+than|else)\b))\b"
    r"(?!\s+(?:any\s+(?:other|more)|(?:an)?others?|anything\s+else|more|why|again|elsewhere|anywhere\s+else|"
    r"otherwise|twice)\b)",
    re.IGNORECASE,
)
_VAGUE_BEFORE = re.compile(
    r"(?:\b(?:near|next to|close to|outside|(?:miles|kilometres|km|far|away) from|between|twice|half|double|"
    r"e\.g\.,?|for (?:example|instance),?|such as|like|"
    r"about|around|approximately|approx\.?|roughly|nearly|almost|at least|at most|more than|"
    r"less than|fewer than|over|under|(?<!add )(?<!adds )(?<!sum )(?<!sums )up to|some)"
    r"|[~≈≤≥±]|(?<![\w/\"'=-])[<>])\s*$",
    re.IGNORECASE,
)
# `the opposite of 12`, `ten miles north of Otterham`: something else is meant, whatever it is.
_OF = re.compile(r"\b(\w+)\s+of\s+(?:the\s+)?[\"'(]*$", re.IGNORECASE)
_ITSELF_OF = """
answer number numbers value values key keys code count total name town city village place port market kind
kinds uuid uuids variable variables content contents chain all both each any consist consists consisting made
"""
_ITSELF = frozenset(_ITSELF_OF.split())
_VAGUE_AFTER = re.compile(
    r"\s*(?:[+?%°€£万億亿]|-?ish\b|or so\b|(?:reversed|squared|cubed|backwards|backward)\b"
    r"|(?:hundred|thousand|million|billion|trillion|dozen)s?\b"
    r"|,?\s*(?:[*×÷^/]|\s-\s|(?:plus|minus|times|mod|modulo|divided\s+by|multiplied\s+by)\b)"
    r"\s*(?:\d{1,3}|one|two|three)(?![\w.)]))",
    re.IGNORECASE,
)
_OR = re.compile(r"[\s\"'(),;*]*\bor\b[\s\"'(*]*", re.IGNORECASE)


def denied(said: str, match: re.Match[str]) -> bool:
    """Whether it is said not to be so: by `not`, `except` and the like shortly before, `is not` after it, or
    by what takes back all that was said.
    """
    return bool(
        _DENIED_BEFORE.search(said, 0, match.start())
        or _DENIED_AFTER.match(said, match.end())
        or _RETRACTED.search(said[match.end() :])
    )


def disowned(before: str, after: str) -> bool:
    """Whether what stands `before` and `after` an answer says that it is none."""
    return (
        withheld(f"{before} {after}") or all_denied(before) or bool(_RETRACTED.search(f"{before}; {after}"))
    )


def all_denied(before: str) -> bool:
    """Whether what stands `before` a list says that nothing of it is so."""
    return bool(_ALL_DENIED.search(before))


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
    """Whether it is said to be so roughly, or asked, or a part of what is meant, or one of two."""
    if _VAGUE_BEFORE.search(said, 0, match.start()) or _VAGUE_AFTER.match(said, match.end()):
        return True
    of = _OF.search(said, 0, match.start())
    if of and of.group(1).lower() not in _ITSELF:
        return True
    other = _OR.match(said, match.end())
    return other is not None and not said.startswith(match.group(), other.end())
