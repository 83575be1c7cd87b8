"""A request that is being answered: its prompt runs in parts, then each of its answers token by token, whose
text is shown as it comes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from offload_decode.common.errors import OffloadDecodeError
from offload_decode.engine.batching import Turn
from offload_decode.engine.citations import Watch
from offload_decode.engine.conversation import Conversation
from offload_decode.engine.grounded import Evidence, Record
from offload_decode.engine.second_pass import SecondPass
from offload_decode.models.prompt import next_turn
from offload_decode.planning.sizes import generated_bytes
from offload_decode.selectors.budgets import PASS_TOKENS
from offload_decode.server import metrics
from offload_decode.server.answer_text import AnswerText
from offload_decode.server.loaded_models import Target
from offload_decode.server.prefix_cache import PrefixCache, PrefixKey
from offload_decode.server.requests import Delta, Done, Emit, Ended, Event, Prompted, Request, Scored, Usage
from offload_decode.server.sampling import Picker, scored, vocabulary_of
from offload_decode.types import StepStats


class ScheduledTurn(NamedTuple):
    """A request's turn in a pass, whose logits go to `take`."""

    request: RunningRequest
    turn: Turn
    take: Callable[[Tensor], None]


@dataclass(eq=False)
class RunningSequence:
    """One answer. `token` was picked last, and is run next; so many `tokens` were written of `most`."""

    index: int
    conversation: Conversation
    picker: Picker
    text: AnswerText
    most: int
    ends: frozenset[int]
    evidence: Evidence
    record: Record
    tokens: int = 0
    token: int = -1
    finish: Literal["stop", "length"] | None = None


