"""Requests that share a prefix, run behind one store of it: continuations are scored, answers are written."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offload_decode.common.errors import StoreMismatch
from offload_decode.config import EngineConfig
from offload_decode.engine.batching import Turn, run_turns
from offload_decode.engine.conversation import LOGITS, Conversation
from offload_decode.engine.engine import Engine, without_corpus
from offload_decode.models.loading import LoadedModel, Processors
from offload_decode.prefill_jobs.job import Settings, prefill_tokens
from offload_decode.prefill_jobs.many import cached_store_name, kept
from offload_decode.selectors.registry import index_kind
from offload_decode.store.format import token_hash
from offload_decode.types import Document

T = TypeVar("T")
Tokens = NDArray[np.int32]

SHARED = 0.75
"""Contexts share a prefix that is at least this part of what each could have stored alone."""


class Group(NamedTuple):
    """Contexts, by number, with the same first `stored` tokens; 0: nothing is stored for them."""

    stored: int
    members: list[int]


def groups(contexts: Sequence[Tokens], least: int, question: int) -> list[Group]:
    """Every context `[T]` in one group, by tokens alone. At least `least` tokens are stored, and never the
    last `question` (1 or more) of a context; contexts that are too short for this are one group, which stores
    nothing.
    """
    rooms = [len(context) - question for context in contexts]
    order = sorted(range(len(contexts)), key=lambda place: contexts[place].astype(">u4").tobytes())
    short = [place for place in order if rooms[place] < least]
    found: list[Group] = [Group(0, short)] if short else []
    # Of the last group: its last member, and the most that a member could store.
    before, longest = None, 0
    for place in order:
        if rooms[place] < least:
            continue
        if before is not None:
            last = found[-1]
            shared = min(last.stored, rooms[place], _common(contexts[before], contexts[place]))
            if shared >= max(least, SHARED * max(longest, rooms[place])):
                found[-1] = Group(shared, [*last.members, place])
                longest, before = max(longest, rooms[place]), place
                continue
        found.append(Group(rooms[place], [place]))
        longest, before = rooms[place], place
    return found


def _common(one: Tokens, other: Tokens) -> int:
    length = min(len(one), len(other))
    differ = np.flatnonzero(one[:length] != other[:length])
    return int(differ[0]) if len(differ) else length


class Scoring(NamedTuple):
    """How likely is this `continuation` (one token or more) of the `context` (one token or more)?"""

    context: Tokens
    continuation: Sequence[int]

    @property
    def most(self) -> int:
        return len(self.continuation)


class Writing(NamedTuple):
    """Write what follows the `context`: at most `most` tokens, up to a stop string. `options`: other
    arguments of `model.generate`.
    """

    context: Tokens
    most: int
    stops: Sequence[str]
    options: Mapping[str, Any]


Score = tuple[float, bool]
"""The log-probability of a continuation (natural), and whether greedy decoding writes it."""


def scores(
    start: Conversation, stored: int, requests: Sequence[Scoring], batch: int
) -> Iterator[tuple[int, Score]]:
    """The numbers of the requests, with their scores. All contexts begin with the `stored` tokens behind
    which `start` runs; a context that several requests have in common is run once, and `batch` requests run
    in one pass where the selector allows it.
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
    """A continuation of which `done` tokens are scored; `logits [V]` are those of the next token."""

    place: int
    conversation: Conversation
    logits: Tensor
    continuation: Sequence[int]
    done: int = 0
    logprob: float = 0.0
    greedy: bool = True

    def take(self, logits: Tensor) -> None:
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
        # As many logits of a long continuation as a pass makes at most.
        size = max(1, LOGITS // (len(left) * left[0].logits.shape[-1]))
        turns = [
            Turn(one.conversation, one.continuation[one.done - 1 : -1][:size], every=True) for one in left
        ]
        for one, logits in zip(left, run_turns(turns), strict=True):
            one.take(logits)
        left = [one for one in left if one.done < len(one.continuation)]
    for one in together:
        yield one.place, (one.logprob, one.greedy)


def answers(
    start: Conversation, stored: int, requests: Sequence[Writing], batch: int
) -> Iterator[tuple[int, list[int]]]:
    """The numbers of the requests, with the tokens of their answers, in batches as in `scores`. A stop string
    is among the tokens, an end token is not.
    """
    for some in _batches(range(len(requests)), batch):
        turns = [Turn(start.fork(), requests[place].context[stored:].tolist()) for place in some]
        pairs = zip(turns, some, strict=True)
        running = going = [_Written(place, turn.conversation, requests[place]) for turn, place in pairs]
        while running:
            logits = run_turns(turns)
            running = [one for one, own in zip(running, logits, strict=True) if one.step(own)]
            turns = [Turn(one.conversation, one.tokens[-1:]) for one in running]
        for one in going:
            yield one.place, one.tokens


@dataclass(eq=False)
class _Written:
    place: int
    conversation: Conversation
    request: Writing
    tokens: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        own, request = self.conversation, self.request
        self._ends = own.loaded.configured_ends  # as the model that this one stands for
        limits = self._ends, request.most, request.options
        self._processors = Processors(own.loaded.model, own.tokenizer, request.context.tolist(), *limits)
        # How many last tokens may spell a stop string, which may begin and end within a token.
        lengths = (len(own.tokenizer.encode(stop, add_special_tokens=False)) for stop in request.stops)
        self._lookback = [(stop, length + 2) for stop, length in zip(request.stops, lengths, strict=True)]

    def step(self, logits: Tensor) -> bool:
        """Take the next token from `logits [V]`; whether another one follows."""
        changed = self._processors(logits)
        sampled = self._processors.samples
        token = int(torch.multinomial(changed.softmax(-1), 1) if sampled else changed.argmax(-1))
        if token in self._ends:
            return False
        self.tokens.append(token)
        if self._processors.append(token) or len(self.tokens) == self.request.most:
            return False
        tokenizer = self.conversation.tokenizer
        return not any(stop in tokenizer.decode(self.tokens[-length:]) for stop, length in self._lookback)


def _batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    left = iter(items)
    while some := list(islice(left, size)):
        yield some


@dataclass(frozen=True)
class Stores:
    """Prefixes as stores of one model, prefilled with the same `settings`, asked by `config`. `folder`: where
    they are kept for later runs; None for a temporary one, from which each is removed after use.
    """

    loaded: LoadedModel
    settings: Settings
    config: EngineConfig
    folder: Path | None

    @contextmanager
    def behind(
        self, prefix: Tokens, following: int, progress: Callable[[int], None]
    ) -> Iterator[Conversation]:
        """A conversation behind `prefix [P]` of at most `following` tokens; without a prefix, with the bare
        model. `progress` gets the tokens prefilled so far.

        Raises `StoreError`, `ConfigError`, `DoesNotFit`.
        """
        if not len(prefix):
            yield without_corpus(self.loaded, following)
            return

        def show(stage: str, done: int, total: int) -> None:
            if stage == "prefill":
                progress(done)

        def make() -> None:
            documents = [Document("context", 0, len(prefix))]
            settings = replace(self.settings, context=following)
            prefill_tokens(self.loaded, prefix, documents, path, settings, progress=show)

        lasting = None if self.folder is None else nullcontext(str(self.folder))
        with lasting or TemporaryDirectory(prefix="offload-decode-") as folder:
            path = Path(folder, self._name(prefix, following))
            kind = index_kind(self.config.selector, self.config.options)
            store = kept(path, make, () if kind is None else (kind,))
            if store.manifest.token_hash != token_hash(prefix):
                raise StoreMismatch(f"{path} is of another text than its name says: remove it.")
            yield Engine.open(store, self.loaded, self.config)

    def _name(self, prefix: Tokens, following: int) -> str:
        """A store depends on the length of what follows as far as the model's rotation does."""
        rotation = self.loaded.lengths.chosen(len(prefix), following).noted
        return cached_store_name(self.loaded, self.settings, token_hash(prefix), rotation)
