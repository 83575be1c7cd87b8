"""What was run before, kept in memory within a bound: finished conversations, found by the tokens that they
begin with, and the tokens of answers, found by the messages up to them.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from offload_decode.server.messages import Message, without_system

if TYPE_CHECKING:
    from offload_decode.engine.conversation import Conversation

K = TypeVar("K")
V = TypeVar("V")

MOST_CONVERSATIONS = 1024
"""Each is compared with a new prompt, in microseconds, while answers wait."""
MOST_ANSWER_TOKENS = 1 << 20


class PrefixKey(NamedTuple):
    """Conversations of one key may continue each other. model: its name in the catalog. options: see
    `prefix_key`. store: the digest of the store behind which they stand, empty behind none.
    """

    model: str
    selector: str
    options: str
    store: str


def prefix_key(model: str, selector: str, options: Mapping[str, object], store: str) -> PrefixKey:
    """The key of a conversation, whose options may come in any order."""
    return PrefixKey(model, selector, json.dumps(options, sort_keys=True, default=str), store)


@dataclass(frozen=True)
class PrefixCacheStats:
    """hits: lookups (`asked`) that found a beginning. tokens: not run, because they were found. entries,
    bytes: in the cache now.
    """

    asked: int
    hits: int
    tokens: int
    entries: int
    bytes: int


class _Entry(NamedTuple):
    key: PrefixKey
    tokens: NDArray[np.int64]
    conversation: Conversation
    nbytes: int


class PrefixCache:
    """Finished conversations, of `max_bytes` in all and at most `MOST_CONVERSATIONS`, the least recently used
    forgotten first. Thread-safe.
    """

    def __init__(self, max_bytes: int):
        self._most = max_bytes
        self._held = self._asked = self._hits = self._saved = 0
        self._numbers = itertools.count()
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        self._of: dict[PrefixKey, dict[int, _Entry]] = {}
        self._lock = threading.Lock()

    def take(self, key: PrefixKey, tokens: Sequence[int]) -> Conversation | None:
        """A fork that has run the longest cached beginning of `tokens`, at most all but one of them: see its
        `tokens`. None where there is none. A selector that forgets starts afresh.

        The state of a selector that remembers cannot be taken back, so that it continues from the end of a
        conversation alone; recurrent layers continue from where a turn began.
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

    def keep(self, key: PrefixKey, conversation: Conversation) -> None:
        """Take ownership of a conversation, in place of those that it continues. One that is larger than the
        bound is dropped.
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
            while self._held > self._most or len(self._entries) > MOST_CONVERSATIONS:
                self._forget(next(iter(self._entries)))

    def drop(self, model: str) -> None:
        """Forget the conversations of a model: its store was closed, replaced or removed."""
        with self._lock:
            for number, entry in list(self._entries.items()):
                if entry.key.model == model:
                    self._forget(number)

    def forget(self, key: PrefixKey) -> None:
        """Forget the conversations of a key, and with them the memory of their selector."""
        with self._lock:
            for number in list(self._of.get(key, {})):
                self._forget(number)

    @property
    def stats(self) -> PrefixCacheStats:
        """Lookups so far, and the size now."""
        with self._lock:
            return PrefixCacheStats(self._asked, self._hits, self._saved, len(self._entries), self._held)

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


class RecentlyUsed(Generic[K, V]):
    """Values by their keys, of at most `most` in all, as `size` counts each; the least recently used are
    forgotten first, and one that is larger by itself is not kept. Thread-safe.
    """

    def __init__(self, most: int, size: Callable[[V], int] = lambda value: 1):
        self._most, self._size_of, self._size = most, size, 0
        self._held: OrderedDict[K, V] = OrderedDict()
        self._lock = threading.Lock()

    def keep(self, key: K, value: V) -> None:
        """Remember a value, in place of an earlier one of its key."""
        if self._size_of(value) > self._most:
            return
        with self._lock:
            self._size += self._size_of(value)
            if key in self._held:
                self._size -= self._size_of(self._held.pop(key))
            self._held[key] = value
            while self._size > self._most:
                self._size -= self._size_of(self._held.popitem(last=False)[1])

    def find(self, key: K) -> V | None:
        """The value; None where it is not there any more."""
        with self._lock:
            if key in self._held:
                self._held.move_to_end(key)
            return self._held.get(key)


class AnswerTokens:
    """The tokens that answers were generated as, by all messages up to them. Thread-safe.

    `scope` is the model: token ids mean something to one tokenizer alone.
    """

    def __init__(self, most_tokens: int = MOST_ANSWER_TOKENS):
        self._known = RecentlyUsed[bytes, tuple[int, ...]](most_tokens, len)

    def keep(self, scope: str, messages: Sequence[Message], tokens: Sequence[int]) -> None:
        """The last of `messages`, the assistant's, was generated as `tokens`."""
        *_, (message, key) = _digests(scope, messages)
        assert message.role == "assistant", "only answers are generated"
        self._known.keep(key, tuple(tokens))

    def of(self, scope: str, messages: Sequence[Message]) -> list[tuple[int, ...] | None]:
        """The tokens of each of the assistant's messages in turn; None where they are not known."""
        each = _digests(scope, messages)
        return [self._known.find(key) for message, key in each if message.role == "assistant"]


def _digests(scope: str, messages: Sequence[Message]) -> Iterator[tuple[Message, bytes]]:
    """Each message, the system's among the user's, with a digest of it and of all before it.

    White space around a text and the ids of calls are left out: clients do not always send them back.
    """
    digest = hashlib.sha256(scope.encode()).digest()
    for message in without_system(messages):
        calls = [(call.name, call.arguments) for call in message.calls]
        content = json.dumps([message.role, message.text.strip(), calls], sort_keys=True)
        digest = hashlib.sha256(digest + content.encode()).digest()
        yield message, digest
