"""Workers on a Ray cluster: reaching one, what its machines have for workers, and tasks for them.

Ray starts a worker as soon as a machine has room for it, starts one again that was lost, and gives it its
task again. What is left is one loop: a worker that is ready takes the next task, if it can of a store that
lies on its machine. Ray is imported here alone.
"""

from __future__ import annotations

import importlib
import itertools
import logging
import os
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from offload_decode.common.errors import ConfigError, OffloadDecodeError, StoreBusy
from offload_decode.planning.caps import Caps

TRIES = 6
"""Workers that a task may lose before it counts as failed: at random a few of them, while they start."""
POLL_S = 0.5

_LOCK_S = 30.0
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".*",  # it would tell of lost workers on stdout
}

Task = TypeVar("Task")
Result = TypeVar("Result")
Standing = dict[int, tuple[int, int]]
"""Of the tasks at work, by number: how much is done, and of how much; (0, 0) before that is known."""


@dataclass(frozen=True)
class Cluster:
    """Where the workers are to run: `ray` or `ray://HOST:PORT`; how many of them (None: one for each GPU, or
    for each machine where there are none); what each may use.
    """

    address: str
    workers: int | None
    caps: Caps

    def __post_init__(self) -> None:
        if self.address != "ray" and not self.address.startswith("ray://"):
            raise ConfigError(f"--workers is ray or ray://HOST:PORT, not '{self.address}'")


