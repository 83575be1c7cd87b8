"""A request that several stores answer together: its rows, one behind each store, run among the turns of
other requests, and `engine.joint` makes one token of what they say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from offload_decode.collections.together import notes
from offload_decode.common.errors import OffloadDecodeError
from offload_decode.engine.batching import Turn
from offload_decode.engine.conversation import Conversation
from offload_decode.engine.grounded import Evidence
from offload_decode.engine.joint import Dissent, Joint
from offload_decode.engine.opinion_pools import WAYS
from offload_decode.server import metrics
from offload_decode.server.loaded_models import Target
from offload_decode.server.prefix_cache import PrefixCache, PrefixKey
from offload_decode.server.requests import (
    Done,
    Emit,
    Ended,
    Join,
    Joined,
    JoinedDissent,
    JoinedDocument,
    Prompted,
    Request,
    Scored,
    Usage,
)
from offload_decode.server.sequences import RunningRequest, RunningSequence, ScheduledTurn


@dataclass(frozen=True)
class Joining:
    """Documents that answer together. name: of the catalog, that was asked; names: those that must stay
    meanwhile. targets: a store each, all of one model; documents and stores: what clients call them. weights:
    those with which they begin (None: all alike). attended: citations have every document, whatever it gave.
    """

    name: str
    names: frozenset[str]
    join: Join
    targets: tuple[Target, ...]
    documents: tuple[str, ...]
    stores: tuple[str, ...]
    weights: tuple[float, ...] | None = None
    attended: bool = False

    @property
    def way(self) -> str:
        """How distributions are joined; those of a draft as a mixture."""
        return self.join if self.join in WAYS else "mixture"

    @property
    def width(self) -> int:
        """Conversations that run: one behind each store, and for `pced` one behind none."""
        return len(self.targets) + (self.way == "pced")

    def joined(self, shares: Sequence[float] | None = None, dissents: Sequence[Dissent] = ()) -> Joined:
        """What an answer says of it."""
        each: Sequence[float | None] = shares or [None] * len(self.documents)
        parts = zip(self.documents, self.stores, each, strict=True)
        others = (JoinedDissent(self.documents[one.document], one.text, one.probability) for one in dissents)
        documents = tuple(JoinedDocument(*part) for part in parts)
        return Joined(self.join, self.join == "exact", documents, tuple(others))

    def notes(
        self, shares: Sequence[float] = (), alone: int | None = None, dissents: Sequence[Dissent] = ()
    ) -> tuple[str, ...]:
        """What is approximate in an answer, from these shares, or from one document `alone`, and who would
        have said otherwise.
        """
        starts = [target.start for target in self.targets]
        by_itself = None if alone is None else self.documents[alone]
        manifests, selector = [start.store.manifest for start in starts], starts[0].selector.name
        told = notes(self.join, self.documents, shares, manifests, selector, by_itself, dissents)
        return tuple(told)


class JointRequest(RunningRequest):
    """A request that stores answer together, token by token."""

    def __init__(self, request: Request, joining: Joining, emit: Emit, followed: metrics.Watch):
        super().__init__(request, joining.targets[0], emit, followed)
        self.joining, self.names = joining, joining.names
        self.width = joining.width
        self._joint: Joint | None = None
        self._rests: list[tuple[int, ...]] = []  # of the prompt, what each row has still to run
        self._logits: dict[int, Tensor] = {}  # of the rows that have run this step

    @property
    def joint(self) -> Joint:
        """Its conversations, once it has begun."""
        assert self._joint is not None, "it has begun"
        return self._joint

    @property
    def prompting(self) -> int:
        return sum(map(len, self._rests))

    @property
    def usage(self) -> Usage:
        """Tokens so far: the prompt stands behind each store."""
        stored = sum(target.start.prefix.length for target in self.joining.targets)
        prompt = stored + len(self.joining.targets) * len(self.request.tokens)
        return Usage(prompt, stored + self._cached, sum(one.tokens for one in self.sequences))

    def begin(self, cache: PrefixCache) -> None:
        self.followed.started()
        tokens, joining = self.request.tokens, self.joining
        talks = [cache.take(target.key, tokens) or target.start for target in joining.targets]
        self._joint = joint = Joint(talks, joining.way, self._cites)
        joint.begin(self.request.question, joining.weights)
        joint.gone = lambda: self.cancelled
        self._conversation = joint.talks[0]
        self._cached = sum(len(talk.tokens) for talk in talks)
        self._rests = [tokens[len(row.tokens) :] for row in joint.rows]
        most = max(map(len, self._rests)) + (self.request.generation.max_tokens or 0)
        for talk in joint.talks:
            talk.admitted(most, self.width)

    def turns(self, share: int = 0) -> list[ScheduledTurn]:
        """`share` tokens of the prompt, of the first rows that have some left; or one token of each row."""
        if not self.prompting:
            after = self.joint.turns() if self.sequences[0].finish is None else []
            return [
                ScheduledTurn(self, turn, partial(self._ran, row, len(after)))
                for row, turn in enumerate(after)
            ]
        turns: list[ScheduledTurn] = []
        for row, rest in enumerate(self._rests):
            if take := min(share, len(rest)):
                if take == len(rest):
                    self.joint.look(row)
                turn = Turn(self.joint.rows[row], rest[:take])
                turns.append(ScheduledTurn(self, turn, partial(self._read, row, take)))
                share -= take
        return turns

    def ended(self, over: OffloadDecodeError | None = None) -> Done:
        joint, joining = self.joint, self.joining
        if over is not None and joining.attended:
            raise over  # a draft, whose passages are all that it is for
        shares, cited = joint.shares(), None
        if over is not None:
            self._leave_uncited(over)
        elif self._cites:
            cited = tuple(joint.attended()) if joining.attended else joint.citations()
        dissents = joint.dissents
        notes = *joining.notes(shares, dissents=dissents), *self._notes
        return Done(self.usage, self.stats, cited, (), joining.joined(shares, dissents), notes)

    def turns_run(self) -> list[tuple[PrefixKey, Conversation]]:
        return [
            (target.key, talk) for target, talk in zip(self.joining.targets, self.joint.talks, strict=True)
        ]

    def forget(self) -> None:
        super().forget()
        self._joint, self._logits = None, {}

    def _read(self, row: int, take: int, logits: Tensor) -> None:
        """A row has run so many tokens of the prompt."""
        self._rests[row] = self._rests[row][take:]
        if not self._rests[row]:
            self._logits[row] = logits
        if not self.prompting:
            self.emit(Prompted(self.usage))
            self._answer(self._stacked())

    def _ran(self, row: int, rows: int, logits: Tensor) -> None:
        """One of so many rows has run a token."""
        self._logits[row] = logits
        if len(self._logits) == rows:
            self._take(self.sequences[0], self._stacked())

    def _stacked(self) -> Tensor:
        logits, self._logits = self._logits, {}
        return torch.stack([logits[row] for row in sorted(logits)])

    def _answer(self, logits: Tensor) -> None:
        if not (most := self.joint.most_new(self.request.generation.max_tokens or 0)):
            self.emit(Ended(0, "length"))
            return
        self.joint.prepare(most)
        self._begin(self.conversation, 0, most, Evidence(), logits)

    def _pick(self, one: RunningSequence, logits: Tensor) -> Scored:
        scores = self.joint.scores(logits)
        return one.picker.choose(scores, scores, lambda: self.joint.joined(logits.log_softmax(-1)))

    def _grounded(self, one: RunningSequence) -> float | None:
        return self.joint.grounded

    def _follow(self, one: RunningSequence, token: int) -> bool:
        stops = self.joint.take(token)
        return one.picker.append(token) or stops

    def _cut(self, one: RunningSequence, length: int) -> None:
        self.joint.cut(length)
