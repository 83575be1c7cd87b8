"""One answer from several stores: at each step the next-token distributions of the conversations behind them
are joined, one token is picked, and all of them go on from it.

Every store stays the exact prefix of its own conversation. What is joined is not attention to all documents
in one context: a fact that takes two of them is in none of the distributions (`reading` is for those).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from offload_decode.common.errors import ConfigError
from offload_decode.engine.batching import Turn, run_turns
from offload_decode.engine.citations import LEAST, Watch
from offload_decode.engine.conversation import Conversation, Sampler
from offload_decode.engine.engine import without_corpus
from offload_decode.models.loading import Processors
from offload_decode.types import Answer, CitedDocument, StepStats

BETA, GAMMA = 0.25, 2.5
"""Of `pced`: how much the model without a document is taken off, and how much the weights count."""
LIGHTEST = 1e-3
"""A document with less weight drops out: leaving it out changes the mixture by no more than its weight, in
total variation.
"""


def mixture(logs: Tensor, weights: Tensor, alone: Tensor | None) -> Tensor:
    """log Σ w p: of log-probabilities `[K, V]` and log-weights `[K]` one row `[V]`."""
    return (logs + weights[:, None]).logsumexp(0)


def product(logs: Tensor, weights: Tensor, alone: Tensor | None) -> Tensor:
    """Σ w log p, up to a constant."""
    return weights.exp() @ logs


def pced(logs: Tensor, weights: Tensor, alone: Tensor | None) -> Tensor:
    """max (1 + β) log p - β log p_alone + γ log w, up to a constant, where p_alone `[V]` is that of the model
    without a document (arXiv 2601.08670).
    """
    assert alone is not None, "its conversation runs with the others"
    best = ((1 + BETA) * logs + GAMMA * weights[:, None]).amax(0)
    return torch.where(best > -torch.inf, best - BETA * alone, best)


T = TypeVar("T")
WAYS: Mapping[str, Callable[[Tensor, Tensor, Tensor | None], Tensor]] = {
    "mixture": mixture,
    "product": product,
    "pced": pced,
}


class Carried(NamedTuple):
    """A token of an answer, and what each document gave to its probability: w p / Σ w p."""

    token: int
    shares: tuple[float, ...]


class Joint:
    """Conversations behind different stores of one model, which answer together.

    A document's weight begins as it is given with each question, and is multiplied after each token by the
    probability that the document gave it: one in which nothing is found loses weight. Below `LIGHTEST` it
    drops out, until the next question. `carried`: the tokens of the last answer; `finish`: why it ended.
    `cites`: what is attended to is watched, for `citations`.

    Raises `ConfigError` for conversations of several models, and for an unknown way.
    """

    def __init__(self, talks: Sequence[Conversation], way: str = "mixture", cites: bool = False):
        if way not in WAYS:
            raise ConfigError(f"there is no way '{way}' to join answers: choose {', '.join(WAYS)}")
        if not talks:
            raise ConfigError("no store is given to answer from: give one or more")
        if any(talk.loaded is not talks[0].loaded for talk in talks):
            raise ConfigError(
                "the stores are of several models, whose tokens differ: give stores of one model"
            )
        self.talks, self.way, self.cites = [talk.fork() for talk in talks], way, cites
        # The model that sees the question alone, for `pced`.
        self._rows = [*self.talks, *([behind_text(talks[0], "")] if way == "pced" else [])]
        self.weights = torch.zeros(len(talks))  # logarithms, of the documents at work
        self.working = list(range(len(talks)))  # the documents that have not dropped out
        self.watches: list[Watch] = []
        self.carried: list[Carried] = []
        self.finish, self._begun = "stop", False

    def fork(self) -> Self:
        """An independent continuation from here, without what the last answer was `carried` by."""
        forked = type(self)(self.talks, self.way, self.cites)
        forked._rows = [row.fork() for row in self._rows]
        forked.talks, forked._begun = forked._rows[: len(self.talks)], self._begun
        forked.weights, forked.working = self.weights, list(self.working)
        return forked

    def answer(
        self,
        question: str,
        weights: Sequence[float] | None = None,
        max_new_tokens: int = 128,
        sampler: Sampler | None = None,
    ) -> Answer:
        """Answer a question; the conversation goes on from there. `weights` as for `ask`."""
        tokens = tuple(self.tokens(question, weights, max_new_tokens, sampler))
        cited = self.citations() if self.cites else None
        return Answer(self.talks[0].decode(tokens).strip(), tokens, self.take_stats(), self.finish, cited)

    def stream(
        self,
        question: str,
        weights: Sequence[float] | None = None,
        max_new_tokens: int = 128,
        sampler: Sampler | None = None,
    ) -> Iterator[str]:
        """An answer piece by piece, as it comes."""
        return self.talks[0].pieces(self.tokens(question, weights, max_new_tokens, sampler))

    def tokens(
        self, question: str, weights: Sequence[float] | None, max_new_tokens: int, sampler: Sampler | None
    ) -> Iterator[int]:
        """Token ids of an answer: `ask`, and `generate` from there."""
        yield from self.generate(self.ask(question, weights), max_new_tokens, sampler)

    def ask(self, question: str, weights: Sequence[float] | None = None) -> Tensor:
        """Put a question to all: the logits after it, `[K, V]` of the K documents at work (and a row of the
        model alone, for `pced`). `weights`: how well each document speaks to it, 0 where it does not, but not
        for all of them (None: all alike).

        Raises `ConfigError` for other weights, and `ContextEnds`.
        """
        given = torch.ones(len(self.talks)) if weights is None else torch.tensor(weights, dtype=torch.float)
        fits = given.shape == (len(self.talks),) and bool(((given >= 0) & (given < torch.inf)).all())
        if not fits or not given.any():
            raise ConfigError(
                "each document needs a weight of 0 or more, and one of them a weight above 0: give as many "
                "as there are documents"
            )
        turns = [Turn(talk, self.question_tokens(question, talk)) for talk in self._rows]
        for talk, tokens, _ in turns:
            talk.check_room(len(tokens))
            talk.selector.reset()
        self.watches = [Watch(talk.prefix.host) for talk in self.talks] if self.cites else []
        for talk, watch in zip(self.talks, self.watches, strict=False):
            talk.prefix.watches = (watch,)
        self.working = list(range(len(self.talks)))
        self._weigh(given.log().to(self.talks[0].loaded.device))
        logits = torch.stack(run_turns(self._at_work(turns)))
        for place in set(range(len(self.talks))) - set(self.working):
            _follow(*turns[place][:2])
        self._begun = True
        return logits

    def generate(self, logits: Tensor, max_new_tokens: int, sampler: Sampler | None = None) -> Iterator[int]:
        """Token ids from the logits of `ask` on, until an end token or, without a chat template, the next
        question (neither is yielded), `max_new_tokens`, or the last position that one of the stores serves.
        """
        first, sampler, most = self.talks[0], sampler or Sampler(), self.most_new(max_new_tokens)
        model, tokenizer, ends = first.loaded.model, first.loaded.tokenizer, first.end_tokens
        obeyed = [Processors(model, tokenizer, talk.tokens + talk.pending, ends, most) for talk in self._rows]
        answer, self.carried, self.finish = first.answer_end(), [], "length"
        for step in range(most):
            changed = [obeys(own) for obeys, own in zip(self._at_work(obeyed), logits, strict=True)]
            logs = torch.stack(changed).log_softmax(-1)
            token = int(sampler(self.joined(logs)[None]))
            if token in ends:
                self.finish = "stop"
                break
            self._weigh_by(token, logs)
            self.follow([token])
            yield from answer.push(token)
            stopped = [obeys.append(token) for obeys in obeyed]  # all of them take note of it
            if any(stopped) or answer.reached:
                self.finish = "stop"
                break
            if step + 1 < most:
                logits = torch.stack(run_turns([Turn(talk, ()) for talk in self._at_work(self._rows)]))
        if answer.reached:
            del self.carried[len(self.carried) - answer.dropped :]
            for talk in self._rows:
                talk.take_back(answer.dropped)
        yield from answer.rest()

    def joined(self, logs: Tensor) -> Tensor:
        """The joined scores `[V]` of the next token, from the log-probabilities of the rows of `ask`."""
        documents = len(self.working)
        alone = logs[documents] if len(logs) > documents else None
        return WAYS[self.way](logs[:documents], self.weights, alone)

    def question_tokens(self, question: str, talk: Conversation) -> list[int]:
        """Token ids of a question as it is put here."""
        put = talk.prompt.next if self._begun else talk.prompt.first
        return put(talk.tokenizer, question)

    def follow(self, tokens: Sequence[int]) -> None:
        """All conversations go on with these tokens, which are run with what comes next."""
        for talk in self._rows:
            _follow(talk, tokens)
        self._begun = True

    def most_new(self, tokens: int) -> int:
        """So many tokens of an answer, or fewer where the context of one of the stores ends."""
        return min(talk.most_new(tokens) for talk in self._rows)

    def shares(self) -> list[float]:
        """What each document gave to the last answer, from 0 to 1: the mean over its tokens."""
        totals = [sum(own) for own in zip(*(one.shares for one in self.carried), strict=True)]
        return [total / len(self.carried) for total in totals] or [0.0] * len(self.talks)

    def citations(self) -> tuple[CitedDocument, ...]:
        """The documents that gave most to the last answer, with the passages that they attended to. Raises as
        `cite`.
        """
        found = []
        for talk, watch, share in zip(self.talks, self.watches, self.shares(), strict=True):
            cited = talk.cited(watch) if share >= LEAST else ()
            found += [replace(one, share=one.share * share) for one in cited]
        return tuple(sorted(found, key=lambda one: -one.share))

    def attended(self) -> list[CitedDocument]:
        """The documents that were asked, in their order, with the passages that each attended to."""
        asked = [both for both in zip(self.talks, self.watches, strict=True) if both[1].rows]
        return [one for talk, watch in asked for one in talk.cited(watch)]

    def take_stats(self) -> StepStats:
        """The costs of all conversations since they were last taken."""
        stats = StepStats()
        for talk in self._rows:
            stats.add(talk.prefix.take_stats())
        return stats

    def _at_work(self, rows: Sequence[T]) -> list[T]:
        """Of one for each conversation, those that still run."""
        return [*(rows[place] for place in self.working), *rows[len(self.talks) :]]

    def _weigh_by(self, token: int, logs: Tensor) -> None:
        """Weigh the documents at work by the probability that each gave to a token."""
        weights = self.weights + logs[: len(self.working), token]
        shares = torch.zeros(len(self.talks))
        shares[self.working] = weights.softmax(0).cpu()
        self.carried.append(Carried(token, tuple(shares.tolist())))
        self._weigh(weights)

    def _weigh(self, weights: Tensor) -> None:
        """Take the log-weights of those at work, of whom the lightest drop out."""
        weights = weights.log_softmax(0)
        kept = weights >= min(math.log(LIGHTEST), float(weights.max()))
        self.working = [place for place, stays in zip(self.working, kept.tolist(), strict=True) if stays]
        self.weights = weights[kept].log_softmax(0)


def _follow(talk: Conversation, tokens: Sequence[int]) -> None:
    talk.pending = [*talk.pending, *tokens]


def behind_text(talk: Conversation, text: str) -> Conversation:
    """A conversation of the same model with a text before it, which is run with what comes next."""
    other = without_corpus(talk.loaded)
    other.pending = talk.prompt.document(talk.tokenizer, text, first=True)
    return other
