"""How sparse dense attention is as it answers, beside the scores of answers from few tokens.

How many keys hold the attention to stored tokens and its entropy (probabilities of a query are those of the
stored tokens alone, and add to 1), and whether entropy predicts how many tokens a task needs. That is the
claim of paper 002, appendix A.2: Pearson's r = 0.85 over five kinds of tasks, between the share of the tokens
that reaches 95 % of dense performance and the entropy of the attention in the first ten tokens of answers.
docs/evaluation.md says what the records hold.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import AliasPath, Field
from torch import Tensor

from offload_decode.attention.queries import Queries
from offload_decode.common.errors import ConfigError
from offload_decode.engine.engine import Engine
from offload_decode.evals import runs
from offload_decode.evals.answering import Answering, AnswerPlace, Asking
from offload_decode.evals.contender import DENSE, Contender
from offload_decode.evals.recorded_queries import AttentionDemand, Call
from offload_decode.evals.runs import Count, KeyT, Number, Record, Results, Text, grouped
from offload_decode.evals.stats import Estimate, bootstrapped, pearson, spearman
from offload_decode.kv.host_cache import HostKV
from offload_decode.selectors.scores import blocks
from offload_decode.store.reader import KVStore

SHARES = (0.75, 0.9, 0.95, 0.99)
_NUMBERS = 1 << 22  # logits that are in memory at once, or those of one row


def concentration(host: HostKV, layer: int, queries: Queries) -> tuple[Tensor, Tensor]:
    """Of one layer's queries `[Hkv, R]`: the entropy in nats, float64, and `[shares, Hkv, R]`, int64, the
    fewest tokens that hold each of `SHARES`; both on the CPU.

    Exact for float32 logits: they are computed key by key from the store, a few rows at a time, and sorted.
    """
    heads, rows = queries.vectors.shape[:2]
    entropy = torch.empty(heads, rows, dtype=torch.float64)
    keys = torch.empty(len(SHARES), heads, rows, dtype=torch.int64)
    step = max(1, _NUMBERS // host.length)
    for head, start in itertools.product(range(heads), range(0, rows, step)):
        part, stored = slice(start, start + step), host.keys(layer, head)
        asked = queries.vectors[head, part]
        scores = [asked @ stored.read(block, asked.device).T for block in blocks(host.length)]
        entropy[head, part], keys[:, head, part] = _of(queries.logits(torch.cat(scores, dim=1)))
    return entropy, keys


def _of(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Entropy `[r]` and keys `[shares, r]` of `logits [r, N]`."""
    ordered = torch.log_softmax(logits.sort(-1, descending=True).values.double(), -1)
    weights = ordered.exp()
    entropy = -(weights * ordered).sum(-1).clamp(max=0.0)
    held = weights.cumsum(-1)
    # A share that is held but for the rounding of a sum of N numbers is held.
    wanted = held.new_tensor(SHARES) * (1 - 1e-9)
    keys = torch.searchsorted(held, wanted.expand(len(held), -1).contiguous()) + 1
    return entropy.cpu(), keys.clamp(max=logits.shape[-1]).T.cpu()


SPARSITY = "sparsity"
ASKING, ANSWERING = "question", "answer"
NAMES = tuple(f"{100 * share:.0f}" for share in SHARES)
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
        self, place: AnswerPlace, store: KVStore, way: Contender, asking: Sequence[Asking], control: bool
    ) -> Iterator[Record]:
        yield from super().answers(place, store, way, asking, control)
        if way.label != DENSE or control:
            return
        engine = Engine.open(store, self.loaded, selector=DENSE)
        for number, question, most in asking:
            begun = question.answer_prefix if self.plan.begins else ""
            about = {"record": SPARSITY, "question": number, "task": place.task.name, "length": place.length}
            about |= {"seed": place.seed, "stored_tokens": store.manifest.n_tokens}
            for layer in listen(engine, question.text, most, begun):
                yield from _layer_records(engine, layer, about)


