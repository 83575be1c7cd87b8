"""Tasks for workers on a Ray cluster. Ray starts a worker as soon as a machine has room for it, starts one
again that was lost, and gives it its task again; what is left is to say which task comes next (`waiting`).
"""

from __future__ import annotations

import importlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from offload_decode.common.errors import OffloadDecodeError, StoreBusy
from offload_decode.prefill_jobs.on_ray.waiting import InOrder, Waiting

TRIES = 6
"""Workers that a task may lose before it counts as failed: at random a few of them, while they start."""
POLL_S = 0.5

_LOCK_S = 30.0

Task = TypeVar("Task")
Result = TypeVar("Result")
Standing = dict[int, tuple[int, int]]
"""Of the tasks at work, by number: how much is done, and of how much; (0, 0) before that is known."""


class Worker(Protocol):
    """What a class of workers has. Errors of this project are returned, because Ray wraps those that are
    raised.
    """

    def load(self) -> Any:
        """Make ready for tasks. Returns an error, or what is told of it. One in place of a lost worker is
        not asked to; one that answered `Again` is, and lets go with an error.
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
    """The result of a task, with what is told of its worker from now on: it may have come to another machine
    in place of a lost one, or have other things there than before. The result is None where the task is not
    for it.
    """

    told: Any
    result: Any


class Again(Exception):
    """What a task that could not be done here and now returns: it is given again, as if its worker had been
    lost, and after `TRIES` of them `error` is its result.
    """

    def __init__(self, error: OffloadDecodeError) -> None:
        super().__init__(error)
        self.error = error


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
        order: Callable[[Sequence[Task]], Waiting] = InOrder,
    ) -> Iterator[tuple[int, Any]]:
        """The number of each task and what became of it, as they come: what `do` returned, or `Lost`. Tasks
        that no worker takes are left out.

        Raises what the first `load` of a worker returns as an error, what `do` raises, and
        `OffloadDecodeError` where all workers are lost while they load.
        """
        waiting, told, unloaded = order(tasks), dict[int, Any](), None
        came_back, promised, tries = False, self._loading(), Counter[int]()
        while promised and (waiting or any(number is not None for _, number in promised.values())):
            for promise in self.ray.wait(list(promised), num_returns=1, timeout=POLL_S)[0]:
                own, number = promised.pop(promise)
                worker = self.workers[own]
                result = self._got(promise)
                if isinstance(result, Told):
                    told[own], result = waiting.known(result.told), result.result
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
                elif isinstance(result, Lost) or (own in told and isinstance(result, OffloadDecodeError)):
                    unloaded = result
                    self.ray.kill(worker)
                    continue
                elif isinstance(result, OffloadDecodeError):
                    raise result
                else:
                    told[own] = waiting.known(result)
                following = waiting.take(told[own], number)
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
        if waiting and unloaded and not told:
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
