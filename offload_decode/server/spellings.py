"""The tokens of answers as they were generated: encoded anew, their text might be spelled otherwise, and what
was run for them would not be found again.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from offload_decode.server.messages import Message, without_system

MOST_TOKENS = 1 << 20

Known = Sequence[tuple[int, ...] | None]
"""The tokens of each answer of a chat in turn, None where they are not known."""


class Spellings:
    """A bounded memory of answers by all that was said up to them, the least recently used forgotten first.
    Thread-safe.

    `scope` keeps apart what must not be mixed: ids of tokens mean something to one tokenizer alone.
    """

    def __init__(self, most_tokens: int = MOST_TOKENS):
        self._most = most_tokens
        self._held = 0
        self._known: OrderedDict[bytes, tuple[int, ...]] = OrderedDict()
        self._lock = threading.Lock()

    def keep(self, scope: str, messages: Sequence[Message], tokens: Sequence[int]) -> None:
        """The last of `messages`, the assistant's, was generated as `tokens`."""
        *_, (message, key) = _keys(scope, messages)
        assert message.role == "assistant", "only answers are generated"
        with self._lock:
            self._held += len(tokens) - len(self._known.pop(key, ()))
            self._known[key] = tuple(tokens)
            while self._held > self._most:
                self._held -= len(self._known.popitem(last=False)[1])

    def of(self, scope: str, messages: Sequence[Message]) -> Known:
        """The tokens of each of the assistant's messages in turn; None where they are not known."""
        keys = [key for message, key in _keys(scope, messages) if message.role == "assistant"]
        with self._lock:
            for key in keys:
                if key in self._known:
                    self._known.move_to_end(key)
            return [self._known.get(key) for key in keys]


def _keys(scope: str, messages: Sequence[Message]) -> Iterator[tuple[Message, bytes]]:
    """Each message, the system's among the user's, with a digest of it and of all before it.

    White space around a text and the ids of calls are left out: clients do not always send them back.
    """
    digest = hashlib.sha256(scope.encode()).digest()
    for message in without_system(messages):
        calls = [(call.name, call.arguments) for call in message.calls]
        said = json.dumps([message.role, message.text.strip(), calls], sort_keys=True)
        digest = hashlib.sha256(digest + said.encode()).digest()
        yield message, digest
