"""How sparse dense attention is as it answers, beside the scores of answers from few tokens.

How many keys hold the attention to stored tokens and its entropy (probabilities of a query are those of the
stored tokens alone, and add to 1), and whether entropy predicts how many tokens a task needs. That is the
claim of paper 002, appendix A.2: Pearson's r = 0.85 over five kinds of tasks, between the share of the tokens
that reaches 95 % of dense performance and the entropy of the attention in the first ten tokens of answers.
docs/evaluation.md says what the records hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from offload_decode.attention.queries import Queries
from offload_decode.common.errors import ConfigError
from offload_decode.engine.engine import Engine
from offload_decode.evals.answering import Answering, AnswerPlace
from offload_decode.evals.contender import DENSE, Contender
from offload_decode.evals.haystack import Material
from offload_decode.evals.recorded_queries import AttentionDemand, Call
from offload_decode.evals.runs import Asked, Record, Results, Said, questions_and_answers
from offload_decode.evals.stats import Estimate, bootstrapped, pearson, spearman
from offload_decode.evals.tasks.base import Question as Asking
from offload_decode.kv.host_cache import BLOCK_TOKENS, HostKV
from offload_decode.store.reader import KVStore

SHARES = (0.75, 0.9, 0.95, 0.99)
_NUMBERS = 1 << 22  # logits that are in memory at once, or those of one row


@dataclass(frozen=True)
class Concentration:
    """Of query rows `[Hkv, R]`: `entropy` in nats, float64; `keys [shares, Hkv, R]`, int64, the fewest tokens
    that hold each of `SHARES`.
    """

    entropy: Tensor
    keys: Tensor


def concentration(host: HostKV, layer: int, queries: Queries) -> Concentration:
    """Of all rows of one layer's queries, on the CPU.

    Exact for float32 logits: they are computed key by key from the store, a few rows at a time, and sorted.
    """
    heads, rows = queries.rows.shape[:2]
    entropy = torch.empty(heads, rows, dtype=torch.float64)
    keys = torch.empty(len(SHARES), heads, rows, dtype=torch.int64)
    step = max(1, _NUMBERS // host.length)
    for head in range(heads):
        for start in range(0, rows, step):
            part = slice(start, start + step)
            entropy[head, part], keys[:, head, part] = _of(_logits(host, layer, head, queries, part))
    return Concentration(entropy, keys)


def _logits(host: HostKV, layer: int, head: int, queries: Queries, rows: slice) -> Tensor:
    """`[r, N]` float32 on the device."""
    asked, stored = queries.rows[head, rows], host.keys(layer, head)
    logits = asked.new_empty(len(asked), host.length)
    for first in range(0, host.length, BLOCK_TOKENS):
        block = slice(first, min(first + BLOCK_TOKENS, host.length))
        logits[:, block] = queries.logits(asked @ stored.read(block, asked.device).T)
    return logits


def _of(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Entropy `[r]` and keys `[shares, r]` of `logits [r, N]`."""
    lse = torch.logsumexp(logits.double(), -1)
    ordered = logits.sort(-1, descending=True).values.double() - lse[:, None]
    weights = ordered.exp()
    entropy = -(weights * ordered).sum(-1).clamp(max=0.0)
    held = weights.cumsum(-1)
    shares = torch.tensor(SHARES, dtype=torch.float64, device=held.device)
    # A share that is held but for the rounding of a sum of N numbers is held.
    wanted = shares * (1 - 1e-9)
    keys = torch.searchsorted(held, wanted.expand(len(held), -1).contiguous()) + 1
    return entropy.cpu(), keys.clamp(max=logits.shape[-1]).T.cpu()


SPARSITY = "sparsity"
ASKING, ANSWERING = "question", "answer"
DECIMALS = 5


@dataclass(frozen=True)
class LayerAttention:
    """One layer's queries as a question was answered, and the share `[H, T]` of the attention of each that
    goes to stored tokens; from token `answers` on, an answer token is predicted from each.
    """

    call: Call
    stored_share: Tensor
    answers: int


class Sparsity(Answering):
    """`Answering`, with a record for each layer of what dense attention looked like."""

    def answers(
        self,
        place: AnswerPlace,
        material: Material,
        store: KVStore,
        way: Contender,
        questions: Sequence[tuple[int, Asking]],
        control: bool,
    ) -> Iterator[Record]:
        """As `Answering.answers`."""
        yield from super().answers(place, material, store, way, questions, control)
        if way.label != DENSE or control:
            return
        engine = Engine.open(store, self.loaded, selector=DENSE)
        for number, question in questions:
            begun = question.answer_prefix if self.plan.begins else ""
            about = {
                "record": SPARSITY,
                "question": number,
                "task": place.task.name,
                "length": place.length,
                "seed": place.seed,
                "stored_tokens": store.manifest.n_tokens,
            }
            most = place.task.most_tokens(question, material)
            for layer in listen(engine, question.text, most, begun):
                yield from _layer_records(engine, layer, about)


def listen(engine: Engine, question: str, max_new_tokens: int, begun: str = "") -> list[LayerAttention]:
    """What every searched layer asks as `engine` answers greedily, as its own conversation stays as it is."""
    prefix = AttentionDemand(engine.prefix.fresh())
    asked = Engine(engine.loaded, engine.store, prefix)
    logits = asked.ask(question, begun)
    answers = asked.cache.tail_length - 1
    for _ in asked.generate(logits, max_new_tokens):
        pass
    passes = prefix.take(asked.cache)
    found = []
    for layer in dict.fromkeys(one.call.layer for one in passes):
        own = [one for one in passes if one.call.layer == layer]
        first = own[0].call
        query = torch.cat([one.call.query for one in own], dim=2)
        share = 1 - torch.cat([one.tail_share for one in own], dim=1)
        call = Call(layer, query, first.scaling, first.softcap)
        found.append(LayerAttention(call, share, answers))
    return found


def _layer_records(engine: Engine, layer: LayerAttention, about: Mapping[str, Any]) -> Iterator[Record]:
    """One for each part of the conversation that has tokens."""
    host, call = engine.prefix.host, layer.call
    _, heads, tokens, _ = call.query.shape
    found = concentration(host, call.layer, call.queries(engine.loaded.shape.kv_heads))
    by_head = Concentration(
        found.entropy.reshape(heads, tokens), found.keys.reshape(len(SHARES), heads, tokens)
    )
    parts = {ASKING: slice(0, layer.answers), ANSWERING: slice(layer.answers, tokens)}
    for part, rows in parts.items():
        if rows.stop == rows.start:
            continue
        yield {
            **about,
            "part": part,
            "layer": call.layer,
            "rows": rows.stop - rows.start,
            "stored_share": _rounded(layer.stored_share[:, rows].mean(-1)),
            "entropy": _spread(by_head.entropy[:, rows]),
            "keys": {
                f"{100 * share:.0f}": _spread(keys[:, rows].double())
                for share, keys in zip(SHARES, by_head.keys, strict=True)
            },
        }


def _spread(values: Tensor) -> dict[str, list[float]]:
    """Of `[H, T]`, over the tokens."""
    middle, late = torch.quantile(values, torch.tensor([0.5, 0.95], dtype=values.dtype), dim=-1)
    return {"mean": _rounded(values.mean(-1)), "median": _rounded(middle), "p95": _rounded(late)}


def _rounded(values: Tensor) -> list[float]:
    return [round(value, DECIMALS) for value in values.tolist()]


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
    """How well a number predicts the tokens needed: rank correlation, and Pearson's with the logarithm of
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
        notes.append(f"every question that tells needs {known.pop():,} tokens: there is nothing to predict")
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
