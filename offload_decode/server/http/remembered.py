"""Conversations that a client may go on with by the id of their last response: few, and not for long."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

Messages = Sequence[Mapping[str, Any]]

MOST_BYTES = 64 << 20


class Remembered:
    """Messages by the id of the response that ends them; the least recently used are forgotten first."""

    def __init__(self, most_bytes: int = MOST_BYTES):
        self.most_bytes = most_bytes
        self._held: OrderedDict[str, str] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def keep(self, id: str, messages: Messages) -> None:
        """Remember a conversation, if it is not too large by itself."""
        text = json.dumps(messages)
        if len(text) > self.most_bytes:
            return
        with self._lock:
            self._held[id] = text
            self._bytes += len(text)
            while self._bytes > self.most_bytes:
                _, oldest = self._held.popitem(last=False)
                self._bytes -= len(oldest)

    def find(self, id: str) -> list[dict[str, Any]] | None:
        """The messages up to that response; None where they are not there any more."""
        with self._lock:
            text = self._held.get(id)
            if text is None:
                return None
            self._held.move_to_end(id)
        found: list[dict[str, Any]] = json.loads(text)
        return found