def shares(ray: Any, wanted: int | None, device: str, grows: bool = False) -> tuple[int, dict[str, int]]:
    """How many workers, and what Ray is to keep for each: a GPU, or its part of a machine's processors. As
    many as are `wanted`; else one for each GPU, or for each machine where there are none. What there is no
    room for is left out, unless it may wait until the cluster `grows`.
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
    """Inside, this process belongs to the cluster at `address`: `ray` is the one that RAY_ADDRESS names, or
    one of its own on this machine. Raises `OffloadDecodeError` where none answers.
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
    """The module, for an option that needs it. Raises `ConfigError` where it cannot be imported."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        importlib.import_module("ray.exceptions")
        return importlib.import_module("ray")
    except ImportError as error:
        raise ConfigError(
            f"{option} needs Ray, which cannot be imported ({error}): pip install 'offload-decode[ray]'"
        ) from error


class Worker(Protocol):
    """What a class of workers has. Errors of this project are returned, because Ray wraps those that are
    raised.
    """

    def load(self) -> Any:
        """Make ready for tasks. Returns an error, or the stores that lie on its machine, if it has any. One
        in place of a lost worker is not asked to; one that answered `Again` is, and lets go with an error.
        """
        ...

    def do(self, task: Any) -> Any:
        """A task, with which another worker may have been lost. The answer may be `Told`, and the result
        `Again`.
        """
        ...

    def standing(self) -> tuple[int, int]:
        """How much is done of the task at work, and of how much; asked from another thread."""
        ...


class Lost(Exception):
    """A task has lost its worker `TRIES` times."""


@dataclass(frozen=True)
class Told:
    """The result of a task, with the stores that lie `here`, on its worker's machine, from now on: it may be
    another machine, in place of a lost one, or have other stores than before. The result is None where the
    task is not for it.
    """

    here: frozenset[str]
    result: Any


class Again(Exception):
    """What a task that could not be done here and now returns: it is given again, as if its worker had been
    lost, and after `TRIES` of them `error` is its result.
    """

    def __init__(self, error: OffloadDecodeError) -> None:
        super().__init__(error)
        self.error = error


class Waiting:
    """Tasks that wait, by number, each of a store. A worker stays with the store of its last task, then takes
    one that lies on its machine, the stores by turns. `anywhere`: another store is as good where none does.
    """

    def __init__(self, stores: Sequence[object], anywhere: bool) -> None:
        self._stores, self._anywhere = stores, anywhere
        self._left: OrderedDict[object, deque[int]] = OrderedDict()
        self._turns, self._turn = dict[object, int](), itertools.count()
        for number in range(len(stores)):
            self.add(number)

    def __bool__(self) -> bool:
        return bool(self._left)

    def add(self, number: int) -> None:
        """A task waits, or waits again."""
        store = self._stores[number]
        if store not in self._left:
            self._left[store] = deque()
            self._turns[store] = next(self._turn)
        self._left[store].append(number)

    def take(self, here: Collection[object], last: int | None) -> int | None:
        """The next task for a worker on whose machine the stores `here` lie, which waits no longer; None
        where there is none for it. `last`: that which it did last.
        """
        left = self._left
        store = None if last is None else self._stores[last]
        if store not in left or store not in here:
            other = next(iter(left), None) if self._anywhere else None
            if len(left) <= len(here):  # in the order of their turns
                store = next((one for one in left if one in here), other)
            else:
                store = min((one for one in here if one in left), key=self._turns.__getitem__, default=other)
        if store is None:
            return None
        number = left[store].popleft()
        if left[store]:
            left.move_to_end(store)  # the next worker takes another one
            self._turns[store] = next(self._turn)
        else:
            del left[store]
        return number


class Pool:
    """Workers of the class `kind`, made of `how`: processes with a `share` of a machine each."""

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
        self._standing: Standing = {}

    def run(
        self,
        tasks: Sequence[Task],
        watch: Callable[[Standing], None],
        waiting: Waiting,
    ) -> Iterator[tuple[int, Any]]:
        """The number of each task and what became of it, as they come: what `do` returned, or `Lost`. Tasks
        that no worker takes are left `waiting`.

        Raises what the first `load` of a worker returns as an error, what `do` raises, and
        `OffloadDecodeError` where all workers are lost while they load.
        """
        here, unloaded = dict[int, frozenset[str]](), None
        came_back, promised, tries = False, self._loading(), Counter[int]()
        while promised and (waiting or any(number is not None for _, number in promised.values())):
            for promise in self.ray.wait(list(promised), num_returns=1, timeout=POLL_S)[0]:
                own, number = promised.pop(promise)
                worker = self.workers[own]
                result = self._got(promise)
                if isinstance(result, Told):
                    here[own], result = result.here, result.result
                if number is not None:
                    self._standing.pop(number, None)
                    if again := isinstance(result, Again):
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
                    self.ray.kill(worker)  # its share may be what a lost one waits for
                else:
                    promised[worker.do.remote(self.ray.put(tasks[following]))] = own, following
            if not waiting:
                self._let_go_of_the_unready(promised)
            self._ask_how_far({at: self.workers[own] for own, at in promised.values() if at is not None})
            watch(dict(self._standing))
            if waiting and came_back and not promised:  # those that could take it may have been let go
                came_back, promised = False, self._loading()
        if waiting and unloaded and not here:
            raise OffloadDecodeError(
                f"{TRIES} Ray workers were lost while they loaded the model, the last with: {unloaded}; "
                "see that their machines have the memory for it"
            ) from unloaded

    def _let_go_of_the_unready(self, promised: dict[Any, tuple[int, int | None]]) -> None:
        """Some may be waiting for a machine yet, which need not come for them any more."""
        for promise in [promise for promise, (_, number) in promised.items() if number is None]:
            self.ray.kill(self.workers[promised.pop(promise)[0]])

    def _loading(self) -> dict[Any, tuple[int, int | None]]:
        """New workers: what each promises, with its number and that of its task."""
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

    def _ask_how_far(self, at_work: dict[int, Any]) -> None:
        """Ask all of them every now and then: a question takes as long as a task that is handed out."""
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
    """In a worker: what `work` returns. One in place of a lost worker, which may hold a lock yet, waits for
    that; otherwise StoreBusy is raised at once.
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
    """What is told of a task whose workers were lost while they did as `verb` says."""
    return OffloadDecodeError(
        f"{TRIES} Ray workers were lost while they {verb}, the last with: {last}; see that their "
        "machines have the memory for it, and run the same command again to go on"
    )
