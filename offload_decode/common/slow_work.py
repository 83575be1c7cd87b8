"""Work of seconds before anything can be answered, such as hashing weights, says how far it is.

It speaks through the log of this module, which commands print and servers write in their own form.
"""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

LOG = logging.getLogger(__name__)
FIRST_S, EVERY_S = 2.0, 5.0
"""When the first line is due, and each further one."""


class SlowWork:
    """Work of `total` bytes, called `name`; threads may share it."""

    def __init__(self, name: str, total: int) -> None:
        self.name, self.total, self.done = name, total, 0
        self._began = time.monotonic()
        self._due = self._began + FIRST_S
        self._lock = threading.Lock()

    def add(self, amount: int) -> None:
        """So many bytes more are done."""
        with self._lock:
            self.done += amount
            now = time.monotonic()
            if now < self._due or self.done >= self.total:
                return
            self._due = now + EVERY_S
            left = (now - self._began) * (self.total - self.done) / max(1, self.done)
        LOG.info("%s: %.1f of %.1f GB, about %.0f s left", self.name, self.done / 1e9, self.total / 1e9, left)


@contextmanager
def at_work(name: str) -> Iterator[None]:
    """Says how long the work in the block has taken, for what a library does without a count of it."""
    over, began = threading.Event(), time.monotonic()

    def tell() -> None:
        wait = FIRST_S
        while not over.wait(wait):
            LOG.info("%s: %.0f s so far", name, time.monotonic() - began)
            wait = EVERY_S

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join()