class RunningRequest:
    """A request behind its stored prefix. The scheduler asks for the next tokens (`turns`), runs them among
    those of others, and hands over the logits.
    """

    def __init__(self, request: Request, target: Target, emit: Emit, followed: metrics.Watch):
        self.names = frozenset([target.entry.name])  # of the catalog, that must stay while it runs
        self.width = request.n  # conversations that run at the same time
        self.request = request
        self.target = target
        self.cancelled = False
        self.submitted = time.perf_counter()
        self.deadline = self.submitted + (request.deadline_s or math.inf)
        self.stats = StepStats()
        self.watch: Watch | None = None  # what its answers attend to, where that is asked for
        self._cites = (request.cite or request.passages > 0) and target.stored
        self._checks = request.check and target.stored
        self._second: SecondPass | None = None  # of its answer, once that is whole
        bare = request.check and not target.stored
        self._notes: tuple[str, ...] = ("it was not checked: nothing is stored",) if bare else ()
        self._evidence = Evidence()
        self._emit = emit
        self.followed = followed
        self._rest = request.tokens
        self._cached = 0
        self._conversation: Conversation | None = None
        self.sequences: list[RunningSequence] = []
        self._scores: list[Scored] = []
        self._last: Tensor | None = None  # logits after the last token of the prompt that has run

    @property
    def conversation(self) -> Conversation:
        """That of the prompt, once it has begun, or of the check."""
        if self._second is not None:
            return self._second.conversation
        assert self._conversation is not None, "it has begun"
        return self._conversation

    @property
    def checking(self) -> bool:
        """Its answer is whole, and is put through the model once more."""
        return self._second is not None

    @property
    def prompting(self) -> int:
        """Tokens of the prompt that are left to run, or of the check."""
        return len(self._rest) if self._second is None else self._second.left

    @property
    def whole(self) -> bool:
        """The tokens of a question choose together what they attend to: it runs as `Engine.ask` runs it."""
        return self.conversation.pass_tokens > PASS_TOKENS

    @property
    def done(self) -> bool:
        """All answers are whole."""
        return not self.prompting and all(one.finish is not None for one in self.sequences)

    @property
    def ends_later(self) -> bool:
        """Its end may take passes of the model."""
        return self._cites

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        stored = self.target.start.prefix.length
        written = sum(one.tokens for one in self.sequences)
        return Usage(stored + len(self.request.tokens), stored + self._cached, written)

    @cached_property
    def bytes(self) -> int:
        """Memory that its tokens may come to."""
        loaded, request = self.target.loaded, self.request
        most = request.generation.max_tokens or 0
        talks = self.width + self._checks
        most_bytes = talks * generated_bytes(loaded.shape, len(request.tokens) + most, loaded.dtype)
        if request.prompt_logprobs is not None and self.target.start.pass_tokens > PASS_TOKENS:
            # All logits of a question that runs whole are there at once, and once more as they are joined.
            most_bytes += 2 * 4 * len(request.tokens) * vocabulary_of(loaded)
        return most_bytes

    def begin(self, cache: PrefixCache) -> None:
        """Continue a cached conversation of the prompt's first tokens, or begin behind the stored prefix."""
        self.followed.started()
        # Each token that is scored, or whose passages are wanted, must be run.
        every = self.request.prompt_logprobs is not None or self.request.passages
        cached = None if every else cache.take(self.target.key, self.request.tokens)
        self._conversation = conversation = cached or self.target.start.fork()
        self._cached = len(conversation.tokens)
        self._rest = self.request.tokens[self._cached :]
        conversation.admitted(len(self._rest) + self._most, self.request.n)

    def turns(self, share: int = 0) -> list[ScheduledTurn]:
        """The next turns to run: `share` tokens of the prompt or the check, or one token of each answer."""
        if self._second is not None:
            if not self.prompting:
                return []
            tokens, every = self._second.next(share)
            return [ScheduledTurn(self, Turn(self.conversation, tokens, every), self._second.take)]
        if self._rest:
            # The question's last token counts, and its answer's; or all of a question that has no answer.
            if self.request.passages or share >= len(self._rest):
                self._look()
            turn = Turn(self.conversation, self._rest[:share], self.request.prompt_logprobs is not None)
            return [ScheduledTurn(self, turn, partial(self._asked, share))]
        return [
            ScheduledTurn(self, Turn(one.conversation, (one.token,)), partial(self._take, one))
            for one in self.sequences
            if one.finish is None
        ]

    def ended(self, over: OffloadDecodeError | None = None) -> Done:
        """What is told in the end, once all answers are whole. Citations may take a pass, and are left out
        where there is no time for it (`over`). Passages are all that was asked for: `over` is raised then.
        """
        start, watch = self.target.start, self.watch
        if watch is not None and (most := self.request.passages):
            if over is not None:
                raise over
            return Done(self.usage, self.stats, passages=start.found(watch, most))
        if over is not None and watch is not None:
            self._leave_uncited(over)
            watch = None
        cited = None if watch is None else start.cited(watch)
        again = None if self._second is None else self._second.found
        return Done(self.usage, self.stats, cited, notes=self._notes, checked=again)

    def _leave_uncited(self, over: OffloadDecodeError) -> None:
        self._notes = (*self._notes, f"what it attended to is not told: {over}")

    def spent(self, cost: StepStats) -> None:
        """One of its turns took so much; a check is no part of what the answer cost."""
        if not self.checking:
            self.stats.add(cost)

    def leave_unchecked(self, reason: str) -> None:
        """Its check ends here; the answer is whole all the same."""
        self._second, self._checks = None, False
        self._notes = (f"it was not checked: {reason}",)

    def turns_run(self) -> list[tuple[PrefixKey, Conversation]]:
        """Conversations that later turns may continue; that of the first answer is the last."""
        return [(self.target.key, one.conversation) for one in reversed(self.sequences)]

    def emit(self, event: Event) -> None:
        """Send an event to the client, unless it has gone."""
        self.followed.event(event)
        if not self.cancelled:
            self._emit(event)

    def forget(self) -> None:
        """Free its memory."""
        self._conversation = self._last = self._second = None
        self.sequences, self.watch, self._evidence = [], None, Evidence()
        self._emit = lambda event: None  # which leads back here, by the tickets of who reads the events

    @property
    def _most(self) -> int:
        """Tokens of an answer, when the rest of the prompt has run."""
        return self.conversation.most_new(self.request.generation.max_tokens or 0, len(self._rest))

    def _look(self) -> None:
        prefix = self.conversation.prefix
        if self._cites:
            self.watch = self.watch or Watch(prefix.host, whole=self.request.passages > 0)
        beside = () if self.watch is None else (self.watch,)
        self._evidence = self.conversation.evidence_of(self.request.question, beside)
        prefix.watches = self._evidence.observers

    def _asked(self, share: int, logits: Tensor) -> None:
        """A part of the prompt has run: `logits [V]` after it, or `[T, V]` after each of its tokens."""
        ran, self._rest = self._rest[:share], self._rest[share:]
        top = self.request.prompt_logprobs
        if top is not None:
            # Each token is scored by the logits after the one before it; before the first, nothing is known.
            if self._last is None:
                self._scores += [Scored(ran[0]), *scored(logits[:-1], ran[1:], top)]
            else:
                self._scores += scored(torch.cat([self._last[None], logits[:-1]]), ran, top)
            self._last = logits = logits[-1]
        if not self._rest:
            self.emit(Prompted(self.usage, None if top is None else tuple(self._scores)))
            self._answer(logits)

    def _answer(self, logits: Tensor) -> None:
        """The prompt is whole: the first token of each answer."""
        request, first = self.request, self.conversation
        if not (most := self._most):
            if self._checks:
                self.leave_unchecked("it has no tokens")
            for index in range(request.n):
                self.emit(Ended(index, "length"))
            return
        for index, conversation in enumerate([first, *(first.fork() for _ in range(request.n - 1))]):
            evidence = self._evidence.fork() if index else self._evidence
            conversation.prefix.watches = evidence.observers
            self._begin(conversation, index, most, evidence, logits)

    def _begin(
        self, conversation: Conversation, index: int, most: int, evidence: Evidence, logits: Tensor
    ) -> None:
        """The first token of an answer of so many at `most`."""
        request, loaded, ends = self.request, self.target.loaded, conversation.end_tokens
        picker = Picker(loaded, conversation.tokens, ends, request.generation, most, index)
        text = AnswerText(loaded.known_tokenizer, self._stops, request.raw, request.shown)
        record = Record(conversation.tokens if self._checks else ())
        one = RunningSequence(index, conversation, picker, text, most, ends, evidence, record)
        self.sequences.append(one)
        self._take(one, logits)

    @property
    def _stops(self) -> tuple[str, ...]:
        """The request's, and where the model goes on to write the next question of a prompt of its own."""
        stated, request = self.request.generation, self.request
        turn = "" if request.raw or stated.ignore_end else next_turn(self.target.loaded.known_tokenizer)
        return (*stated.stop, turn) if turn else stated.stop

    def _take(self, one: RunningSequence, logits: Tensor) -> None:
        """Pick the next token of an answer, and send it."""
        picked = self._pick(one, logits)
        if picked.token in one.ends and not self.request.generation.ignore_end:
            if self.request.raw and self.request.generation.top_logprobs is not None:
                self.emit(Delta(one.index, "", (picked,)))  # whoever scores a text counts on a token after it
            self._end(one, "stop")
            return
        text, ends = one.text.push(picked.token), self._follow(one, picked.token)
        if self._checks:
            one.record.add(picked.token, logits)
        one.tokens += 1
        whole = ends or one.text.stopped is not None
        self.emit(Delta(one.index, text, (picked,)))
        if whole or one.tokens == one.most:
            self._end(one, "stop" if whole else "length")

    def _pick(self, one: RunningSequence, logits: Tensor) -> Scored:
        return one.picker.pick(logits)

    def _follow(self, one: RunningSequence, token: int) -> bool:
        """The answer goes on with a token; whether it ends with it."""
        one.evidence.add(token)
        one.conversation.prefix.watches = one.evidence.observers
        one.token = token
        return one.picker.append(token)

    def _end(self, one: RunningSequence, finish: Literal["stop", "length"]) -> None:
        if rest := one.text.rest():
            self.emit(Delta(one.index, rest, ()))
        one.finish = finish
        if one.text.stopped is not None:
            self._cut(one, one.text.kept)
        stop = one.text.stopped if one.text.stopped in self.request.generation.stop else None
        self.emit(Ended(one.index, finish, stop, self._grounded(one)))
        if self._checks:
            self._check(one)

    def _cut(self, one: RunningSequence, length: int) -> None:
        """What is told of an answer leaves out what is not shown: it has so many tokens."""
        one.evidence.cut(length)
        one.record.cut(length)

    def _grounded(self, one: RunningSequence) -> float | None:
        return self.target.start.grounds(one.evidence)

    def _check(self, one: RunningSequence) -> None:
        if not one.record.tokens:
            self.leave_unchecked("it has no tokens")
            return
        try:
            again = SecondPass(self.target.start, one.record)
            again.conversation.admitted(again.left)
        except OffloadDecodeError as error:  # as where there is no room
            self.leave_unchecked(str(error))
        else:
            self._second = again