def listen(engine: Engine, question: str, max_new_tokens: int, begun: str = "") -> list[LayerAttention]:
    """What every searched layer asks as `engine` answers greedily, as its own conversation stays as it is."""
    prefix = AttentionDemand(engine.prefix.fresh())
    asked = Engine(engine.loaded, engine.store, prefix)
    logits = asked.ask(question, begun)
    answers = asked.cache.generated_length - 1
    for _ in asked.generate(logits, max_new_tokens):
        pass
    found = []
    for passes in grouped(prefix.take(asked.cache), lambda one: one[0].layer).values():
        calls, shares = zip(*passes, strict=True)
        call = replace(calls[0], query=torch.cat([call.query for call in calls], dim=2))
        found.append(LayerAttention(call, 1 - torch.cat(shares, dim=1), answers))
    return found


def _layer_records(engine: Engine, layer: LayerAttention, about: Mapping[str, Any]) -> Iterator[Record]:
    """One for each part of the conversation that has tokens."""
    host, call = engine.prefix.host, layer.call
    _, heads, tokens, _ = call.query.shape
    entropy, counts = concentration(host, call.layer, call.queries(engine.loaded.shape.kv_heads))
    entropy, counts = entropy.reshape(heads, tokens), counts.reshape(len(SHARES), heads, tokens).double()
    for part, rows in ((ASKING, slice(0, layer.answers)), (ANSWERING, slice(layer.answers, tokens))):
        if rows.stop > rows.start:
            yield {
                **about,
                "part": part,
                "layer": call.layer,
                "rows": rows.stop - rows.start,
                "stored_share": _rounded(layer.stored_share[:, rows].mean(-1)),
                "entropy": _spread(entropy[:, rows]),
                "keys": {name: _spread(keys[:, rows]) for name, keys in zip(NAMES, counts, strict=True)},
            }


def _spread(values: Tensor) -> dict[str, list[float]]:
    """Of `[H, T]`, over the tokens."""
    middle, late = torch.quantile(values, torch.tensor([0.5, 0.95], dtype=values.dtype), dim=-1)
    return {"mean": _rounded(values.mean(-1)), "median": _rounded(middle), "p95": _rounded(late)}


def _rounded(values: Tensor) -> list[float]:
    return [round(value, DECIMALS) for value in values.tolist()]


_WAY = "topk:budget="
LENGTH = "stored tokens"  # the predictor that looks at no attention: what the others must beat


@dataclass(frozen=True)
class Keys:
    """By query head."""

    mean: Annotated[list[Annotated[Number, Field(ge=1)]], Field(min_length=1)]


@dataclass(frozen=True)
class LayerRecord:
    """One layer's attention in a `part` of the conversation about a question, as `Sparsity` writes it; the
    mean `entropy` by query head, in nats.
    """

    unit: Text
    question: Count
    task: Text
    length: Count
    stored_tokens: Annotated[Count, Field(ge=1)]
    part: Text
    layer: Count
    entropy: Annotated[list[Number], Field(min_length=1, validation_alias=AliasPath("entropy", "mean"))]
    keys: Annotated[dict[Literal["75", "90", "95", "99"], Keys], Field(min_length=len(NAMES))]


HEADING = [*(f"{name} %" for name in NAMES), "90 %: median head", "95th head", "entropy", "effective"]


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

    def cells(self) -> list[str]:
        """What tables show of it, under `HEADING`."""
        means = [f"{mean:,.0f}" for mean, _, _ in self.keys.values()]
        _, middle, late = self.keys["90"]
        return [*means, f"{middle:,.0f}", f"{late:,.0f}", f"{self.entropy:.2f}", f"{self.effective:,.0f}"]


@dataclass(frozen=True)
class Question:
    """A question with what its answer's attention looked like, and the fewest tokens it `needed`: the least
    budget from which on, at every budget that was tried, the answer scores no less than the dense one.

    All stored tokens where the largest budget does not do; None where the dense answer scores 0, so that any
    number of tokens does as well.
    """

    asked: runs.QuestionRecord
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


