"""Tasks of stores, each for a worker on a machine where its store lies."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from offload_decode.errors import OffloadDecodeError, StoreNotFound
from prefill_jobs.on_ray.pool import TRIES, Lost, Moved, Pool, Standing


class OfAStore(Protocol):
    """What a task has."""

    @property
    def store(self) -> str:
        """The absolute path of its store."""
        ...


class AtStores(ABC):
    """A `pool.Worker` that tells which of the stores lie on its machine. One in place of a lost worker looks
    anew before its first task.
    """

    def __init__(self, stores: Sequence[str]) -> None:
        self.stores = stores
        self.ready = False

    @abstractmethod
    def begin(self) -> None:
        """Make ready for tasks."""

    @abstractmethod
    def done(self, task: Any) -> Any:
        """What `do` is to return of a task."""

    def here(self) -> frozenset[str]:
        """The stores that lie on this machine."""
        return frozenset(filter(os.path.exists, self.stores))

    def load(self) -> frozenset[str] | OffloadDecodeError:
        """`begin`, and the stores that lie here."""
        try:
            self.begin()
        except OffloadDecodeError as error:
            return error
        self.ready = True
        return self.here()

    def do(self, task: Any) -> Any:
        """A task's result; `Moved` before anything else in place of a lost worker."""
        if self.ready:
            return self._returned(task)
        here = self.load()
        if isinstance(here, OffloadDecodeError):
            return here
        return Moved(here, self._returned(task) if task.store in here else None)

    def standing(self) -> tuple[int, int]:
        """Where a task is done as a whole."""
        return 0, 0

    def _returned(self, task: Any) -> Any:
        try:
            return self.done(task)
        except OffloadDecodeError as error:
            return error


def nearest(here: frozenset[str], last: OfAStore | None, waiting: Sequence[OfAStore]) -> int | None:
    """The next task for a worker on a machine that has these stores: of the store of its last one, else of
    the one with the most tasks left.
    """
    places = [place for place, task in enumerate(waiting) if task.store in here]
    stores = [waiting[place].store for place in places]
    if not places:
        return None
    wanted = last.store if last and last.store in stores else Counter(stores).most_common(1)[0][0]
    return places[stores.index(wanted)]


def routed(
    pool: Pool, tasks: Sequence[OfAStore], watch: Callable[[Standing], None], verb: str
) -> Iterator[tuple[int, Any]]:
    """The number of every task and its result as they come, an `OffloadDecodeError` for those whose workers
    were all lost while they did as `verb` says, and at the end `StoreNotFound` for those that no worker took.
    """
    seen = set()
    for number, result in pool.run(tasks, watch, nearest):
        seen.add(number)
        if isinstance(result, Lost):
            result = OffloadDecodeError(
                f"{TRIES} Ray workers were lost while they {verb}, the last with: {result}; see that their "
                "machines have the memory for it, and run the same command again to go on"
            )
        yield number, result
    for number, task in enumerate(tasks):
        if number not in seen:
            problem = f"no Ray worker finds a store at {task.store}"
            yield number, StoreNotFound(f"{problem}: it must lie there on a machine of the cluster")
