"""Turns that were run before, kept in memory: a conversation that goes on is found by its tokens."""

from __future__ import annotations

import itertools
import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from offload_decode.engine.conversation import Conversation


MOST = 1024
"""Conversations: each is compared with what comes, in microseconds, while answers wait."""


class TailKey(NamedTuple):
    """What two conversations must have in common. model: its name in the catalog. options: see `tail_key`.
    store: the digest of the store behind which they stand, empty behind none.
    """

    model: str
    selector: str
    options: str
    store: str


def tail_key(model: str, selector: str, options: Mapping[str, object], store: str) -> TailKey:
    """The key of a conversation, whose options may come in any order."""
    return TailKey(model, selector, json.dumps(options, sort_keys=True, default=str), store)


@dataclass(frozen=True)
class TailStats:
    """hits: how often a beginning was found, of so many times that it was looked for (`asked`). tokens: that
    were not run, because they were found. entries, bytes: what is held now.
    """

    asked: int
    hits: int
    tokens: int
    entries: int
    bytes: int


class _Entry(NamedTuple):
    key: TailKey
    tokens: NDArray[np.int64]
    conversation: Conversation
    nbytes: int


class Tails:
    """Finished conversations, of `max_bytes` in all and at most `MOST`, the least recently used forgotten
    first. Thread-safe.
    """

    def __init__(self, max_bytes: int):
        self._most = max_bytes
        self._held = self._asked = self._hits = self._saved = 0
        self._numbers = itertools.count()
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        self._of: dict[TailKey, dict[int, _Entry]] = {}
        self._lock = threading.Lock()

    def take(self, key: TailKey, tokens: Sequence[int]) -> Conversation | None:
        """A fork that has run the longest beginning of `tokens` that is remembered, and at most all but one
        of them: its `tokens` say which. None where nothing is. A selector that forgets starts afresh.

        What a selector remembers cannot be taken back, so that one of that kind goes on from the end of a
        conversation alone; recurrent layers go on from where a turn began.
        """
        wanted = np.asarray(tokens[:-1], np.int64)
        with self._lock:
            self._asked += 1
            usable = {number: _usable(entry, wanted) for number, entry in self._of.get(key, {}).items()}
            number = max(usable, key=lambda number: usable[number], default=None)
            if number is None or not usable[number]:
                return None
            self._entries.move_to_end(number)
            self._hits += 1
            self._saved += usable[number]
            forked = self._entries[number].conversation.fork()
        forked.crop(forked.prefix.length + usable[number])
        forked.selector.reset()
        return forked

    def keep(self, key: TailKey, conversation: Conversation) -> None:
        """Remember a conversation, which is not to be used by its owner again, in place of those that it goes
        on from. One that is larger than the bound is not kept.
        """
        tokens = np.array(conversation.tokens, np.int64)
        if not len(tokens) or not self._most:
            return
        conversation.cache.trim()
        entry = _Entry(key, tokens, conversation, conversation.cache.nbytes + tokens.nbytes)
        if entry.nbytes > self._most:
            return
        with self._lock:
            for number, earlier in list(self._of.get(key, {}).items()):
                if _common(earlier.tokens, tokens) == len(earlier.tokens):
                    self._forget(number)
            number = next(self._numbers)
            self._entries[number] = self._of.setdefault(key, {})[number] = entry
            self._held += entry.nbytes
            while self._held > self._most or len(self._entries) > MOST:
                self._forget(next(iter(self._entries)))

    def drop(self, model: str) -> None:
        """Forget the conversations of a model: its store was closed, replaced or removed."""
        with self._lock:
            for number, entry in list(self._entries.items()):
                if entry.key.model == model:
                    self._forget(number)

    def forget(self, key: TailKey) -> None:
        """Forget the conversations of a key, and with them what their selector keeps in memory."""
        with self._lock:
            for number in list(self._of.get(key, {})):
                self._forget(number)

    @property
    def stats(self) -> TailStats:
        """What was found so far, and what is held."""
        with self._lock:
            return TailStats(self._asked, self._hits, self._saved, len(self._entries), self._held)

    def _forget(self, number: int) -> None:
        entry = self._entries.pop(number)
        self._held -= entry.nbytes
        of_key = self._of[entry.key]
        del of_key[number]
        if not of_key:
            del self._of[entry.key]


def _usable(entry: _Entry, wanted: NDArray[np.int64]) -> int:
    """How many of the tokens a fork can begin with."""
    common = _common(entry.tokens, wanted)
    if entry.conversation.selector.remembers:
        return common if common == len(entry.tokens) else 0
    return entry.conversation.cache.kept(common)


def _common(one: NDArray[np.int64], other: NDArray[np.int64]) -> int:
    """Tokens that two begin with alike."""
    shortest = min(len(one), len(other))
    differ = one[:shortest] != other[:shortest]
    return int(differ.argmax()) if differ.any() else shortest
