"""Tasks that wait for workers, and which is next: a choice looks at few of them, however many wait."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any, Protocol


class Waiting(Protocol):
    """Tasks by their numbers; all of them wait at first."""

    def __len__(self) -> int:
        """How many wait."""
        ...

    def add(self, number: int) -> None:
        """One waits again."""
        ...

    def known(self, told: Any) -> Any:
        """What `take` is given of a worker that told this of itself."""
        ...

    def take(self, worker: Any, last: int | None) -> int | None:
        """The next task for a worker, which waits no longer; None where there is none for it. `last`: that
        which it did last.
        """
        ...


class InOrder:
    """`Waiting`, as they are given, for any worker."""

    def __init__(self, tasks: Sequence[Any]) -> None:
        self._numbers = deque(range(len(tasks)))

    def __len__(self) -> int:
        return len(self._numbers)

    def add(self, number: int) -> None:
        self._numbers.append(number)

    def known(self, told: Any) -> None:
        return None

    def take(self, worker: None, last: int | None) -> int | None:
        return self._numbers.popleft() if self._numbers else None


class OfAStore(Protocol):
    """What a task has."""

    @property
    def store(self) -> str:
        """The absolute path of its store, or its URL."""
        ...


class Fullest:
    """Some stores, those with the most tasks first. heap: how many each had when it was looked at last, less
    than none, and one of them. added: how often tasks had been added then.
    """

    def __init__(self, stores: frozenset[str]) -> None:
        self.stores = stores
        self.heap: list[tuple[int, int, str]] = []
        self.added = 0


class Nearest:
    """`Waiting`, for workers that tell which stores lie on their machine: of the store of its last task, else
    of the one there with the most tasks left.
    """

    def __init__(self, tasks: Sequence[OfAStore]) -> None:
        self._store = [task.store for task in tasks]
        self._left: dict[str, deque[int]] = {}
        self._waiting = self._added = 0
        self._machines: dict[frozenset[str], Fullest] = {}
        for number in range(len(tasks)):
            self.add(number)

    def __len__(self) -> int:
        return self._waiting

    def add(self, number: int) -> None:
        self._left.setdefault(self._store[number], deque()).append(number)
        self._waiting += 1
        self._added += 1

    def known(self, told: frozenset[str]) -> Fullest:
        return self._machines.setdefault(told, Fullest(told))  # all workers of a machine look at one

    def take(self, worker: Fullest, last: int | None) -> int | None:
        store = None if last is None else self._store[last]
        if store not in worker.stores or store not in self._left:
            store = self._first(worker)
        return None if store is None else self._taken(store)

    def _first(self, fullest: Fullest, besides: Collection[str] = ()) -> str | None:
        """The store with the most tasks left, of those that are not `besides`, of which there will only be
        more.
        """
        heap, left = fullest.heap, self._left
        if fullest.added != self._added:  # else a store has as many tasks as it says, or fewer
            heap[:] = [(-len(left[store]), left[store][0], store) for store in fullest.stores & left.keys()]
            heapq.heapify(heap)
            fullest.added = self._added
        while heap:
            count, any_of_it, store = heap[0]
            now = 0 if store in besides else len(left.get(store, ()))
            if now == -count:
                return store
            if now:
                heapq.heapreplace(heap, (-now, any_of_it, store))
            else:
                heapq.heappop(heap)
        return None

    def _taken(self, store: str) -> int:
        numbers = self._left[store]
        number = numbers.popleft()
        if not numbers:
            del self._left[store]
        self._waiting -= 1
        return number


class Fetching(Nearest):
    """`Nearest`, where a worker fetches what its machine has not: first what is on no machine yet."""

    def __init__(self, tasks: Sequence[OfAStore]) -> None:
        super().__init__(tasks)
        stores = frozenset(self._store)
        self._somewhere: set[str] = set()
        self._nowhere, self._all = Fullest(stores), Fullest(stores)

    def known(self, told: frozenset[str]) -> Fullest:
        self._somewhere |= told
        return Fullest(told)  # it is told anew with every task

    def take(self, worker: Fullest, last: int | None) -> int | None:
        if (number := super().take(worker, last)) is not None:
            return number
        store = self._first(self._nowhere, self._somewhere) or self._first(self._all)
        if store is None:
            return None
        self._somewhere.add(store)
        return self._taken(store)
