"""Negative log-likelihood of what follows a stored prefix, by selector and budget, beside dense attention.

Of `tokens [M + 1]` the first M are run and the last M predicted, whatever a model would have said in their
place: what follows the last stored token is not known of a store, so that the first is run and not predicted.
docs/evaluation.md says what is stored, run and predicted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from offload_decode.common.errors import ConfigError
from offload_decode.engine.conversation import Conversation
from offload_decode.engine.engine import Engine, without_corpus
from offload_decode.evals.contender import DENSE, Contender
from offload_decode.evals.haystack import Haystack
from offload_decode.evals.recorded_queries import AttentionDemand
from offload_decode.evals.runs import Record, Results, Unit
from offload_decode.evals.stats import Estimate, block_mean
from offload_decode.models.loading import LoadedModel
from offload_decode.models.prompt import encode_text, opening_of
from offload_decode.store.reader import KVStore

Tokens = npt.NDArray[np.int32]
PART = 256  # tokens whose logits are in memory at once


@dataclass(frozen=True)
class Forced:
    """`nll [M]`, float64, in nats; `attended`: stored tokens a query row of a searched layer; `tail_share`:
    the mean share of the attention in the searched layers that goes to the M tokens themselves, where it was
    asked for.
    """

    nll: npt.NDArray[np.float64]
    attended: float
    tail_share: float | None = None


def behind_store(loaded: LoadedModel, store: KVStore, contender: Contender, tokens: Tokens) -> Forced:
    """Tokens behind a stored prefix, each attending as `contender` does; `tail_share` is that of dense
    attention. Raises as `Engine.open`.
    """
    engine = Engine.open(store, loaded, selector=contender.selector, options=contender.options)
    if contender.selector != DENSE:
        nll = _run(engine, tokens, lambda: None)
        return Forced(nll, _attended(engine))
    prefix = AttentionDemand(engine.prefix)
    conversation = Conversation(loaded, store, prefix)
    shares: list[Tensor] = []

    def ran() -> None:
        shares.extend(pass_.tail_share.flatten() for pass_ in prefix.take(conversation.cache))

    nll = _run(conversation, tokens, ran)
    return Forced(nll, _attended(conversation), float(torch.cat(shares).mean()))


def behind_window(loaded: LoadedModel, window: Tokens, tokens: Tokens) -> Forced:
    """Tokens behind `window [W]`, which the bare model reads as the beginning of a text."""
    conversation = without_corpus(loaded, len(window) + len(tokens))
    if len(window):
        conversation.extend(window.tolist())
    return Forced(_run(conversation, tokens, lambda: None), 0.0)


def _run(conversation: Conversation, tokens: Tokens, ran: Callable[[], None]) -> npt.NDArray[np.float64]:
    """`nll [M]`; `ran` is called after each pass.

    Where tokens of a pass choose together, or are remembered, each is run alone, as it is when it is
    generated: an earlier one must not choose by a later one.
    """
    chosen = conversation.prefix.chosen
    step = 1 if chosen.one_question or chosen.selector.remembers else PART
    parts = []
    with conversation.step():
        for start in range(0, len(tokens) - 1, step):
            run = tokens[start : min(start + step, len(tokens) - 1)].tolist()
            logits = conversation.run(run, every=True)
            expected = torch.from_numpy(tokens[start + 1 : start + 1 + len(run)]).long().to(logits.device)
            parts.append(torch.nn.functional.cross_entropy(logits.double(), expected, reduction="none"))
            ran()
    return torch.cat(parts).cpu().numpy()


def _attended(conversation: Conversation) -> float:
    stats = conversation.prefix.take_stats()
    return stats.selected / max(1, stats.rows)


NLL = "nll"
UNIGRAM = "unigram"
"""The way that is no model: how often a token has come in the text so far, each one once more."""
DECIMALS = 5  # nats that are kept of a token: far more than the rounding of float16 weights


class GrownStore(Protocol):
    """Where the stores of a text's beginnings come from; `prefill_jobs` makes them, above this room."""

    def __call__(self, tokens: Tokens, report: Callable[[int], None]) -> KVStore:
        """The store of `tokens [N]`: the one given last, made longer, where that holds their beginning.

        It is there until the next call. `report` is told the tokens done.
        """


@dataclass(frozen=True)
class PerplexityPlan:
    """What is measured: the `chunk` tokens behind `lengths` stored ones at `places` of the text, evenly
    spread; `sliding`: every token of texts of these lengths. `windows`: the last tokens that the bare model
    sees, as baselines. `prefill` says how stores are made.
    """

    haystack: Haystack
    lengths: tuple[int, ...]
    contenders: tuple[Contender, ...]
    places: int = 1
    chunk: int = 256
    windows: tuple[int, ...] = ()
    sliding: bool = False
    prefill: Mapping[str, Any] = field(default_factory=dict)

    @property
    def longest(self) -> int:
        """Tokens of a text, stored and predicted, at most."""
        return max(self.lengths) + (0 if self.sliding else self.chunk + 1)


