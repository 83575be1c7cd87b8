"""Stores that are about to be replaced or removed: the answers that read them are waited for."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from offload_decode.server.errors import Loading

PATIENCE_S = 30.0
"""So long it waits for a moment in which nobody asks; then nobody may ask until it is done."""
_LOOK_S = 0.02


class Releases:
    """`busy` says whether a name is being answered from, and `close` closes what is open under it."""

    def __init__(self, busy: Callable[[str], bool], close: Callable[[str], None]) -> None:
        self._busy, self._close = busy, close
        self._lock = threading.Lock()
        self._beginning: Counter[str] = Counter()
        self._held: set[str] = set()

    @contextmanager
    def asking(self, name: str) -> Iterator[None]:
        """While a request for a name is begun. Raises `Loading` where its store is about to be another."""
        with self._lock:
            if name in self._held:
                raise Loading(f"'{name}' is being replaced: try again in a moment", 1)
            self._beginning[name] += 1
        try:
            yield
        finally:
            with self._lock:
                self._beginning[name] -= 1
                if not self._beginning[name]:
                    del self._beginning[name]  # names are what clients write

    @contextmanager
    def released(self, name: str) -> Iterator[None]:
        """A time in which nothing uses the store of a name; one at a time for each."""
        hold_from = time.monotonic() + PATIENCE_S
        while not self._take(name, time.monotonic() >= hold_from):
            time.sleep(_LOOK_S)
        try:
            while self._used(name):
                time.sleep(_LOOK_S)
            self._close(name)
            yield
        finally:
            with self._lock:
                self._held.discard(name)

    def _take(self, name: str, used_or_not: bool) -> bool:
        if not used_or_not and self._used(name):
            return False
        with self._lock:
            if name in self._held:
                return False
            self._held.add(name)
            return True

    def _used(self, name: str) -> bool:
        with self._lock:
            if self._beginning[name]:
                return True
        return self._busy(name)
