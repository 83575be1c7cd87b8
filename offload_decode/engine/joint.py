"""One answer from several stores: at each step the next-token distributions of the conversations behind them
are joined, one token is picked, and all of them go on from it.

Every store stays the exact prefix of its own conversation. What is joined is not attention to all documents
in one context: a fact that takes two of them is in none of the distributions (`reading` is for those).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from offload_decode.common.errors import ConfigError
from offload_decode.engine.batching import Turn, run_turns
from offload_decode.engine.citations import LEAST, Watch
from offload_decode.engine.conversation import Conversation, Sampler
from offload_decode.engine.engine import without_corpus
from offload_decode.engine.grounded import Evidence
from offload_decode.engine.opinion_pools import WAYS
from offload_decode.engine.text import Pieces
from offload_decode.models.loading import LoadedModel, Processors
from offload_decode.types import Answer, CitedDocument, StepStats

HEARD, SURE, DOUBTED = 0.1, 0.3, 0.1
"""A document dissents if it has at least so much weight, finds a token at least so likely, and the one that
is said at most so likely (benchmarks/contradictions.py).
"""
LIGHTEST = 1e-3
"""A document with no more weight drops out: leaving it out changes the mixture by no more than its weight, in
total variation.
"""


T = TypeVar("T")


class Carried(NamedTuple):
    """A token of an answer, and what each document gave to its probability: w p / Σ w p."""

    token: int
    shares: tuple[float, ...]


class Dissent(NamedTuple):
    """A document that would have gone on otherwise: the `text` of the answer so far, and in place of the next
    token the one that this document finds the likeliest, with its `probability`.
    """

    document: int
    text: str
    probability: float


class Joint:
    """Conversations behind different stores of one model, which answer together.

    A document's weight begins as it is given with each question, and is multiplied after each token by the
    probability that the document gave it: one in which nothing is found loses weight. Below `LIGHTEST` it
    then drops out, until the next question. `carried`: the tokens of the last answer; `finish`: why it ended.
    `cites`: what is attended to is watched, for `citations`.

    `answer` runs its own passes; who packs them with others (`server`) begins a question, runs each row of
    `at_work` through its tokens, and from then on asks for `scores`, takes a token and runs the `turns`.

    Raises `ConfigError` for conversations of several models, and for an unknown way.
    """

    def __init__(self, talks: Sequence[Conversation], way: str = "mixture", cites: bool = False):
        if way not in WAYS:
            raise ConfigError(f"there is no way '{way}' to join answers: choose {', '.join(WAYS)}")
        if not talks:
            raise ConfigError("no store is given to answer from: give one or more")
        check_alike([talk.loaded for talk in talks])
        self.talks, self.way, self.cites = [talk.fork() for talk in talks], way, cites
        # The model that sees the question alone, for `pced`: behind the prompt's opening.
        alone = [behind_text(talks[0], "")] if way == "pced" else []
        self.rows = [*self.talks, *alone]
        self._opened = [0] * len(talks) + [len(row.pending) for row in alone]
        self.weights = torch.zeros(len(talks))  # logarithms, of the documents at work
        self.working = list(range(len(talks)))  # the documents that have not dropped out
        self.watches: list[Watch] = []
        self.evidences: list[Evidence] = []  # of the last answer in each document
        self.carried: list[Carried] = []
        self._dissents: dict[int, tuple[int, int, float]] = {}  # tokens before, its token, how likely that is
        self.finish, self.asked = "stop", 0  # so many questions were put
        self.gone: Callable[[], bool] = lambda: False
        self.stored = 0.0  # tokens before a row of attention, in the mean, of `take_stats`
        self._obeyed: list[Processors] = []  # of the answer that is being written, one a row
        self._logs = torch.empty(0)  # of the last `scores`

    def fork(self) -> Self:
        """An independent continuation from here, without what the last answer was `carried` by."""
        forked = type(self)(self.talks, self.way, self.cites)
        forked.rows = [row.fork() for row in self.rows]
        forked.talks, forked.asked = forked.rows[: len(self.talks)], self.asked
        forked.weights, forked.working = self.weights, list(self.working)
        forked.watches = [watch.fork() for watch in self.watches]
        forked.evidences = [
            own.fork(forked.watches[place : place + 1]) for place, own in enumerate(self.evidences)
        ]
        forked.look()
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
        cited, text = self.citations() if self.cites else None, self.talks[0].decode(tokens).strip()
        return Answer(text, tokens, self.take_stats(), self.finish, cited, self.grounded)

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
        for all of them (None: all alike). Who has any weight is asked, and may drop out after a token.

        Raises `ConfigError` for other weights, and `ContextEnds`.
        """
        turns = [Turn(talk, self.question_tokens(question, talk)) for talk in self.rows]
        for talk, tokens, _ in turns:
            talk.check_room(len(tokens))
        self.begin(question, weights)
        self.look()
        logits = torch.stack(run_turns(self.at_work(turns)))
        for place in set(range(len(self.talks))) - set(self.working):
            _follow(*turns[place][:2])
        self.asked += 1
        return logits

    def begin(self, question: str, weights: Sequence[float] | None = None) -> None:
        """Take up a question, before it is run: `weights` as for `ask`; nobody `look`s yet. Raises
        `ConfigError`.
        """
        given = torch.ones(len(self.talks)) if weights is None else torch.tensor(weights, dtype=torch.float)
        fits = given.shape == (len(self.talks),) and bool(((given >= 0) & (given < torch.inf)).all())
        if not fits or not given.any():
            raise ConfigError(
                "each document needs a weight of 0 or more, and one of them a weight above 0: give as many "
                "as there are documents"
            )
        for talk in self.rows:
            talk.selector.reset()
        self.watches = [Watch(talk.prefix.host) for talk in self.talks] if self.cites else []
        self.evidences = [
            talk.evidence_of(question, self.watches[place : place + 1])
            for place, talk in enumerate(self.talks)
        ]
        self.working, self.carried = list(range(len(self.talks))), []
        self._weigh(given.log().to(self.talks[0].loaded.device), least=-torch.inf)

    def generate(self, logits: Tensor, max_new_tokens: int, sampler: Sampler | None = None) -> Iterator[int]:
        """Token ids from the logits of `ask` on, until an end token or, without a chat template, the next
        question (neither is yielded), `max_new_tokens`, or the last position that one of the stores serves.
        """
        first, sampler, most = self.talks[0], sampler or Sampler(), self.most_new(max_new_tokens)
        self.prepare(most)
        answer, self.finish = first.answer_end(), "length"
        for step in range(most):
            token = int(sampler(self.scores(logits)[None]))
            if token in first.end_tokens:
                self.finish = "stop"
                break
            stopped = self.take(token)
            yield from answer.push(token)
            if stopped or answer.reached:
                self.finish = "stop"
                break
            if step + 1 < most:
                logits = torch.stack(run_turns(self.turns()))
        if answer.reached:
            self.cut(len(self.carried) - answer.dropped)
            for talk in self.rows:
                talk.take_back(answer.dropped)
        yield from answer.rest()

    def prepare(self, most: int) -> None:
        """Before an answer of so many tokens at most: what the model's `generation_config` asks of each."""
        first, self.carried, self._dissents = self.talks[0], [], {}
        model, tokenizer, ends = first.loaded.model, first.loaded.tokenizer, first.end_tokens
        # In each row the same tokens are before the answer: the opening of the prompt is in the stores.
        before = [
            (talk.tokens + talk.pending)[opened:]
            for talk, opened in zip(self.rows, self._opened, strict=True)
        ]
        self._obeyed = [Processors(model, tokenizer, own, ends, most) for own in before]

    def scores(self, logits: Tensor) -> Tensor:
        """The joined scores `[V]` of the next token, from the logits `[K, V]` of the rows at work."""
        obeyed = self.at_work(self._obeyed)
        changed = [obeys(own) for obeys, own in zip(obeyed, logits, strict=True)]
        self._logs = torch.stack(changed).log_softmax(-1)
        return self.joined(self._logs)

    def take(self, token: int) -> bool:
        """All go on with a token that was picked by the last `scores`; whether the answer ends with it."""
        for place in self.working:
            self.evidences[place].add(token)
        self._hear(token)
        self._weigh_by(token, self._logs)
        self.look()
        self.follow([token])
        stops = [obeys.append(token) for obeys in self._obeyed]  # all of them take note of it
        return any(stops)

    def cut(self, length: int) -> None:
        """The last answer has no more than its first `length` tokens."""
        del self.carried[length:]
        for evidence in self.evidences:
            evidence.cut(length)

    def turns(self) -> list[Turn]:
        """What is to be run after a token."""
        return [Turn(talk, ()) for talk in self.at_work(self.rows)]

    def joined(self, logs: Tensor) -> Tensor:
        """The joined scores `[V]` of the next token, from the log-probabilities of the rows of `ask`."""
        documents = len(self.working)
        alone = logs[documents] if len(logs) > documents else None
        return WAYS[self.way](logs[:documents], self.weights, alone)

    def question_tokens(self, question: str, talk: Conversation) -> list[int]:
        """Token ids of a question as it is put here."""
        put = talk.prompt.next if self.asked else talk.prompt.first
        return put(talk.tokenizer, question)

    def follow(self, tokens: Sequence[int]) -> None:
        """All conversations go on with these tokens, which are run with what comes next."""
        for talk in self.rows:
            _follow(talk, tokens)

    def most_new(self, tokens: int) -> int:
        """So many tokens of an answer, or fewer where the context of one of the stores ends."""
        return min(talk.most_new(tokens) for talk in self.rows)

    def shares(self) -> list[float]:
        """What each document gave to the last answer, from 0 to 1: the mean over its tokens."""
        totals = [sum(own) for own in zip(*(one.shares for one in self.carried), strict=True)]
        return [total / len(self.carried) for total in totals] or [0.0] * len(self.talks)

    def leading(self) -> int:
        """The document that gave most to the last answer, or has the most weight where nothing was said."""
        if not self.carried:
            return self.working[int(self.weights.argmax())]
        shares = self.shares()
        return shares.index(max(shares))

    @property
    def dissents(self) -> list[Dissent]:
        """The documents that would have said otherwise than the last answer, each where it first would, in
        whole characters.
        """
        tokenizer, said = self.talks[0].tokenizer, [one.token for one in self.carried]
        return [
            Dissent(document, "".join(map(Pieces(tokenizer).push, [*said[:before], token])), probability)
            for document, (before, token, probability) in self._dissents.items()
            if before < len(said)
        ]

    @property
    def grounded(self) -> float | None:
        """How likely the last answer stands in the document that gave most to it, 0 to 1; None where that is
        not known (`Conversation.grounds`).
        """
        if not self.evidences:
            return None
        leading = self.leading()
        return self.talks[leading].grounds(self.evidences[leading])

    def look(self, row: int | None = None) -> None:
        """Let what a document's conversation (None: that of each) attends to from here on be seen."""
        for place, evidence in enumerate(self.evidences):
            if row in (None, place):
                self.talks[place].prefix.watches = evidence.observers

    def citations(self) -> tuple[CitedDocument, ...]:
        """The documents that gave most to the last answer, with the passages that they attended to. Raises as
        `cite`.
        """
        return tuple(sorted(self.attended(LEAST), key=lambda one: -one.share))

    def attended(self, least: float = 0.0) -> list[CitedDocument]:
        """The documents that were asked and gave at `least` so much to the last answer, in their order, each
        with its share of it and the passages that it attended to. Once who asked has `gone`, no more are.
        """
        found: list[CitedDocument] = []
        for talk, watch, share in zip(self.talks, self.watches, self.shares(), strict=True):
            if self.gone():
                break
            cited = talk.cited(watch) if watch.rows and share >= least else ()
            found += [replace(one, share=one.share * share) for one in cited]
        return found

    def take_stats(self) -> StepStats:
        """The costs of all conversations since they were last taken."""
        return self.costs_of(self.rows)

    def costs_of(self, ran: Sequence[Conversation]) -> StepStats:
        """What these have cost since that was last taken; `stored` is theirs then."""
        stats, offered = StepStats(), 0
        for talk in ran:
            own = talk.prefix.take_stats()
            offered += own.rows * talk.prefix.length
            stats.add(own)
        self.stored = offered / max(1, stats.rows)
        return stats

    def at_work(self, rows: Sequence[T]) -> list[T]:
        """Of one for each row, those of the documents that have not dropped out, and of the model alone."""
        return [*(rows[place] for place in self.working), *rows[len(self.talks) :]]

    def _hear(self, token: int) -> None:
        """Take note of who would not say a token that was picked, by the weights so far. One that is the
        likeliest neither for anybody who is heard nor for all together was drawn by chance, or is what a
        format asks for, and tells of nobody.
        """
        logs = self._logs[: len(self.working)]
        best, tokens = logs.max(-1)
        heard = self.weights >= math.log(HEARD)
        if not (tokens[heard] == token).any() and token != int(self.joined(self._logs).argmax()):
            return
        doubts = heard & (best >= math.log(SURE)) & (logs[:, token] <= math.log(DOUBTED))
        for row in doubts.nonzero().flatten().tolist():
            own, probability = int(tokens[row]), float(best[row].exp())
            if own not in self.talks[0].end_tokens:
                self._dissents.setdefault(self.working[row], (len(self.carried), own, probability))

    def _weigh_by(self, token: int, logs: Tensor) -> None:
        """Weigh the documents at work by the probability that each gave to a token; one that none of them
        may say, as a format may ask for, tells of none.
        """
        weights = self.weights + logs[: len(self.working), token]
        if not (weights > -torch.inf).any():
            weights = self.weights
        shares = torch.zeros(len(self.talks))
        shares[self.working] = weights.softmax(0).cpu()
        self.carried.append(Carried(token, tuple(shares.tolist())))
        self._weigh(weights)

    def _weigh(self, weights: Tensor, least: float | None = None) -> None:
        """Take the log-weights of those at work, of whom the lightest drop out: not above the `least`."""
        weights = weights.log_softmax(0)
        kept = weights > (math.log(LIGHTEST) if least is None else least)
        kept[weights.argmax()] = True
        self.working = [place for place, stays in zip(self.working, kept.tolist(), strict=True) if stays]
        self.weights = weights[kept].log_softmax(0)


def check_alike(models: Sequence[LoadedModel]) -> None:
    """Raise `ConfigError` unless all are one model, loaded once."""
    first = models[0]
    for other in models:
        if other.weights_hash != first.weights_hash:
            raise ConfigError(
                "the stores are of several models, whose tokens differ: give stores of one model"
            )
        if other is not first:
            raise ConfigError(
                f"the stores are of one model, loaded in two ways ({_form(first)} and {_form(other)}): give "
                "stores that were prefilled alike"
            )


def _form(loaded: LoadedModel) -> str:
    return f"{loaded.dtype}, weights {loaded.weights}{loaded.scaled and ', rope '}{loaded.scaled}"


def _follow(talk: Conversation, tokens: Sequence[int]) -> None:
    talk.pending = [*talk.pending, *tokens]


def behind_text(talk: Conversation, text: str) -> Conversation:
    """A conversation of the same model with a text before it, which is run with what comes next."""
    other = without_corpus(talk.loaded)
    other.pending = talk.prompt.document(talk.tokenizer, text, first=True)
    return other
