"""Negative log-likelihood of what follows a stored prefix, by selector and budget, beside dense attention.

docs/evaluation.md says what is stored, run and predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from offload_decode.errors import ConfigError
from offload_decode.evals.contender import DENSE, Contender
from offload_decode.evals.haystack import Haystack
from offload_decode.evals.results import Record
from offload_decode.evals.runs import Unit
from offload_decode.evals.teacher_forced import Forced, Tokens, behind_store, behind_window
from offload_decode.models.loading import LoadedModel
from offload_decode.models.pieces import encode_text
from offload_decode.models.prompt import opening_of
from offload_decode.store.reader import KVStore

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
        """Tokens of a text, stored and foretold, at most."""
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
