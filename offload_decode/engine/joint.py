"""Turns of several conversations in one forward pass: what continuous batching is made of.

Conversations of one model share a pass whatever their stores are, and those that see one store alike share
each search of it too.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from typing import NamedTuple, Self

import torch
from torch import Tensor

from offload_decode.engine.conversation import Conversation
from offload_decode.engine.step import StoredPrefix
from offload_decode.errors import ConfigError
from offload_decode.models.joint import Block, JointCache, Segment
from offload_decode.types import StepStats

LOGITS = 1 << 24
"""Logits that a pass makes at most, where all of a question are wanted."""


class Turn(NamedTuple):
    """What a conversation runs next. every: the logits after every one of `tokens` are wanted, not only after
    the last.
    """

    conversation: Conversation
    tokens: Sequence[int]
    every: bool = False


def join_key(conversation: Conversation) -> Hashable | None:
    """Conversations with equal keys may share a pass; None for one that runs alone.

    Alone run recurrent layers, selectors that remember or that judge a question as a whole, conversations so
    long that their selector chooses among their own tokens, and models whose packed passes failed the
    equivalence check.
    """
    cache, prefix = conversation.cache, conversation.prefix
    if cache.recurrent or cache.shown is not None or cache.tails[0].tail.batch not in (None, 1):
        return None
    if prefix.remembers or prefix.chosen.one_question or cache.tail_length >= prefix.selector.whole_tail:
        return None
    if not conversation.loaded.packs:
        return None
    return conversation.loaded.model, conversation.positions.length


def run_turns(turns: Sequence[Turn]) -> list[Tensor]:
    """The logits of each turn, `[V]` float32, or `[T, V]` where `every` one of its T tokens is asked for.

    Each conversation is afterwards as after its own `extend(tokens)`. Where one fails, all of them are as
    they were before, and its error is raised. Raises `ConfigError` as `extend` does, and for a conversation
    that has two turns.
    """
    if len({id(turn.conversation) for turn in turns}) < len(turns):
        raise ConfigError("a conversation has one turn at a time: give each a fork of its own (fork)")
    with ExitStack() as held:
        for turn in turns:
            held.enter_context(turn.conversation.alone())
            held.enter_context(turn.conversation.taken_back_on_failure())
        runs = [_Run.of(turn) for turn in turns]
        together: dict[Hashable, list[_Run]] = {}
        for place, run in enumerate(runs):
            key = run.key
            together.setdefault(("alone", place) if key is None else key, []).append(run)
        for group in together.values():
            if len(group) > 1:
                _run_joined(group)
            else:
                own = group[0]
                own.logits = [own.conversation.run(own.ids, own.every)]
    return [run.wanted() for run in runs]


@dataclass(eq=False)
class _Run:
    """A turn on its way: `done` of its `ids` are run, of which the last `asked` are the turn's own, and their
    `logits` are there as far as wanted.
    """

    conversation: Conversation
    every: bool
    ids: list[int]
    asked: int
    done: int = 0
    logits: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, turn: Turn) -> Self:
        """Nothing of it is run yet."""
        own = turn.conversation
        ids = own.to_run(turn.tokens)
        return cls(own, turn.every, ids, len(ids) - len(own.pending))

    @property
    def key(self) -> Hashable | None:
        longest = self.conversation.cache.tail_length + len(self.ids)
        return None if longest > self.conversation.selector.whole_tail else join_key(self.conversation)

    def wanted(self) -> Tensor:
        """The logits that were asked for."""
        if not self.every:
            return self.logits[-1]
        whole = torch.cat(self.logits)
        return whole[len(whole) - self.asked :]


class _Part(NamedTuple):
    """The next `ids` of a run, and of which of them logits are wanted."""

    run: _Run
    ids: list[int]
    rows: range


def _run_joined(runs: list[_Run]) -> None:
    """The turns in as few passes as their limits allow."""
    limit = min(run.conversation.admitted(len(run.ids)) for run in runs)
    known = runs[0].conversation.loaded.model.get_input_embeddings().num_embeddings
    # Those that share their prefix stand side by side.
    kinds = [run.conversation.prefix.kind for run in runs]
    runs = sorted(runs, key=lambda run: kinds.index(run.conversation.prefix.kind))
    while parts := list(_parts(runs, limit, max(1, LOGITS // known))):
        _run_pass(parts)
    for run in runs:
        run.conversation.has_run(run.ids)


def _parts(runs: list[_Run], room: int, logits: int) -> Iterator[_Part]:
    """What the next pass runs: as much as there is room for, with at most so many `logits`."""
    for run in runs:
        left = len(run.ids) - run.done
        take = min(left, room, logits if run.every else left)
        if take < 1:
            continue
        rows = range(take) if run.every else range(take - 1, take if take == left else take - 1)
        room, logits = room - take, logits - len(rows)
        yield _Part(run, run.ids[run.done : run.done + take], rows)


def _run_pass(parts: list[_Part]) -> None:
    began = time.perf_counter()
    loaded, blocks, sharing = parts[0].run.conversation.loaded, [], []
    for _, group in groupby(parts, key=lambda part: part.run.conversation.prefix.kind):
        own = list(group)
        prefix = _shared(own)
        blocks.append(Block(prefix, sum(len(part.ids) for part in own)))
        sharing.append((prefix, own))
    cache = JointCache([Segment(part.run.conversation.cache, len(part.ids)) for part in parts], blocks)
    ids = torch.tensor([[token for part in parts for token in part.ids]])
    rows, start = [], 0
    for part in parts:
        rows += [start + row for row in part.rows]
        start += len(part.ids)
    if rows:
        logits = loaded.forward_rows(ids, cache, torch.tensor(rows))
        for part, after in zip(parts, torch.split(logits, [len(part.rows) for part in parts]), strict=True):
            if len(after):
                part.run.logits.append(after if part.run.every else after[0])
    else:
        loaded.encode(ids, cache)
    for part in parts:
        part.run.done += len(part.ids)
    seconds = time.perf_counter() - began
    for prefix, own in sharing:
        _share(prefix, own, seconds / ids.shape[1])


def _shared(parts: list[_Part]) -> StoredPrefix:
    """The prefix that conversations have in common, with the watches of those that are watched."""
    prefix = parts[0].run.conversation.prefix.fork()
    for part, end in zip(parts, accumulate(len(part.ids) for part in parts), strict=True):
        if watches := part.run.conversation.prefix.watches:
            prefix.watches, prefix.ends = (*prefix.watches, *watches), (*prefix.ends, end)
    return prefix


_WHOLE = ("rows", "selected", "bytes_moved", "bus_bytes", "cache_hits", "cache_misses")


def _share(prefix: StoredPrefix, parts: list[_Part], seconds: float) -> None:
    """What a prefix cost goes to the conversations that it stood before, by their tokens; a pass took so many
    `seconds` for each.
    """
    stats, total, start = prefix.take_stats(), sum(len(part.ids) for part in parts), 0
    for part in parts:
        tokens = len(part.ids)
        share = StepStats(tokens=tokens, total_s=seconds * tokens, attended=stats.attended)
        for name in ("search_s", "gather_s", "attend_s"):
            setattr(share, name, getattr(stats, name) * tokens / total)

        def of(number: int, start: int = start, end: int = start + tokens) -> int:
            return number * end // total - number * start // total

        for name in _WHOLE:
            setattr(share, name, of(getattr(stats, name)))
        share.by_layer = {layer: of(number) for layer, number in stats.by_layer.items()}
        share.tail_rows, share.tail_error = of(stats.tail_rows), stats.tail_error
        part.run.conversation.prefix.stats.add(share)
        start += tokens
