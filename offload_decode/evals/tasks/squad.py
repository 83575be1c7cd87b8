"""SQuAD's measures of an answer (arXiv 1606.05250, section 6.1): exact match, and F1 of its words."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence

from offload_decode.evals.tasks.plain_answers import LEAD, plain

_ARTICLES = re.compile(r"\b(a|an|the)\b")


def exact(answers: Sequence[str], said: str) -> float:
    """Whether the whole of an answer is one of these, by SQuAD's normal form (arXiv 1606.05250); as it is
    written where that leaves nothing of it, as of `**`.
    """
    given = LEAD.sub("", said)
    return float(any((normal(a) or a.strip()) == (normal(given) or given.strip()) for a in answers))


def token_f1(answers: Sequence[str], said: str) -> float:
    """The best F1 of the answer's words and those of one of these, by SQuAD's normal form."""
    return max(_f1(normal(answer).split(), normal(LEAD.sub("", said)).split()) for answer in answers)


def _f1(expected: list[str], given: list[str]) -> float:
    common = (Counter(expected) & Counter(given)).total()
    if not expected or not given:
        return float(expected == given)
    return 2 * common / (len(expected) + len(given))


def normal(text: str) -> str:
    """SQuAD's: small letters, no punctuation, no articles, single spaces."""
    kept = "".join(c for c in plain(text).lower() if not unicodedata.category(c).startswith(("P", "S")))
    return " ".join(_ARTICLES.sub(" ", kept).split())