@dataclass(frozen=True)
class _Step:
    """A chunk: at which place, of which length, behind how many stored tokens, until which token."""

    place: int
    length: int
    stored: int
    end: int

    @property
    def key(self) -> str:
        return f"place {self.place}, length {self.length}, behind {self.stored}"


class Perplexity:
    """An evaluation for `runs.run`. Raises `ConfigError` where the text is too short."""

    name = "perplexity"

    def __init__(self, loaded: LoadedModel, plan: PerplexityPlan, grown: GrownStore):
        self._loaded, self._plan, self._grown = loaded, plan, grown
        tokenizer = loaded.known_tokenizer
        self._opening = list(opening_of(tokenizer))
        self._texts = _texts(plan, self._opening, encode_text(tokenizer, plan.haystack.text))
        self._vocabulary = max(len(tokenizer), *(int(text.max()) + 1 for text in self._texts))
        self._steps = {step.key: step for step in _steps(plan)}

    def configuration(self) -> Mapping[str, Any]:
        """As the results' first line says it."""
        plan = self._plan
        return {
            "fashion": "sliding" if plan.sliding else "continuation",
            "text": plan.haystack.name,
            "text_sha256": plan.haystack.sha256,
            "lengths": list(plan.lengths),
            "places": plan.places,
            "chunk": plan.chunk,
            "contenders": [contender.label for contender in plan.contenders],
            "windows": list(plan.windows),
            "prefill": dict(plan.prefill),
        }

    def units(self) -> Sequence[Unit]:
        """A unit a chunk: place by place, the stored text growing."""
        units, before = [], _Step(-1, 0, 0, 0)
        for step in self._steps.values():
            longer = step.stored - (before.stored if step.place == before.place else 0)
            # A store of the same length is there already; a sliding text of another length begins anew.
            units.append(Unit(step.key, longer if longer >= 0 else step.stored))
            before = step
        return units

    def measure(self, unit: Unit, report: Callable[[int], None]) -> Sequence[Record]:
        """A record a way of attending."""
        step = self._steps[unit.key]
        text = self._texts[step.place]
        tokens = text[step.stored : step.end]
        ways: dict[str, Forced] = {}
        if step.stored:
            before = step.stored - unit.tokens
            store = self._grown(text[: step.stored], lambda done: report(max(0, done - before)))
            for contender in self._contenders:
                ways[contender.label] = behind_store(self._loaded, store, contender, tokens)
        else:
            bare = behind_window(self._loaded, text[:0], tokens)
            ways = {contender.label: bare for contender in self._contenders}
        for window in self._plan.windows:
            seen = self._window(text[: step.stored], window)
            ways[f"window:{window}"] = behind_window(self._loaded, seen, tokens)
        ways[UNIGRAM] = Forced(unigram(text[: step.end], step.stored + 1, self._vocabulary), 0.0)
        return [self._record(step, way, forced) for way, forced in ways.items()]

    @property
    def _contenders(self) -> Sequence[Contender]:
        """Dense attention first: what all others are compared with."""
        others = [contender for contender in self._plan.contenders if contender.selector != DENSE]
        return [Contender(DENSE), *others]

    def _window(self, before: Tokens, window: int) -> Tokens:
        """The last tokens, behind what the tokenizer puts before any text."""
        if len(before) <= window:
            return before
        opening = np.array(self._opening[:window], np.int32)
        return np.concatenate([opening, before[len(before) - (window - len(opening)) :]])

    def _record(self, step: _Step, way: str, forced: Forced) -> Record:
        return {
            "record": NLL,
            "way": way,
            "place": step.place,
            "length": step.length,
            "stored_tokens": step.stored,
            "first": step.stored + 1,
            "nll": [round(value, DECIMALS) for value in forced.nll.tolist()],
            "attended": None if way == UNIGRAM or way.startswith("window:") else forced.attended,
            "tail_share": forced.tail_share,
        }


def unigram(text: Tokens, first: int, vocabulary: int) -> npt.NDArray[np.float64]:
    """Nats of the tokens from `first` on, each by how often it and all others have come before it, of
    `vocabulary` tokens each once more (Laplace's rule of succession).
    """
    counts = np.bincount(text[:first], minlength=vocabulary) + 1
    found = np.empty(len(text) - first)
    for place, token in enumerate(text[first:]):
        found[place] = np.log((first + place + vocabulary) / counts[token])
        counts[token] += 1
    return found


def _steps(plan: PerplexityPlan) -> list[_Step]:
    steps = []
    for place in range(plan.places):
        for length in sorted(set(plan.lengths)):
            starts = range(0, length - 1, plan.chunk) if plan.sliding else [length]
            last = length if plan.sliding else length + plan.chunk + 1
            steps += [_Step(place, length, start, min(start + plan.chunk + 1, last)) for start in starts]
    return steps


