"""Negative log-likelihood of what follows a stored prefix, by selector and budget, beside dense attention.

Of `tokens [M + 1]` the first M are run and the last M predicted, whatever a model would have said in their
place: what follows the last stored token is not known of a store, so that the first is run and not predicted.
docs/evaluation.md says what is stored, run and predicted.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field
from torch import Tensor

from offload_decode.common.errors import ConfigError
from offload_decode.engine.conversation import Conversation
from offload_decode.engine.engine import Engine, without_corpus
from offload_decode.evals.contender import DENSE, Contender
from offload_decode.evals.haystack import Haystack
from offload_decode.evals.recorded_queries import AttentionDemand, forced_passes
from offload_decode.evals.runs import Count, Number, Record, Results, Text, Unit, grouped
from offload_decode.evals.stats import Estimate, block_mean
from offload_decode.models.loading import LoadedModel
from offload_decode.models.prompt import encode_text, opening_of
from offload_decode.store.reader import KVStore

Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Forced:
    """`nll [M]`, float64, in nats; `attended`: stored tokens a query of a searched layer; `tail_share`:
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
        return _run(engine, tokens)
    prefix = AttentionDemand(engine.prefix)
    conversation = Conversation(loaded, store, prefix)
    shares: list[Tensor] = []

    def ran() -> None:
        shares.extend(share.flatten() for _, share in prefix.take(conversation.cache))

    return replace(_run(conversation, tokens, ran), tail_share=float(torch.cat(shares).mean()))


def behind_window(loaded: LoadedModel, window: Tokens, tokens: Tokens) -> Forced:
    """Tokens behind `window [W]`, which the bare model reads as the beginning of a text."""
    conversation = without_corpus(loaded, len(window) + len(tokens))
    if len(window):
        conversation.extend(window.tolist())
    return _run(conversation, tokens)


def _run(conversation: Conversation, tokens: Tokens, ran: Callable[[], None] = lambda: None) -> Forced:
    """Run the tokens; `ran` is called after each pass."""
    parts, expected = [], torch.from_numpy(tokens[1:]).long()
    for logits in forced_passes(conversation, tokens[:-1].tolist()):
        own, expected = expected[: len(logits)].to(logits.device), expected[len(logits) :]
        parts.append(torch.nn.functional.cross_entropy(logits.double(), own, reduction="none"))
        ran()
    stats = conversation.prefix.take_stats()
    return Forced(torch.cat(parts).cpu().numpy(), stats.selected / max(1, stats.rows))


NLL = "nll"
UNIGRAM = "unigram"  # the way that is no model: how often a token has come so far, each once more
DECIMALS = 5  # nats that are kept of a token: far more than the rounding of float16 weights


