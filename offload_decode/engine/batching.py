"""Turns of several conversations in one forward pass: what continuous batching is made of.

Conversations of one model share a pass whatever their stores are, and those that see one store alike share
each search of it too.
"""

import time
from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack
from itertools import accumulate, groupby
from typing import NamedTuple

import torch
from torch import Tensor

from offload_decode.common.errors import ConfigError
from offload_decode.engine.citations import Observer, Watch
from offload_decode.engine.conversation import LOGITS, Conversation
from offload_decode.engine.grounded import Evidence, Record
from offload_decode.engine.second_pass import checked
from offload_decode.engine.side_by_side import SideBySide, joins
from offload_decode.engine.step import StoredPrefix
from offload_decode.hf.packed_batch import Block, PackedCache, Segment
from offload_decode.models.loading import Padding, Processors, run_in_passes
from offload_decode.types import COUNTS, SECONDS, Answer, StepStats


class Turn(NamedTuple):
    """What a conversation runs next; `every`: the logits after each of its `tokens` are wanted."""

    conversation: Conversation
    tokens: Sequence[int]
    every: bool = False


def packing_key(conversation: Conversation) -> Hashable | None:
    """Conversations with equal keys may share a pass; None for one that runs alone.

    Alone run recurrent layers, selectors that remember or that judge a question as a whole, conversations so
    long that their selector chooses among their own tokens, and models whose packed passes failed the
    equivalence check.
    """
    cache, prefix = conversation.cache, conversation.prefix
    if cache.recurrent or cache.shown is not None or cache.batch not in (None, 1):
        return None
    if (
        prefix.remembers
        or prefix.chosen.one_question
        or cache.generated_length >= prefix.selector.whole_generated
    ):
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
    if any(turn.conversation.loaded.activated for turn in turns):
        raise ConfigError("an activated adapter answers alone, from one store: leave it out, or --together")
    with ExitStack() as held:
        for turn in turns:
            held.enter_context(turn.conversation.step())
        runs = [_Run(turn) for turn in turns]
        together: dict[Hashable, list[_Run]] = {}
        for run in runs:
            together.setdefault(id(run) if run.key is None else run.key, []).append(run)
        for group in together.values():
            if len(group) > 1:
                _run_joined(group)
            else:
                own = group[0]
                own.logits = [own.conversation.run(own.ids, own.every)]
    return [run.wanted() for run in runs]


class _Run:
    """A turn on its way: `done` of its `ids` are run, and their `logits` are there as far as wanted."""

    def __init__(self, turn: Turn):
        self.conversation, self.every = turn.conversation, turn.every
        self.ids = self.conversation.to_run(turn.tokens)
        self.asked = len(self.ids) - len(self.conversation.pending)  # the last ones, the turn's own
        longest = self.conversation.cache.generated_length + len(self.ids)
        fits = longest <= self.conversation.selector.whole_generated
        self.key = packing_key(self.conversation) if fits else None
        self.done, self.logits = 0, list[Tensor]()

    def wanted(self) -> Tensor:
        if not self.every:
            return self.logits[-1]
        whole = torch.cat(self.logits)
        return whole[len(whole) - self.asked :]  # none, where a turn has only pending tokens


class _Part(NamedTuple):
    """The next `ids` of a run, and of which of them logits are wanted."""

    run: _Run
    ids: list[int]
    rows: range


