"""How likely an answer stands in the stored text, as one number: docs/methods.md §9."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain, pairwise
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from offload_decode.attention.queries import Queries
from offload_decode.common.errors import ConfigError
from offload_decode.engine.citations import WINDOW, AnySelection, Array, Observer, Watch, text_ids
from offload_decode.engine.text import Pieces
from offload_decode.store.reader import KVStore
from offload_decode.types import AttentionState

FIRST = 16
"""Rows whose attention tells: that of the question's last token, and of the answer's first ones."""
AROUND = 24  # tokens that the passage which was attended to has on each side of the window

_WORD = re.compile(r"\w+")


class Signs(NamedTuple):
    """What tells it of an answer.

    attention: the share of a row's attention that is notable and on the text, the mean over the words of the
    answer that the question does not have. found: the share of the question's words that stand in the passage
    which was attended to most, each counted by its tokens: names have more than words that any question has.
    """

    attention: float
    found: float


class Weights(NamedTuple):
    """Of a logistic regression on `Signs`: benchmarks/grounded.py."""

    constant: float
    attention: float
    found: float

    def of(self, signs: Signs) -> float:
        """How likely the answer stands in the text, 0 to 1."""
        logit = self.constant + self.attention * signs.attention + self.found * signs.found
        return 1 / (1 + math.exp(-min(max(logit, -30.0), 30.0)))


WEIGHTS = {("qwen2", 24, 896): Weights(-13.1, 49.3, 6.1)}
"""By a model's type, layers and width: how much attention is notable differs from model to model. Measured
with Qwen2.5-Coder-0.5B-Instruct; others of this shape, as what was trained on from it, are weighed alike.
"""
UNMEASURED = (
    "how grounded an answer is was not measured for this model, or for passages that are read: ask stores of "
    "Qwen2.5 0.5B, without --join read, or leave --only-grounded out"
)


class Evidence:
    """Gathers the signs of one answer to a `question` as it is written: an `Observer`, which passes on what
    it sees to those `beside` it. opening: tokens of the store that are no text.
    """

    whole = False

    def __init__(
        self,
        question: str = "",
        watch: Watch | None = None,
        beside: Sequence[Observer] = (),
        opening: int = 0,
    ):
        self.question, self.watch, self.opening = question, watch, opening
        others = (one.beside if isinstance(one, Evidence) else (one,) for one in beside)
        self.beside: tuple[Observer, ...] = tuple(chain.from_iterable(others))
        self.tokens: list[int] = []
        # Who is to see the next row.
        self.observers: tuple[Observer, ...] = self.beside if watch is None else (self,)
        self._sums = [(0, 0.0)]  # rows of all heads, and their attention to the text, before each token

    def fork(self, beside: Sequence[Observer] | None = None) -> Evidence:
        """That of another answer to the same question, of which nothing is written; None: the same are beside
        it.
        """
        watch = None if self.watch is None else self.watch.fork()
        return Evidence(self.question, watch, self.beside if beside is None else beside, self.opening)

    def see(
        self, layer: int, rows: Tensor, queries: Queries, selection: AnySelection, state: AttentionState
    ) -> None:
        """As `Observer`."""
        for one in (self.watch, *self.beside):
            if one is not None:
                one.see(layer, rows, queries, selection, state)

    def add(self, token: int) -> None:
        """Take the next token of the answer, for which the last row was seen."""
        if self.watch is not None and len(self.tokens) < FIRST:
            self._sums.append((self.watch.rows, float(self.watch.mass[self.opening :].sum())))
        self.tokens.append(token)
        if len(self.tokens) == FIRST:
            self.observers = self.beside

    def cut(self, length: int) -> None:
        """The answer has no more than its first `length` tokens."""
        del self.tokens[length:], self._sums[length + 1 :]

    def signs(self, store: KVStore, tokenizer: Any) -> Signs | None:
        """None where it was not seen what it attended to; an answer of no tokens attended to nothing."""
        if self.watch is None or not self.watch.rows:
            return None
        pieces = Pieces(tokenizer)
        tells = telling([*map(pieces.push, self.tokens)], self.question)
        shares = [
            (mass - before) / max(1, rows - earlier)
            for (earlier, before), (rows, mass) in pairwise(self._sums)
        ]
        told = [share for share, wanted in zip(shares, tells, strict=False) if wanted]
        start, end = passage(self.watch.mass, self.opening)
        text = tokenizer.decode(text_ids(store, tokenizer, start, end))
        return Signs(fmean(told or shares or [0.0]), found(self.question, text, tokenizer))


class Record:
    """Tokens of an answer as they are written behind those `before` it, which are behind the stored ones: of
    each its log-probability, and which token was the `likeliest` in its place, under the model's own
    distribution.
    """

    def __init__(self, before: Iterable[int]):
        self.before = list(before)
        self.tokens: list[int] = []
        self.likeliest: list[int] = []
        self.logs: list[float] = []

    def add(self, token: int, logits: Tensor) -> None:
        """Take the next token, which comes from `logits [V]`."""
        self.tokens.append(token)
        self.likeliest.append(int(logits.argmax()))
        self.logs.append(float(logits[token] - logits.logsumexp(-1)))

    def cut(self, length: int) -> None:
        """The answer has no more than its first `length` tokens."""
        del self.tokens[length:], self.likeliest[length:], self.logs[length:]


def kind_of(config: Any) -> tuple[str, int, int]:
    """What `WEIGHTS` knows a model by, from its config of transformers."""
    own = config.get_text_config()
    return own.model_type, own.num_hidden_layers, own.hidden_size


def weights_of(config: Any) -> Weights | None:
    """Those of a model, where it was measured."""
    return WEIGHTS.get(kind_of(config))


def check_measured(config: Any) -> None:
    """Raise `ConfigError` for a model with which it was not measured how grounded an answer is."""
    if weights_of(config) is None:
        raise ConfigError(UNMEASURED)


def telling(answer: Sequence[str], question: str) -> list[bool]:
    """Which tokens of an answer, each as the text that it adds, belong to words that the question does not
    have; all of them where none does. What an answer repeats says nothing of where it comes from.
    """
    asked = words(question)
    starts = accumulate(map(len, answer), initial=0)
    spans = [word.span() for word in _WORD.finditer("".join(answer)) if word[0].lower() not in asked]
    which = [any(first < end and start < last for first, last in spans) for start, end in pairwise(starts)]
    return which if any(which) else [True] * len(which)


def passage(mass: Array, opening: int) -> tuple[int, int]:
    """The window of tokens that holds the most of `mass [N]` behind the opening, with some around it."""
    tokens = np.flatnonzero(mass[opening:]) + opening
    if not len(tokens):
        return opening, opening
    sums = np.concatenate([[0.0], mass[tokens].cumsum()])
    ends = np.searchsorted(tokens, tokens + WINDOW)
    first = int((sums[ends] - sums[:-1]).argmax())
    return max(opening, int(tokens[first]) - AROUND), int(tokens[ends[first] - 1]) + 1 + AROUND


def found(question: str, text: str, tokenizer: Any) -> float:
    """The share of the question's words that stand in a text, each counted by its tokens."""
    there, counts = words(text), dict[str, int]()
    for word in words(question):
        counts[word] = len(tokenizer(f" {word}", add_special_tokens=False)["input_ids"])
    return sum(count for word, count in counts.items() if word in there) / max(1, sum(counts.values()))


def words(text: str) -> set[str]:
    """The words of a text, in small letters."""
    return set(_WORD.findall(text.lower()))