GrownStore = Callable[[Tokens, Callable[[int], None]], KVStore]
"""Gives the store of `tokens [N]`, there until the next call, and reports the tokens done: the last store is
made longer where that holds their beginning.
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
        # Dense attention first: what all others are compared with.
        others = [contender for contender in plan.contenders if contender.selector != DENSE]
        self._contenders = [Contender(DENSE), *others]

    def configuration(self) -> Mapping[str, Any]:
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
        step = self._steps[unit.key]
        text = self._texts[step.place]
        before, tokens = text[: step.stored], text[step.stored : step.end]
        if step.stored:
            known = step.stored - unit.tokens
            store = self._grown(before, lambda done: report(max(0, done - known)))
            ways = {one.label: behind_store(self._loaded, store, one, tokens) for one in self._contenders}
        else:
            bare = behind_window(self._loaded, before, tokens)
            ways = {contender.label: bare for contender in self._contenders}
        no_store = {
            f"window:{window}": behind_window(self._loaded, self._window(before, window), tokens)
            for window in self._plan.windows
        }
        no_store[UNIGRAM] = Forced(unigram(text[: step.end], step.stored + 1, self._vocabulary), 0.0)
        return [
            {
                "record": NLL,
                "way": way,
                "place": step.place,
                "length": step.length,
                "stored_tokens": step.stored,
                "first": step.stored + 1,
                "nll": [round(value, DECIMALS) for value in forced.nll.tolist()],
                "attended": None if way in no_store else forced.attended,
                "tail_share": forced.tail_share,
            }
            for way, forced in {**ways, **no_store}.items()
        ]

    def _window(self, before: Tokens, window: int) -> Tokens:
        """The last tokens, behind what the tokenizer puts before any text."""
        if len(before) <= window:
            return before
        opening = np.array(self._opening[:window], np.int32)
        return np.concatenate([opening, before[len(before) - (window - len(opening)) :]])


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
            "or fewer places, a smaller chunk or shorter lengths"
        )
    starts = [place * step for place in range(plan.places)]
    return [np.array([*opening, *ids[start : start + own]], np.int32) for start in starts]


BLOCK = 32  # tokens in a row are one value of an interval: neighbours are not independent


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
    """One way over a stretch of the text: predicted tokens from `first` to `last`, and the mean NLL there."""

    way: str
    first: int
    last: int
    nll: float


@dataclass(frozen=True)
class NllRecord:
    """As `Perplexity` writes it."""

    unit: Text
    way: Text
    place: Count
    length: Count
    first: Count
    nll: Annotated[list[Number], Field(min_length=1)]
    attended: Number | None
    tail_share: Number | None


def likelihoods(results: Results) -> list[Likelihood]:
    """One for each way and length, lengths ascending, ways in the order in which they were measured."""
    found = []
    for length, ways in sorted(_by_length(results).items()):
        for way, records in ways.items():
            mean, more = _nll(records, ways[DENSE])
            attended = [record.attended for record in records if record.attended is not None]
            shares = [record.tail_share for record in records if record.tail_share is not None]
            found.append(
                Likelihood(
                    way=way,
                    length=length,
                    tokens=sum(len(record.nll) for record in records),
                    nll=mean,
                    perplexity=math.exp(min(mean, 700.0)),
                    more=more,
                    attended=fmean(attended) if attended else None,
                    tail_share=fmean(shares) if shares else None,
                )
            )
    return found


def _nll(records: Sequence[NllRecord], dense: Sequence[NllRecord]) -> tuple[float, Estimate]:
    """The mean, and by how much it is above that of dense attention."""
    ours, others = ([np.array(record.nll) for record in own] for own in (records, dense))
    more = block_mean([own - other for own, other in zip(ours, others, strict=True)], BLOCK)
    return float(np.concatenate(ours).mean()), more


def curve(results: Results, points: int = 32) -> list[Point]:
    """NLL by position: for each way at most so many stretches of whole chunks, about equally long."""
    found = []
    for ways in _by_length(results).values():
        for way, records in ways.items():
            chunks = grouped(sorted(records, key=lambda record: record.first), lambda record: record.first)
            for stretch in np.array_split(list(chunks), min(points, len(chunks))):
                own = [record for at in stretch for record in chunks[at]]
                last = max(record.first + len(record.nll) - 1 for record in own)
                mean = fmean(nats for record in own for nats in record.nll)
                found.append(Point(way, int(stretch[0]), last, mean))
    return found


def _by_length(results: Results) -> Mapping[int, Mapping[str, list[NllRecord]]]:
    """Records by length and way, those of each way in the order of the units."""
    by_length = grouped(results.typed(NLL, NllRecord), lambda record: record.length)
    found = {length: grouped(records, lambda record: record.way) for length, records in by_length.items()}
    for ways in found.values():
        measured = {
            way: [(record.unit, len(record.nll)) for record in records] for way, records in ways.items()
        }
        if any(own != measured.get(DENSE) for own in measured.values()):
            raise ConfigError(f"{results.path} was changed: not every way predicts what dense attention does")
    return found