def _run_joined(runs: list[_Run]) -> None:
    limit = min(run.conversation.admitted(len(run.ids)) for run in runs)
    known = runs[0].conversation.loaded.model.get_input_embeddings().num_embeddings
    # Those that share their prefix, or a call that searches, stand side by side.
    kinds = [run.conversation.prefix.kind for run in runs]
    places = [
        (joins(run.conversation.prefix), kinds.index(kind)) for run, kind in zip(runs, kinds, strict=True)
    ]
    runs = [runs[at] for at in sorted(range(len(runs)), key=places.__getitem__)]
    while parts := list(_parts(runs, limit, max(1, LOGITS // known))):
        _run_pass(parts)
    for run in runs:
        run.conversation.has_run(run.ids)


def _parts(runs: list[_Run], room: int, logits: int) -> Iterator[_Part]:
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
    loaded, blocks, sharing = parts[0].run.conversation.loaded, list[Block](), []
    for _, group in groupby(parts, key=lambda part: part.run.conversation.prefix.kind):
        own = list(group)
        sharing.append((_shared(own), own))
    for beside, alike in groupby(sharing, key=lambda shared: joins(shared[0])):
        each = [(prefix, sum(len(part.ids) for part in own)) for prefix, own in alike]
        if beside and len(each) > 1:
            blocks.append(Block(SideBySide(each), sum(tokens for _, tokens in each)))
        else:
            blocks += [Block(*one) for one in each]
    cache = PackedCache([Segment(part.run.conversation.cache, len(part.ids)) for part in parts], blocks)
    ids = torch.tensor([[token for part in parts for token in part.ids]])
    starts = accumulate((len(part.ids) for part in parts), initial=0)
    rows = [start + row for part, start in zip(parts, starts, strict=False) for row in part.rows]
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
    prefix = parts[0].run.conversation.prefix.fork()
    for part, end in zip(parts, accumulate(len(part.ids) for part in parts), strict=True):
        if watches := part.run.conversation.prefix.watches:
            span = range(end - len(part.ids), end)
            prefix.watches, prefix.spans = (*prefix.watches, *watches), (*prefix.spans, span)
    return prefix


def _share(prefix: StoredPrefix, parts: list[_Part], seconds: float) -> None:
    """Charge a prefix's cost to its conversations, by their tokens; each took so many `seconds`."""
    stats, total, start = prefix.take_stats(), sum(len(part.ids) for part in parts), 0
    for part in parts:
        tokens = len(part.ids)
        share = StepStats(tokens=tokens, total_s=seconds * tokens, attended=stats.attended)
        share.tail_error = stats.tail_error
        for name in SECONDS:
            setattr(share, name, getattr(stats, name) * tokens / total)

        def of(number: int, start: int = start, end: int = start + tokens) -> int:
            return number * end // total - number * start // total

        for name in (*COUNTS, "tail_rows"):
            setattr(share, name, of(getattr(stats, name)))
        share.by_layer = {layer: of(number) for layer, number in stats.by_layer.items()}
        part.run.conversation.prefix.stats.add(share)
        start += tokens


def answer_batch(
    engine: Conversation,
    questions: Sequence[str],
    max_new_tokens: int,
    cites: bool = False,
    check: bool = False,
) -> list[Answer]:
    """Greedy answers, equal to `Engine.answer` for each question; every answer carries the batch's shared
    stats. A question whose answer has ended is no longer run.
    """
    forked, ends = engine.fork(), engine.end_tokens
    watches = [Watch(engine.prefix.host) if cites else None for _ in questions]
    evidence = [
        engine.evidence_of(question, () if watch is None else (watch,))
        for question, watch in zip(questions, watches, strict=True)
    ]
    forked.prefix.watches = _observers(evidence)
    forked.cache.batch_repeat_interleave(len(questions))
    device, stored = engine.loaded.device, engine.length
    asked = [engine.pending + engine.question_tokens(question) for question in questions]
    records = [Record(engine.tokens + one) for one in asked]
    most = [forked.most_new(max_new_tokens, len(one) - len(engine.pending)) for one in asked]
    longest = max(map(len, asked))
    limit = engine.admitted(longest, len(asked))
    ids = torch.tensor([[0] * (longest - len(one)) + one for one in asked], device=device)
    own = torch.tensor([[False] * (longest - len(one)) + [True] * len(one) for one in asked], device=device)
    # One buffer for the whole run: a fresh mask over a million stored tokens at every step would cost more
    # than it.
    mask = torch.ones(len(asked), stored + longest + max_new_tokens, dtype=torch.bool, device=device)
    mask[:, stored : stored + longest] = own
    position = (stored + own.cumsum(-1) - 1).clamp(min=0)

    model, tokenizer = engine.loaded.model, engine.loaded.tokenizer
    processors = [Processors(model, tokenizer, engine.tokens + one, ends, max_new_tokens) for one in asked]
    answers = [engine.answer_end() for _ in asked]
    tokens: list[list[int]] = [[] for _ in asked]
    running = list(range(len(asked)))
    stats = StepStats()
    for step in range(max_new_tokens):
        began = time.perf_counter()
        seen = mask[:, : stored + longest + step]
        logits = run_in_passes(engine.loaded, ids, forked.cache, limit, Padding(seen, position))
        stats.tokens += ids.numel()
        stats.total_s += time.perf_counter() - began
        changed = [processors[row](own) for row, own in zip(running, logits, strict=True)]
        sampled = torch.stack(changed).argmax(-1)
        chosen, kept = sampled.tolist(), []
        for place, (row, token) in enumerate(zip(running, chosen, strict=True)):
            if token not in ends:
                evidence[row].add(token)
                if check:
                    records[row].add(token, logits[place])
                tokens[row] += answers[row].push(token)
                ended = answers[row].reached or processors[row].append(token)
                if not ended and step + 1 < most[row]:
                    kept.append(place)
        running = [running[place] for place in kept]
        if not running:
            break
        forked.prefix.watches = _observers([evidence[row] for row in running])
        ids, position = sampled[:, None], position[:, -1:] + 1
        if len(kept) < len(chosen):
            rows = torch.tensor(kept, device=device)
            forked.cache.batch_select_indices(rows)
            # All is True but the padding: only the questions' columns move up.
            mask[: len(kept), stored : stored + longest] = mask[rows, stored : stored + longest]
            mask, ids, position = mask[: len(kept)], ids[rows], position[rows]
    stats.add(forked.prefix.take_stats())
    cited = [None if watch is None else engine.cited(watch) for watch in watches]
    tokens = [own + answer.rest() for own, answer in zip(tokens, answers, strict=True)]
    found = list[Answer]()
    for written, end, documents, known, record in zip(tokens, most, cited, evidence, records, strict=True):
        known.cut(len(written))
        record.cut(len(written))
        finish, grounded = "length" if len(written) == end else "stop", engine.grounds(known)
        text = engine.decode(written).strip()
        again = checked(engine, record) if check else None
        found.append(Answer(text, tuple(written), stats, finish, documents, grounded, again))
    return found


def _observers(evidence: Sequence[Evidence]) -> tuple[Observer, ...]:
    """Who is to see the next row of each answer, whose rows come together: one each, or nobody."""
    return tuple(observer for one in evidence for observer in one.observers)
