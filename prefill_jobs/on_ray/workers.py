"""Workers on a Ray cluster: connecting to one, its resources for workers, and tasks for them.

Ray starts a worker as soon as a machine has room for it, restarts a lost one, and gives it its task again.
What is left is one loop: a worker that is ready takes the next task, preferably of a store on its machine.
Ray is imported here alone.
"""

from __future__ import annotations

import importlib
import itertools
import logging
import os
import time
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from offload_decode.common.errors import ConfigError, OffloadDecodeError, StoreBusy
from offload_decode.planning.caps import Caps

TRIES = 6
"""Workers that a task may lose before it has failed; a few may be lost at random as they start."""
POLL_S = 0.5

_LOCK_S = 30.0
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".*",  # else it reports lost workers on stdout
}

Task = TypeVar("Task")
Result = TypeVar("Result")
TaskProgress = dict[int, tuple[int, int]]
"""Of the running tasks, by number: how much is done, and of how much; (0, 0) before that is known."""


@dataclass(frozen=True)
class Cluster:
    """Where workers run: `ray` or `ray://HOST:PORT`; how many (None: one for each GPU, or for each machine
    where there are no GPUs); what each may use.
    """

    address: str
    workers: int | None
    caps: Caps

    def __post_init__(self) -> None:
        if self.address != "ray" and not self.address.startswith("ray://"):
            raise ConfigError(f"--workers is ray or ray://HOST:PORT, not '{self.address}'")


