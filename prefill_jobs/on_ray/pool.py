"""Tasks for the workers of a Ray cluster, each on a machine that has its store, where there is one.

Ray starts a worker as soon as a machine has room for it, restarts a lost one, and gives it its task again.
What is left is one loop: a worker that is ready takes the next task. `ray.util.ActorPool` gives tasks to
workers that still wait for a machine, and does not say which task was lost.
"""

import itertools
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Protocol

from offload_decode.common.errors import OffloadDecodeError, StoreNotFound
from offload_decode.prefill_jobs.on_ray.workers import (
    ACTOR_OPTIONS,
    POLL_S,
    TRIES,
    Cluster,
    Lost,
    Reply,
    TryAgain,
    Worker,
    all_lost,
    connected,
    installed,
    received,
    shares,
)

TaskProgress = dict[int, tuple[int, int]]
"""Of the running tasks, by number: how much is done, and of how much; (0, 0) before that is known."""


class Task(Protocol):
    """`store`: the absolute path or the URL of the store that it is about."""

    @property
    def store(self) -> str: ...


class Waiting:
    """Waiting tasks, by number, each of a store. A worker stays with the store of its last task, then takes
    one on its machine, the stores by turns. `anywhere`: where none is on its machine, any other store will
    do.
    """

    def __init__(self, stores: Sequence[object], anywhere: bool) -> None:
        self._stores, self._anywhere = stores, anywhere
        self._left: OrderedDict[object, deque[int]] = OrderedDict()
        self._turn: dict[object, int] = {}  # of each store in `_left`, in the same order
        self._turns = itertools.count()
        for number in range(len(stores)):
            self.add(number)

    def __bool__(self) -> bool:
        return bool(self._left)

    def add(self, number: int) -> None:
        """A task waits, or waits again."""
        store = self._stores[number]
        if store not in self._left:
            self._left[store], self._turn[store] = deque(), next(self._turns)
        self._left[store].append(number)

    def take(self, here: Collection[object], last: int | None) -> int | None:
        """The next task for a worker with the stores `here` on its machine, or None; `last`: its last one."""
        left = self._left
        store = None if last is None else self._stores[last]
        if store not in left or store not in here:
            if len(left) <= len(here):
                store = next((one for one in left if one in here), None)
            else:
                store = min((one for one in here if one in left), key=self._turn.__getitem__, default=None)
            if store is None and self._anywhere:
                store = next(iter(left), None)
        if store is None:
            return None
        number = left[store].popleft()
        if left[store]:
            left.move_to_end(store)  # the next worker takes another one
            self._turn[store] = next(self._turns)
        else:
            del left[store]
        return number