def sparse_by(results: Results, key: Callable[[LayerRecord], KeyT]) -> dict[KeyT, Sparse]:
    """Records of answers in groups, in the order in which these come."""
    found = {}
    for group, records in grouped(_answering(results), key).items():
        keys = {}
        for name in NAMES:
            heads = [value for record in records for value in record.keys[name].mean]  # type: ignore[index]
            keys[name] = (fmean(heads), float(np.median(heads)), float(np.percentile(heads, 95)))
        found[group] = Sparse(fmean(value for record in records for value in record.entropy), keys)
    return found


def _answering(results: Results) -> Iterator[LayerRecord]:
    return (record for record in results.typed(SPARSITY, LayerRecord) if record.part == ANSWERING)


def entropy_by_head(results: Results) -> dict[tuple[str, int], list[float]]:
    """For each task and layer the mean entropy of every query head in nats, while an answer is written."""
    groups = grouped(_answering(results), lambda record: (record.task, record.layer)).items()
    try:
        return {
            place: list(map(fmean, zip(*(record.entropy for record in records), strict=True)))
            for place, records in groups
        }
    except ValueError as error:
        raise ConfigError(f"{results.path} was changed: a layer has another number of heads") from error


def questions(results: Results) -> list[Question]:
    """Every question with the tokens that it needed."""
    attention = grouped(_answering(results), lambda record: (record.unit, record.question))
    found = []
    for asked, answers in runs.questions_and_answers(results):
        records = attention.get((asked.unit, asked.question))
        dense = [said.score for said in answers if said.way == DENSE and not said.control]
        if not records or not dense:
            about = f"question {asked.question}, {asked.unit}"
            raise ConfigError(f"{results.path} lacks the dense answer of {about}")
        needed, beyond = _needed(dense[0], answers, asked.stored_tokens)
        found.append(Question(asked, dense[0], needed, beyond, _predictors(records)))
    return found


def predictions(found: Sequence[Question]) -> list[Prediction]:
    """Of each predictor, the baseline last: over questions, and over their means by task and length."""
    known = [one for one in found if one.needed is not None]
    by_task = grouped(known, lambda one: (one.asked.task, one.asked.length))
    tasks_named = "tasks by length" if len({length for _, length in by_task}) > 1 else "tasks"
    lines = []
    for name in known[0].predictors if known else ():
        by_place = [[(one.predictors[name], _log(one.needed)) for one in own] for own in by_task.values()]
        each = [pair for own in by_place for pair in own]
        means = [tuple(map(fmean, zip(*own, strict=True))) for own in by_place]
        for over, pairs in (("questions", each), (tasks_named, means)):
            first, second = np.array(pairs).T
            rank = bootstrapped(spearman, first, second)
            lines.append(Prediction(name, over, len(pairs), rank, float(pearson(first, second))))
    return lines


def _log(needed: int | None) -> float:
    return math.log(max(1, needed or 0))


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


def _needed(dense: float, answers: Iterable[runs.AnswerRecord], stored: int) -> tuple[int | None, bool]:
    if dense == 0:
        return None, False
    tried = [said for said in answers if said.way.startswith(_WAY) and not said.control]
    scores = sorted(((int(said.way.removeprefix(_WAY)), said.score) for said in tried), reverse=True)
    enough = [budget for budget, _ in itertools.takewhile(lambda pair: pair[1] >= dense, scores)]
    return (min(enough[-1], stored), False) if enough else (stored, True)


def _predictors(records: Sequence[LayerRecord]) -> dict[str, float]:
    """From the attention of one answer, layer by layer and head by head."""
    entropy = [value for record in records for value in record.entropy]
    keys = [value for record in records for value in record.keys["90"].mean]
    return {
        "mean entropy": fmean(entropy),
        "largest head's entropy": max(entropy),
        "keys at 90 %": math.log(fmean(keys)),
        "largest head's keys at 90 %": math.log(max(keys)),
        LENGTH: math.log(records[0].stored_tokens),
    }
