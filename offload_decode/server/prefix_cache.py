"""What was run before, kept in memory within a bound: finished conversations, found by the tokens that they
begin with, and the tokens of answers, found by the messages up to them.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from offload_decode.server.messages import Message, arguments_of, without_system

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


def is_of(model: str, name: str) -> bool:
    """Whether a key's model is what this name of the catalog stands for, or a document of that collection."""
    return model == name or model.startswith(f"{name}/")


class _Entry(NamedTuple):
    key: PrefixKey
    tokens: NDArray[np.int64]
    nbytes: int


class PrefixCache:
    """Finished conversations, of `max_bytes` in all and at most `MOST_CONVERSATIONS`, the least recently used
    forgotten first. Thread-safe.
    """

    def __init__(self, max_bytes: int):
        self.nbytes = 0
        self._most = max_bytes
        self._entries: OrderedDict[Conversation, _Entry] = OrderedDict()
        self._lock = threading.Lock()

    def take(self, key: PrefixKey, tokens: Sequence[int]) -> Conversation | None:
        """A fork that has run the longest cached beginning of `tokens`, at most all but one of them: see its
        `tokens`. None where there is none. A selector that forgets starts afresh.

        The state of a selector that remembers cannot be taken back, so that it continues from the end of a
        conversation alone; recurrent layers continue from where a turn began.
        """
        wanted = np.asarray(tokens[:-1], np.int64)
        with self._lock:
            usable = {
                conversation: _usable(conversation, entry.tokens, wanted)
                for conversation, entry in self._entries.items()
                if entry.key == key
            }
            found = max(usable, key=usable.__getitem__, default=None)
            if found is None or not usable[found]:
                return None
            self._entries.move_to_end(found)
            forked = found.fork()
        forked.crop(forked.prefix.length + usable[found])
        forked.selector.reset()
        return forked

    def keep(self, key: PrefixKey, conversation: Conversation) -> None:
        """Take ownership of a conversation, in place of those that it continues, if there is room for it."""
        tokens = np.array(conversation.tokens, np.int64)
        if not len(tokens) or not self._most:  # then there is nothing to trim for
            return
        conversation.cache.trim()
        entry = _Entry(key, tokens, conversation.cache.nbytes + tokens.nbytes)
        if entry.nbytes > self._most:
            return
        with self._lock:
            for earlier, (its_key, its_tokens, _) in list(self._entries.items()):
                if its_key == key and _common(its_tokens, tokens) == len(its_tokens):
                    self._forget(earlier)
            self._entries[conversation] = entry
            self.nbytes += entry.nbytes
            while self.nbytes > self._most or len(self._entries) > MOST_CONVERSATIONS:
                self._forget(next(iter(self._entries)))

    def drop(self, *, model: str | None = None, key: PrefixKey | None = None) -> None:
        """Forget the conversations of a model, whose store or collection was closed, replaced or removed, or
        of a key, and with them the memory of their selector.
        """
        with self._lock:
            for conversation, entry in list(self._entries.items()):
                if entry.key == key or (model is not None and is_of(entry.key.model, model)):
                    self._forget(conversation)

    def __len__(self) -> int:
        return len(self._entries)

    def _forget(self, conversation: Conversation) -> None:
        self.nbytes -= self._entries.pop(conversation).nbytes


def _usable(conversation: Conversation, tokens: NDArray[np.int64], wanted: NDArray[np.int64]) -> int:
    """How many of the tokens a fork can begin with."""
    common = _common(tokens, wanted)
    if conversation.selector.remembers:
        return common if common == len(tokens) else 0
    return conversation.cache.kept(common)


def _common(one: NDArray[np.int64], other: NDArray[np.int64]) -> int:
    """Tokens that two begin with alike."""
    shortest = min(len(one), len(other))
    differ = one[:shortest] != other[:shortest]
    return int(differ.argmax()) if differ.any() else shortest


class RecentlyUsed(Generic[K, V]):
    """Values by their keys, of at most `most` in all, as `size` counts each; the least recently used are
    forgotten first, and one that is larger by itself is not kept. Thread-safe.
    """

    def __init__(self, most: int, size: Callable[[V], int]):
        self._most, self._size_of, self._size = most, size, 0
        self._values: OrderedDict[K, V] = OrderedDict()
        self._lock = threading.Lock()

    def keep(self, key: K, value: V) -> None:
        """Remember a value, in place of an earlier one of its key."""
        if self._size_of(value) > self._most:
            return
        with self._lock:
            self._size += self._size_of(value)
            if key in self._values:
                self._size -= self._size_of(self._values.pop(key))
            self._values[key] = value
            while self._size > self._most:
                self._size -= self._size_of(self._values.popitem(last=False)[1])

    def find(self, key: K) -> V | None:
        """The value; None where it is not there any more."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key)


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
        calls = [(call.name, arguments_of(call)) for call in message.calls]
        content = json.dumps([message.role, message.text.strip(), calls], sort_keys=True)
        digest = hashlib.sha256(digest + content.encode()).digest()
        yield message, digest
