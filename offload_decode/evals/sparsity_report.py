"""What a run of `eval sparsity` says: how many keys hold the attention, and whether entropy foretells how
many tokens a task needs.

The claim is that of paper 002, appendix A.2: Pearson's r = 0.85 over five kinds of tasks, between the share
of the tokens that reaches 95 % of dense performance and the entropy of the attention in the first ten tokens
of answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from offload_decode.errors import ConfigError
from offload_decode.evals.concentration import SHARES
from offload_decode.evals.contender import DENSE
from offload_decode.evals.records import Asked, Said, questions_and_answers
from offload_decode.evals.results import Record, Results
from offload_decode.evals.sparsity import ANSWERING, SPARSITY
from offload_decode.evals.stats import Estimate, bootstrapped, pearson, spearman

Array = npt.NDArray[np.float64]
KeyT = TypeVar("KeyT")
_WAY = "topk:budget="
NAMES = tuple(f"{100 * share:.0f}" for share in SHARES)
LENGTH = "stored tokens"
"""The predictor that looks at no attention: what the others must beat."""


@dataclass(frozen=True)
class Sparse:
    """Of a group of records: the mean entropy in nats; and the stored tokens that hold each of `NAMES`
    percent of a head's attention, as a mean over layers, heads and questions, and of the median head and the
    one at the 95th percentile.
    """

    entropy: float
    keys: dict[str, tuple[float, float, float]]

    @property
    def effective(self) -> float:
        """The effective number of keys, exp(entropy)."""
        return math.exp(self.entropy)


@dataclass(frozen=True)
class Question:
    """A question with what its answer's attention looked like, and the fewest tokens it `needed`: the least
    budget from which on, at every budget that was tried, the answer scores no less than the dense one.

    All stored tokens where the largest budget does not do; None where the dense answer scores 0, so that any
    number of tokens does as well.
    """

    asked: Asked
    dense: float
    needed: int | None
    beyond: bool
    predictors: dict[str, float]


@dataclass(frozen=True)
class Prediction:
    """How well a number foretells the tokens needed: rank correlation, and Pearson's with the logarithm of
    the tokens, over `count` questions or tasks. nan: one of the two is the same throughout.
    """

    predictor: str
    over: str
    count: int
    rank: Estimate
    pearson: float


def sparse_by(results: Results, key: Callable[[Record], KeyT], part: str = ANSWERING) -> dict[KeyT, Sparse]:
    """Records of a `part` of the conversation in groups, in the order in which these come."""
    groups: dict[KeyT, list[Record]] = {}
    for record in _records(results):
        if record["part"] == part:
            groups.setdefault(key(record), []).append(record)
    return {name: _sparse(records) for name, records in groups.items()}


def entropy_by_head(results: Results) -> dict[tuple[str, int], list[float]]:
    """For each task and layer the mean entropy of every query head in nats, while an answer is written."""
    found: dict[tuple[str, int], list[Sequence[float]]] = {}
    for record in _records(results):
        if record["part"] == ANSWERING:
            found.setdefault((record["task"], record["layer"]), []).append(record["entropy"]["mean"])
    try:
        return {place: [fmean(head) for head in zip(*heads, strict=True)] for place, heads in found.items()}
    except ValueError as error:
        raise ConfigError(f"{results.path} was changed: a layer has another number of heads") from error


def questions(results: Results) -> list[Question]:
    """Every question with the tokens that it needed."""
    attention: dict[tuple[str, int], list[Record]] = {}
    for record in _records(results):
        if record["part"] == ANSWERING:
            attention.setdefault((record["unit"], record["question"]), []).append(record)
    found = []
    for asked, answers in questions_and_answers(results):
        records = attention.get((asked.unit, asked.question))
        dense = [said.score for said in answers if said.way == DENSE and not said.control]
        if not records or not dense:
            raise ConfigError(
                f"{results.path} lacks the dense answer of question {asked.question}, {asked.unit}"
            )
        needed, beyond = _needed(dense[0], answers, asked.stored_tokens)
        found.append(Question(asked, dense[0], needed, beyond, _predictors(records)))
    return found


def predictions(found: Sequence[Question]) -> list[Prediction]:
    """Of every predictor, the baseline last: over questions, and over tasks at each length (means of their
    questions).
    """
    known = [question for question in found if question.needed is not None]
    by_task: dict[tuple[str, int], list[Question]] = {}
    for question in known:
        by_task.setdefault((question.asked.task, question.asked.length), []).append(question)
    tasks_named = "tasks by length" if len({length for _, length in by_task}) > 1 else "tasks"
    lines = []
    for name in known[0].predictors if known else ():
        each = np.array([(question.predictors[name], _log_needed(question)) for question in known])
        tasks = np.array(
            [
                (fmean(one.predictors[name] for one in own), fmean(map(_log_needed, own)))
                for own in by_task.values()
            ]
        )
        lines += [_prediction(name, "questions", each), _prediction(name, tasks_named, tasks)]
    return lines


def left_out(found: Sequence[Question]) -> list[str]:
    """What must be said beside `predictions`: which questions do not tell, and whether all tell alike."""
    beyond, unknown = sum(one.beyond for one in found), sum(one.needed is None for one in found)
    known = {one.needed for one in found if one.needed is not None}
    notes = []
    if len(known) == 1:
        notes.append(f"every question that tells needs {known.pop():,} tokens: there is nothing to foretell")
    if unknown:
        notes.append(f"{_questions(unknown)} left out of needed tokens: the dense answer scores 0 there")
    if beyond:
        notes.append(
            f"{_questions(beyond)} not answered as well with the largest budget: taken to need all stored "
            "tokens"
        )
    return notes


def _questions(number: int) -> str:
    return f"{number:,} question{'' if number == 1 else 's'}"


def _prediction(name: str, over: str, pairs: Array) -> Prediction:
    first, second = pairs[:, 0], pairs[:, 1]
    rank = bootstrapped(spearman, first, second)
    return Prediction(name, over, len(pairs), rank, pearson(first, second))


def _log_needed(question: Question) -> float:
    assert question.needed is not None
    return math.log(max(1, question.needed))


def _needed(dense: float, answers: Iterable[Said], stored: int) -> tuple[int | None, bool]:
    if dense == 0:
        return None, False
    scores = {
        int(said.way.removeprefix(_WAY)): said.score
        for said in answers
        if said.way.startswith(_WAY) and not said.control
    }
    enough: int | None = None
    for budget in sorted(scores, reverse=True):
        if scores[budget] < dense:
            break
        enough = budget
    return (stored, True) if enough is None else (min(enough, stored), False)


def _predictors(records: Sequence[Record]) -> dict[str, float]:
    """From the attention of one answer, layer by layer and head by head."""
    entropy = [value for record in records for value in record["entropy"]["mean"]]
    keys = [value for record in records for value in record["keys"]["90"]["mean"]]
    return {
        "mean entropy": fmean(entropy),
        "largest head's entropy": max(entropy),
        "keys at 90 %": math.log(fmean(keys)),
        "largest head's keys at 90 %": math.log(max(keys)),
        LENGTH: math.log(records[0]["stored_tokens"]),
    }


def _sparse(records: Sequence[Record]) -> Sparse:
    keys = {}
    for name in NAMES:
        heads = np.array([value for record in records for value in record["keys"][name]["mean"]])
        keys[name] = (float(heads.mean()), float(np.median(heads)), float(np.percentile(heads, 95)))
    return Sparse(fmean(value for record in records for value in record["entropy"]["mean"]), keys)


def _records(results: Results) -> list[Record]:
    """Raises `ConfigError` for records that are not as `Sparsity` writes them."""
    records = results.of(SPARSITY)
    for record in records:
        if not _whole(record):
            raise ConfigError(
                f"a record '{SPARSITY}' of unit '{record['unit']}' of {results.path} is not whole: the file "
                "was changed or is of another release"
            )
    return records


def _whole(record: Record) -> bool:
    kinds = {"question": int, "task": str, "length": int, "stored_tokens": int, "part": str, "layer": int}
    entropy, keys = record.get("entropy"), record.get("keys")
    if not all(isinstance(record.get(name), kind) for name, kind in kinds.items()):
        return False
    if not isinstance(entropy, dict) or not isinstance(keys, dict) or record["stored_tokens"] < 1:
        return False
    spreads = [entropy, *(keys.get(name) for name in NAMES)]
    return all(isinstance(spread, dict) and _numbers(spread.get("mean")) for spread in spreads) and all(
        value >= 1 for name in NAMES for value in keys[name]["mean"]
    )


def _numbers(values: object) -> bool:
    return (
        isinstance(values, list)
        and bool(values)
        and all(isinstance(value, int | float) and math.isfinite(value) for value in values)
    )
