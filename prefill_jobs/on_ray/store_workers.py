"""Workers for tasks of stores, each on a machine that has the store or can fetch it."""

from __future__ import annotations

import os
import platform
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

from offload_decode.common.errors import (
    BucketError,
    DoesNotFit,
    OffloadDecodeError,
    StoreError,
    StoreNotFound,
)
from offload_decode.prefill_jobs.buckets.collections import RemoteStores
from offload_decode.prefill_jobs.buckets.transfer import Progress
from offload_decode.prefill_jobs.on_ray.workers import (
    TRIES,
    Lost,
    Pool,
    TaskProgress,
    Told,
    TryAgain,
    Waiting,
    Worker,
    all_lost,
)
from offload_decode.store.staging import surfaced

PATIENCE_S = 30.0
"""How long a worker waits for the users of stores that would have to leave the cache of its machine."""


class StoreWorker(Worker):
    """Knows which of the stores are on its machine: at their paths or, where they are `far`, in its cache. A
    worker in place of a lost one looks again before its first task.
    """

    def __init__(self, stores: Sequence[str], far: RemoteStores | None = None) -> None:
        super().__init__()
        self.stores = stores
        self.far = far
        self.ready = False
        self._failed = 0
        self._by_name = {far.name(store): store for store in stores} if far else {}

    @abstractmethod
    def begin(self) -> None:
        """Get ready for tasks."""

    @abstractmethod
    def done(self, task: Any) -> Any:
        """The result of a task."""

    def here(self) -> frozenset[str]:
        """The stores on this machine."""
        if self.far is None:
            return frozenset(filter(os.path.exists, self.stores))
        return frozenset(self._by_name[name] for name in self.far.here() if name in self._by_name)

    @contextmanager
    def held(self, store: str) -> Iterator[str]:
        """The path of a store while it is used. Raises `TryAgain` where this machine cannot fetch it now."""
        if self.far is None:
            yield store
            return
        with ExitStack() as stack:
            try:
                with surfaced(self.far.folder, "what was fetched", "batch"):
                    path = stack.enter_context(self.far.held(store, self._fetching, PATIENCE_S))
            except (BucketError, StoreError, DoesNotFit) as error:
                if isinstance(error, StoreError) and type(error) is not StoreError:
                    raise  # the store itself is wrong, on every machine
                self._failed += 1
                raise TryAgain(_on_this_machine(error)) from error
            self._failed = 0
            yield str(path)

    def load(self) -> frozenset[str] | OffloadDecodeError:
        """`begin`, then the stores on this machine; an error where others cannot be fetched."""
        try:
            if self.far is not None:
                self.far.check()
            if not self.ready:
                self.begin()
        except BucketError as error:
            return _on_this_machine(error)
        except OffloadDecodeError as error:
            return error
        if self._failed >= TRIES:
            return OffloadDecodeError(f"{TRIES} stores in a row could not be fetched")
        self.ready = True
        return self.here()

    def do(self, task: Any) -> Any:
        """A task's result: `TryAgain` where a store could not be fetched; `Told` where stores are fetched, as
        they come and go, and from a worker in place of a lost one.
        """
        here = None if self.ready else self.load()
        if isinstance(here, OffloadDecodeError):
            return TryAgain(here) if isinstance(here, BucketError) else here
        if self.far is not None:
            result = self._returned(task)
            return Told(self.here(), result)
        if here is not None:
            return Told(here, self._returned(task) if task.store in here else None)
        return self._returned(task)

    @contextmanager
    def _fetching(self) -> Iterator[Progress]:
        yield self._note
        self._standing = (0, 0)

    def _returned(self, task: Any) -> Any:
        try:
            return self.done(task)
        except (OffloadDecodeError, TryAgain) as problem:
            return problem


def _on_this_machine(error: OffloadDecodeError) -> OffloadDecodeError:
    return type(error)(f"on the machine {platform.node()}: {error}")


class StoreTask(Protocol):
    """A task; `store`: the absolute path of its store, or its URL."""

    @property
    def store(self) -> str: ...


def routed(
    pool: Pool,
    tasks: Sequence[StoreTask],
    watch: Callable[[TaskProgress], None],
    verb: str,
    far: bool = False,
) -> Iterator[tuple[int, Any]]:
    """The number of every task with its result, in order of completion; an `OffloadDecodeError` for those
    whose workers were all lost while they `verb` (in the past tense), and at the end `StoreNotFound` for
    those that no worker took. Workers fetch stores that are `far`.
    """
    seen = set()
    for number, result in pool.run(tasks, watch, Waiting([task.store for task in tasks], far)):
        seen.add(number)
        yield number, all_lost(verb, result) if isinstance(result, Lost) else result
    for number, task in enumerate(tasks):
        if number not in seen:
            problem = f"no Ray worker finds a store at {task.store}"
            yield number, StoreNotFound(f"{problem}: it must lie there on a machine of the cluster")