class Pool:
    """`count` workers `kind(*setup)`, each with a `share` of a machine. `anywhere`: they can do tasks of
    stores that are not on their machines.
    """

    def __init__(
        self, ray: Any, kind: type[Worker], setup: Any, count: int, share: dict[str, int], anywhere: bool
    ) -> None:
        self.ray, self.anywhere, self.count = ray, anywhere, count
        make = ray.remote(kind).options(**share, **ACTOR_OPTIONS, max_concurrency=2).remote
        self._make = partial(make, *setup)
        self.workers: list[Any] = []
        self._polled: dict[Any, int] = {}
        self._polled_at = -POLL_S
        self._progress: TaskProgress = {}

    def run(
        self, tasks: Sequence[Task], verb: str, watch: Callable[[TaskProgress], None]
    ) -> Iterator[tuple[int, Any]]:
        """The number of every task with its result, in order of completion: what `Worker.run` returned or
        which error of this project it raised; `Lost` where all workers were lost while they `verb` (in the
        past tense); at the end `StoreNotFound` for tasks that no worker could take.

        Raises the error of the first `load` of a worker, other errors of `Worker.run`, and
        `OffloadDecodeError` where all workers are lost while they load.
        """
        waiting = Waiting([task.store for task in tasks], self.anywhere)
        here: dict[int, frozenset[str]] = {}
        unloaded, came_back, promised, tries = None, False, self._loading(), Counter[int]()
        while promised and (waiting or any(number is not None for _, number in promised.values())):
            for promise in self.ray.wait(list(promised), num_returns=1, timeout=POLL_S)[0]:
                index, number = promised.pop(promise)
                worker, reply = self.workers[index], self._reply(promise)
                result, again = reply.result, isinstance(reply.result, TryAgain)
                if reply.stores is not None:
                    # One that runs elsewhere now leaves its machine without a worker.
                    came_back |= index in here and here[index] != reply.stores
                    here[index] = reply.stores
                if number is not None:
                    self._progress.pop(number, None)
                    if isinstance(result, TryAgain):
                        tries[number] += 1
                        result = result.error if tries[number] == TRIES else None
                    if result is None:
                        waiting.add(number)
                        came_back = True
                    else:
                        lost = isinstance(result, Lost)
                        yield number, all_lost(verb, result, resumes=True) if lost else result
                    if again:
                        promised[worker.load.remote()] = index, None
                        continue
                elif isinstance(result, OffloadDecodeError):
                    if index not in here and not isinstance(result, Lost):
                        raise result
                    unloaded = result
                    self.ray.kill(worker)
                    continue
                following = waiting.take(here[index], number)
                if following is None:
                    self.ray.kill(worker)  # a lost one may wait for its share
                else:
                    promised[worker.do.remote(self.ray.put(tasks[following]))] = index, following
            if not waiting:  # those that still wait for a machine no longer need one
                for promise in [promise for promise, (_, number) in promised.items() if number is None]:
                    self.ray.kill(self.workers[promised.pop(promise)[0]])
            self._poll({at: self.workers[index] for index, at in promised.values() if at is not None})
            watch(dict(self._progress))
            if waiting and came_back and not promised:  # those that could take it may be dismissed
                came_back, promised = False, self._loading()
        if waiting and unloaded and not here:
            raise all_lost("loaded the model", unloaded) from unloaded
        everywhere = {task.store for task in tasks}
        while (number := waiting.take(everywhere, None)) is not None:
            problem = f"no Ray worker finds a store at {tasks[number].store}"
            yield number, StoreNotFound(f"{problem}: it must lie there on a machine of the cluster")

    def _loading(self) -> dict[Any, tuple[int, int | None]]:
        """New workers: a promise of each, with its number and that of its task."""
        known = len(self.workers)
        self.workers += [self._make() for _ in range(self.count)]
        new = range(known, len(self.workers))
        return {self.workers[number].load.remote(): (number, None) for number in new}

    def _reply(self, promise: Any) -> Reply:
        """What a worker answered, or `Lost`; raises what it raised."""
        try:
            reply: Reply = received(self.ray, promise)
        except Lost as lost:
            return Reply(lost)
        return reply

    def _poll(self, at_work: dict[int, Any]) -> None:
        """Ask all workers now and then: a question costs as much as handing out a task."""
        if time.monotonic() - self._polled_at >= POLL_S:
            self._polled_at = time.monotonic()
            waiting = list(self._polled)
            for promise in self.ray.wait(waiting, num_returns=len(waiting), timeout=0)[0] if waiting else []:
                number = self._polled.pop(promise)
                with suppress(self.ray.exceptions.RayError):
                    self._progress[number] = self.ray.get(promise)
            for number in at_work.keys() - self._polled.values():
                self._polled[at_work[number].progress.remote()] = number
        self._progress = {number: self._progress.get(number, (0, 0)) for number in at_work}


@contextmanager
def pool_of(
    cluster: Cluster, device: str, kind: type[Worker], setup: Any, tasks: int, anywhere: bool = False
) -> Iterator[Pool]:
    """Inside, the workers of a cluster for so many tasks. Raises `ConfigError` where Ray is not installed,
    `OffloadDecodeError` where no cluster answers.
    """
    ray = installed("--workers ray")
    with connected(ray, cluster.address):
        count, share = shares(ray, cluster.workers, device, grows=True)
        yield Pool(ray, kind, setup, min(count, tasks), share, anywhere)
