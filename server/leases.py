"""Who uses which store, so that none is replaced or deleted under an answer."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from server.errors import Busy

_PATIENCE_S = 2.0


class Leases:
    """Counts the requests that use each name. Thread-safe."""

    def __init__(self) -> None:
        self._used: Counter[str] = Counter()
        self._held: Counter[str] = Counter()
        self._changed = threading.Condition()

    def use(self, name: str) -> Callable[[], None]:
        """Use a name until what is returned is called, once or more. Raises `Busy` where its store is held
        for longer than a moment.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: not self._held[name], _PATIENCE_S):
                raise Busy(f"the store of '{name}' is being replaced: try again in a moment", 2)
            self._used[name] += 1
        return partial(self._end, name, threading.Event())

    @contextmanager
    def released(self, name: str) -> Iterator[None]:
        """Nobody uses the name within the block; entering it waits for those that do."""
        with self._changed:
            self._held[name] += 1
            self._changed.wait_for(lambda: not self._used[name])
        try:
            yield
        finally:
            with self._changed:
                self._held[name] -= 1
                self._changed.notify_all()

    def _end(self, name: str, done: threading.Event) -> None:
        with self._changed:
            if not done.is_set():
                done.set()
                self._used[name] -= 1
                self._changed.notify_all()
