"""Requests that share a prefix, run behind it: continuations are scored, answers are written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from offload_decode.engine.conversation import Conversation
from offload_decode.engine.joint import LOGITS, Turn, run_turns
from offload_decode.models.processors import Processors
from offload_decode.prefill_jobs.lm_eval.prefixes import Tokens

T = TypeVar("T")


class Scoring(NamedTuple):
    """How likely is this `continuation` (one token or more) of the `context` (one token or more)?"""

    context: Tokens
    continuation: Sequence[int]


class Writing(NamedTuple):
    """What follows the `context`: at most `most` tokens, up to a stop string. `asked`: what else
    `model.generate` is told.
    """

    context: Tokens
    most: int
    stops: Sequence[str]
    asked: Mapping[str, Any]


class Score(NamedTuple):
    """The log-probability of a continuation (natural), and whether greedy decoding writes it."""

    logprob: float
    greedy: bool


def scores(
    start: Conversation, stored: int, requests: Sequence[Scoring], batch: int
) -> Iterator[tuple[int, Score]]:
    """The places of the requests, with their scores. All contexts begin with the `stored` tokens that stand
    before `start`; a context that several requests have in common is run once, and `batch` requests run in
    one pass where the selector allows it.
    """
    alike: dict[bytes, list[int]] = {}
    for place, request in enumerate(requests):
        alike.setdefault(request.context.tobytes(), []).append(place)
    for some in _batches(alike.values(), batch):
        turns = [Turn(start.fork(), requests[places[0]].context[stored:].tolist()) for places in some]
        ready = [
            _Scored(place, turn.conversation, logits, requests[place].continuation)
            for turn, logits, places in zip(turns, run_turns(turns), some, strict=True)
            for place in places
        ]
        for together in _batches(ready, batch):
            yield from _scored(together)


@dataclass(eq=False)
class _Scored:
    """A continuation of which `done` tokens are scored; `logits [V]` are those of the next."""

    place: int
    conversation: Conversation
    logits: Tensor
    continuation: Sequence[int]
    done: int = 0
    logprob: float = 0.0
    greedy: bool = True

    def take(self, logits: Tensor) -> None:
        """Score as many tokens as there are rows of `logits [T, V]`."""
        tokens = torch.tensor(self.continuation[self.done : self.done + len(logits)], device=logits.device)
        own = logits.log_softmax(-1).gather(-1, tokens[:, None])
        self.logprob += float(own.double().sum())
        self.greedy = self.greedy and bool((logits.argmax(-1) == tokens).all())
        self.done += len(logits)


def _scored(together: Sequence[_Scored]) -> Iterator[tuple[int, Score]]:
    for one in together:
        one.take(one.logits[None])
    left = [one for one in together if one.done < len(one.continuation)]
    for one in left:
        one.conversation = one.conversation.fork()
    while left:
        # Of a long continuation, as many logits at once as a pass makes at most.
        size = max(1, LOGITS // (len(left) * left[0].logits.shape[-1]))
        turns = [
            Turn(one.conversation, one.continuation[one.done - 1 : -1][:size], every=True) for one in left
        ]
        for one, logits in zip(left, run_turns(turns), strict=True):
            one.take(logits)
        left = [one for one in left if one.done < len(one.continuation)]
    for one in together:
        yield one.place, Score(one.logprob, one.greedy)


def answers(
    start: Conversation, stored: int, requests: Sequence[Writing], batch: int
) -> Iterator[tuple[int, list[int]]]:
    """The places of the requests, with the tokens of their answers, in batches as `scores` runs them. An end
    token is not among them; a stop string is.
    """
    for some in _batches(range(len(requests)), batch):
        turns = [Turn(start.fork(), requests[place].context[stored:].tolist()) for place in some]
        going = [
            _Written(place, turn.conversation, requests[place])
            for turn, place in zip(turns, some, strict=True)
        ]
        running = going
        while running:
            logits = run_turns(turns)
            running = [one for one, row in zip(running, logits, strict=True) if one.goes_on(row)]
            turns = [Turn(one.conversation, one.tokens[-1:]) for one in running]
        for one in going:
            yield one.place, one.tokens


@dataclass(eq=False)
class _Written:
    """An answer on its way."""

    place: int
    conversation: Conversation
    request: Writing
    tokens: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        own, request = self.conversation, self.request
        self._processors = Processors(
            own.loaded.model,
            own.tokenizer,
            request.context.tolist(),
            own.end_tokens,
            request.most,
            request.asked,
        )
        # Where the last tokens spell a stop string: it may begin and end within a token.
        self._looked_back = [
            (stop, len(own.tokenizer.encode(stop, add_special_tokens=False)) + 2) for stop in request.stops
        ]

    def goes_on(self, logits: Tensor) -> bool:
        """Take the next token from `logits [V]`; whether one is to follow it."""
        changed = self._processors(logits)
        if self._processors.samples:
            token = int(torch.multinomial(changed.softmax(-1), 1))
        else:
            token = int(changed.argmax(-1))
        if token in self.conversation.end_tokens:
            return False
        self.tokens.append(token)
        if self._processors.append(token) or len(self.tokens) == self.request.most:
            return False
        tokenizer = self.conversation.tokenizer
        return not any(stop in tokenizer.decode(self.tokens[-length:]) for stop, length in self._looked_back)


def _batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    left = iter(items)
    while some := list(islice(left, size)):
        yield some