def shares(ray: Any, wanted: int | None, device: str, grows: bool = False) -> tuple[int, dict[str, int]]:
    """How many workers, and what Ray reserves for each: a GPU, or its part of a machine's processors. As many
    as are `wanted`; else one for each GPU, or for each machine where there are no GPUs. Those without room
    are left out, unless they may wait until the cluster `grows`.
    """
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    gpus = int(sum(machine.get("GPU", 0) for machine in machines))
    if gpus and device != "cpu":
        count, room, share = wanted or gpus, gpus, {"num_cpus": 1, "num_gpus": 1}
    elif cpus := [int(machine["CPU"]) for machine in machines if machine.get("CPU", 0) >= 1]:
        count = wanted or len(cpus)
        each = max(1, min(cpus) // -(-count // len(cpus)))
        room, share = sum(cpu // each for cpu in cpus), {"num_cpus": each}
    elif wanted and grows:
        return wanted, {"num_cpus": 1}
    else:
        raise OffloadDecodeError(
            "the Ray cluster has no processors for workers: add machines to it, or say with --worker-count "
            "how many workers shall wait for some"
        )
    return (count if grows else min(count, room)), share


@contextmanager
def connected(ray: Any, address: str) -> Iterator[None]:
    """Inside, this process belongs to the cluster at `address`; `ray` is the one of RAY_ADDRESS, or a new one
    on this machine. Raises `OffloadDecodeError` where none answers.
    """
    if address == "ray":
        address = os.environ.get("RAY_ADDRESS") or "local"
    own = {"include_dashboard": False} if address == "local" else {}
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **own)
    except Exception as error:  # Ray raises no narrower one where a machine is slow to start
        reason = " ".join(str(error).split()).rstrip(".")
        raise OffloadDecodeError(
            f"no Ray cluster can be used at {address} ({reason}): see that it runs, that its versions of "
            "Python and Ray are this machine's, and set RAY_AUTH_MODE=token where it asks for one"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def installed(option: str) -> Any:
    """Ray's module, for an option that needs it. Raises `ConfigError` where it cannot be imported."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        importlib.import_module("ray.exceptions")
        return importlib.import_module("ray")
    except ImportError as error:
        raise ConfigError(
            f"{option} needs Ray, which cannot be imported ({error}): pip install 'offload-decode[ray]'"
        ) from error


class Worker(ABC):
    """In a process of its own, on any machine. Errors of this project are returned, because Ray wraps those
    that are raised.
    """

    def __init__(self) -> None:
        self._standing = (0, 0)

    @abstractmethod
    def load(self) -> Any:
        """Get ready for tasks. Returns an error, or the stores on its machine, if it has any. A worker in
        place of a lost one is not asked to; one that answered `TryAgain` is, and is dismissed where it
        returns an error.
        """

    @abstractmethod
    def do(self, task: Any) -> Any:
        """Do a task, with which another worker may have been lost. The answer may be `Told`, its result
        `TryAgain`.
        """

    def standing(self) -> tuple[int, int]:
        """How much of the running task is done, and of how much; asked from another thread."""
        return self._standing

    def _note(self, stage: str, done: int, total: int) -> None:
        self._standing = (done, total)


class Lost(Exception):
    """A task has lost its worker `TRIES` times."""


@dataclass(frozen=True)
class Told:
    """A result, with the stores that are `here`, on the worker's machine, from now on: a worker in place of a
    lost one may run elsewhere, and stores come and go. The result is None where the task is not for that
    machine.
    """

    here: frozenset[str]
    result: Any


class TryAgain(Exception):
    """The result of a task that cannot be done here and now: it is tried again, as if its worker had been
    lost, and after `TRIES` workers `error` is its result.
    """

    def __init__(self, error: OffloadDecodeError) -> None:
        super().__init__(error)
        self.error = error


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
    """Workers of the class `kind`, made with `how`, each with a `share` of a machine."""

    def __init__(self, ray: Any, kind: type[Worker], how: object, count: int, share: dict[str, int]) -> None:
        self.ray = ray
        options = {
            **share,
            "max_restarts": -1,
            "max_task_retries": TRIES - 1,
            "max_concurrency": 2,
            "scheduling_strategy": "SPREAD",
        }
        self._start: Callable[[], list[Any]] = lambda: [
            ray.remote(kind).options(**options).remote(how) for _ in range(count)
        ]
        self.workers: list[Any] = []
        self._asked: dict[Any, int] = {}
        self._asked_at = -POLL_S
        self._standing: TaskProgress = {}

    def run(
        self, tasks: Sequence[Task], watch: Callable[[TaskProgress], None], waiting: Waiting
    ) -> Iterator[tuple[int, Any]]:
        """The number of each task with its result, in order of completion: what `do` returned, or `Lost`.
        Tasks that no worker takes stay in `waiting`.

        Raises the error that the first `load` of a worker returns, what `do` raises, and `OffloadDecodeError`
        where all workers are lost while they load.
        """
        here, unloaded = dict[int, frozenset[str]](), None
        came_back, promised, tries = False, self._loading(), Counter[int]()
        while promised and (waiting or any(number is not None for _, number in promised.values())):
            for promise in self.ray.wait(list(promised), num_returns=1, timeout=POLL_S)[0]:
                own, number = promised.pop(promise)
                worker = self.workers[own]
                result = self._got(promise)
                if isinstance(result, Told):
                    came_back |= own in here and here[own] != result.here  # its machine has no worker now
                    here[own], result = result.here, result.result
                if number is not None:
                    self._standing.pop(number, None)
                    if again := isinstance(result, TryAgain):
                        tries[number] += 1
                        result = result.error if tries[number] == TRIES else None
                    if result is None:
                        waiting.add(number)
                        came_back = True
                    else:
                        yield number, result
                    if again:
                        promised[worker.load.remote()] = own, None
                        continue
                elif isinstance(result, Lost) or (own in here and isinstance(result, OffloadDecodeError)):
                    unloaded = result
                    self.ray.kill(worker)
                    continue
                elif isinstance(result, OffloadDecodeError):
                    raise result
                else:
                    here[own] = result or frozenset()
                following = waiting.take(here[own], number)
                if following is None:
                    self.ray.kill(worker)  # a lost one may wait for its share
                else:
                    promised[worker.do.remote(self.ray.put(tasks[following]))] = own, following
            if not waiting:
                self._dismiss_unready(promised)
            self._poll({at: self.workers[own] for own, at in promised.values() if at is not None})
            watch(dict(self._standing))
            if waiting and came_back and not promised:  # those that could take it may be dismissed
                came_back, promised = False, self._loading()
        if waiting and unloaded and not here:
            raise OffloadDecodeError(
                f"{TRIES} Ray workers were lost while they loaded the model, the last with: {unloaded}; "
                "see that their machines have the memory for it"
            ) from unloaded

    def _dismiss_unready(self, promised: dict[Any, tuple[int, int | None]]) -> None:
        """Workers that still wait for a machine no longer need one."""
        for promise in [promise for promise, (_, number) in promised.items() if number is None]:
            self.ray.kill(self.workers[promised.pop(promise)[0]])

    def _loading(self) -> dict[Any, tuple[int, int | None]]:
        """New workers: a promise of each, with its number and that of its task."""
        known = len(self.workers)
        self.workers += self._start()
        return {
            worker.load.remote(): (own, None) for own, worker in enumerate(self.workers[known:], start=known)
        }

    def _got(self, promise: Any) -> Any:
        """What a worker answered, or `Lost`; raises what it raised."""
        errors = self.ray.exceptions
        try:
            return self.ray.get(promise)
        except errors.RayTaskError as error:
            raise error.cause or error from error
        except errors.RayError as error:
            return Lost(str(error).strip().splitlines()[0])

    def _poll(self, at_work: dict[int, Any]) -> None:
        """Ask all workers now and then: a question costs as much as handing out a task."""
        if time.monotonic() - self._asked_at >= POLL_S:
            self._asked_at = time.monotonic()
            waiting = list(self._asked)
            for promise in self.ray.wait(waiting, num_returns=len(waiting), timeout=0)[0] if waiting else []:
                number = self._asked.pop(promise)
                with suppress(self.ray.exceptions.RayError):
                    self._standing[number] = self.ray.get(promise)
            for number in at_work.keys() - self._asked.values():
                self._asked[at_work[number].standing.remote()] = number
        self._standing = {number: self._standing.get(number, (0, 0)) for number in at_work}


def after_the_lost(work: Callable[[], Result]) -> Result:
    """In a worker: what `work` returns. A worker in place of a lost one waits for the lock that this may
    still hold; any other raises `StoreBusy` at once.
    """
    deadline = time.monotonic() + (_LOCK_S if is_second_try() else 0)
    while True:
        try:
            return work()
        except StoreBusy:
            if time.monotonic() > deadline:
                raise
            time.sleep(POLL_S)


def is_second_try() -> bool:
    """In a worker: whether it was started in place of a lost one."""
    context = importlib.import_module("ray").get_runtime_context()
    return bool(context.was_current_actor_reconstructed)


def all_lost(verb: str, last: Lost) -> OffloadDecodeError:
    """The error of a task whose workers were lost while they `verb` (in the past tense)."""
    return OffloadDecodeError(
        f"{TRIES} Ray workers were lost while they {verb}, the last with: {last}; see that their "
        "machines have the memory for it, and run the same command again to go on"
    )