def _texts(plan: PerplexityPlan, opening: Sequence[int], ids: Sequence[int]) -> list[Tokens]:
    """The text of each place, which begins as the tokenizer begins any text."""
    own = plan.longest - len(opening)
    apart = own if plan.sliding else plan.chunk + 1
    room = len(ids) - own
    step = room // max(1, plan.places - 1)
    if room < 0 or (plan.places > 1 and step < apart):
        enough = own + (plan.places - 1) * apart
        raise ConfigError(
            f"'{plan.haystack.name}' has {len(ids):,} tokens, and {enough:,} are needed: take a longer text, "
            "or fewer places or shorter lengths"
        )
    starts = [place * step for place in range(plan.places)]
    return [np.array([*opening, *ids[start : start + own]], np.int32) for start in starts]


BLOCK = 32
"""Tokens in a row that are taken as one when an interval is computed: neighbours are not independent."""

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Likelihood:
    """One way of attending at one length, over `tokens` predicted ones: the mean NLL in nats and its
    perplexity; `more`: by how much it is above that of dense attention on the same tokens. `attended` and
    `tail_share` are means of the records', None where these have none.
    """

    way: str
    length: int
    tokens: int
    nll: float
    perplexity: float
    more: Estimate
    attended: float | None
    tail_share: float | None


@dataclass(frozen=True)
class Point:
    """One way over a stretch of the text: predicted tokens from `first` to `last`, the mean NLL there, and by
    how much it is above that of dense attention.
    """

    way: str
    first: int
    last: int
    nll: float
    more: Estimate


def likelihoods(results: Results) -> list[Likelihood]:
    """One for each way and length, lengths ascending, ways in the order in which they were measured."""
    found = []
    for length, ways in sorted(_by_length(results).items()):
        for way, records in ways.items():
            ours, dense = _arrays(records), _arrays(ways[DENSE])
            mean = float(np.concatenate(ours).mean())
            found.append(
                Likelihood(
                    way,
                    length,
                    sum(map(len, ours)),
                    mean,
                    math.exp(min(mean, 700.0)),
                    block_mean([own - other for own, other in zip(ours, dense, strict=True)], BLOCK),
                    _mean(record["attended"] for record in records),
                    _mean(record["tail_share"] for record in records),
                )
            )
    return found


def at_chance(found: Sequence[Likelihood]) -> list[str]:
    """A sentence where dense attention predicts no better than how often each token has come before."""
    lost = [each.length for each in found if each.way == UNIGRAM and (each.more.low or 0.0) <= 0]
    if not lost:
        return []
    at = ", ".join(f"{length:,}" for length in lost)
    return [
        f"At {at} tokens this model predicts the text no better than counts of its tokens do ({UNIGRAM}): "
        "nothing here says anything about a selector."
    ]


def curve(results: Results, points: int = 32) -> list[Point]:
    """NLL by position: for each way at most so many stretches of whole chunks, about equally long."""
    found = []
    for ways in _by_length(results).values():
        for way, records in ways.items():
            pairs = sorted(
                zip(records, ways[DENSE], strict=True), key=lambda pair: (pair[0]["first"], pair[0]["place"])
            )
            at = sorted({record["first"] for record in records})
            stretches = np.array_split(np.array(at), min(points, len(at)))
            for stretch in stretches:
                inside = [pair for pair in pairs if stretch[0] <= pair[0]["first"] <= stretch[-1]]
                ours, dense = (_arrays([pair[side] for pair in inside]) for side in (0, 1))
                last = max(record["first"] + len(record["nll"]) - 1 for record, _ in inside)
                more = block_mean([own - other for own, other in zip(ours, dense, strict=True)], BLOCK)
                found.append(Point(way, int(stretch[0]), last, float(np.concatenate(ours).mean()), more))
    return found


def _by_length(results: Results) -> Mapping[int, Mapping[str, list[Record]]]:
    """Records by length and way, those of each way in the order of the units."""
    found: dict[int, dict[str, list[Record]]] = {}
    for record in results.of(NLL):
        _check(record, results)
        found.setdefault(record["length"], {}).setdefault(record["way"], []).append(record)
    for ways in found.values():
        dense = [(record["unit"], len(record["nll"])) for record in ways.get(DENSE, ())]
        for records in ways.values():
            if [(record["unit"], len(record["nll"])) for record in records] != dense:
                raise ConfigError(
                    f"{results.path} was changed: not every way predicts what dense attention does"
                )
    return found


def _check(record: Record, results: Results) -> None:
    """Raises `ConfigError` for a record that is not as `Perplexity` writes it."""
    kinds = {"way": str, "place": int, "length": int, "first": int, "nll": list}
    numbers = record.get("nll") if isinstance(record.get("nll"), list) else []
    proper = all(isinstance(record.get(name), kind) for name, kind in kinds.items())
    shares = [record.get("attended"), record.get("tail_share")]
    if (
        not proper
        or not numbers
        or not all(map(_is_number, [*numbers, *(one for one in shares if one is not None)]))
    ):
        raise ConfigError(
            f"a record '{NLL}' of unit '{record['unit']}' of {results.path} is not whole: the file was "
            "changed or is of another release"
        )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _arrays(records: Iterable[Record]) -> list[Array]:
    return [np.array(record["nll"], np.float64) for record in records]


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None
