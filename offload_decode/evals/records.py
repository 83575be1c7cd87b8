"""Records of evaluations that ask questions, and how they are read; docs/evaluation.md lists their fields."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from types import NoneType
from typing import Any, Self, get_type_hints

from offload_decode.errors import ConfigError
from offload_decode.evals.results import Record, Results

QUESTION, ANSWER = "question", "answer"
GUESSES = 20
"""How many guesses a question's `guess` is the mean of."""
MOST = 2**63
"""No number of a record is larger."""
_SHARES = ("depth", "guess", "score", "ruler_score", "exact_match", "f1")
_LIMITS = {**dict.fromkeys(_SHARES, (0, 1)), "seed": (-MOST, MOST)}


class _Plain:
    """Dataclasses of plain values, to and from records."""

    __slots__ = ()  # there may be a million answers

    @classmethod
    def of(cls, record: Record) -> Self:
        """Raises `ConfigError` for a record that lacks a field, or has another kind of value there."""
        values: dict[str, Any] = {}
        for name, kinds, limits in _fields(cls):  # type: ignore[arg-type]
            value: Any = record.get(name)
            kind = type(value)
            if (
                kind not in kinds
                or (kind in _NUMBERS and not limits[0] <= value <= limits[1])
                or (kind is list and not all(isinstance(part, str) for part in value))
            ):
                raise ConfigError(
                    f"a record '{record['record']}' of unit '{record['unit']}' has no proper '{name}': "
                    "the file was changed or is of another release"
                )
            values[name] = value
        return cls(**values)


_NUMBERS = frozenset((int, float))
_KINDS: dict[Any, frozenset[type]] = {
    float | None: frozenset((float, int, NoneType)),
    float: _NUMBERS,
    list[str]: frozenset((list,)),
}


@cache
def _fields(cls: type) -> tuple[tuple[str, frozenset[type], tuple[int, int]], ...]:
    """The name of each field, which types JSON gives it, and the least and largest number."""
    hints = get_type_hints(cls)
    return tuple(
        (name, _KINDS.get(kind, frozenset((kind,))), _LIMITS.get(name, (0, MOST)))
        for name, kind in hints.items()
    )


@dataclass(frozen=True, slots=True)
class Asked(_Plain):
    """A question: its unit and number in it, where what it asks for stands, and what chance comes to."""

    unit: str
    question: int
    task: str
    length: int
    seed: int
    depth: float | None
    asked: str
    expected: list[str]
    guess: float
    stored_tokens: int


@dataclass(frozen=True, slots=True)
class Said(_Plain):
    """An answer: which way, to the text or to its control, its scores and costs.

    `ruler_score` is RULER's string match; `exact_match` and `f1` are SQuAD's, None without a short answer.
    """

    unit: str
    question: int
    way: str
    control: bool
    said: str
    score: float
    ruler_score: float
    attended: float
    bytes_moved: float
    seconds: float
    exact_match: float | None = None
    f1: float | None = None


def record(kind: str, of: Asked | Said) -> Record:
    """As it is written."""
    return {"record": kind, **asdict(of)}


def questions_and_answers(results: Results) -> Iterator[tuple[Asked, list[Said]]]:
    """Every question with all answers to it. Raises `ConfigError` for records that do not fit together."""
    answers: dict[tuple[str, int], list[Said]] = {}
    for said in map(Said.of, results.of(ANSWER)):
        answers.setdefault((said.unit, said.question), []).append(said)
    for asked in map(Asked.of, results.of(QUESTION)):
        yield asked, answers.pop((asked.unit, asked.question), [])
    if answers:
        unit, number = next(iter(answers))
        raise ConfigError(f"{results.path} has answers to a question that it does not have: {unit}, {number}")
