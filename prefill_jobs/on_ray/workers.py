"""Workers on a Ray cluster: connecting to one, its resources for workers, and what a worker is.

Ray is imported here alone.
"""

from __future__ import annotations

import importlib
import logging
import os
import platform
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from offload_decode.common.errors import (
    BucketError,
    ConfigError,
    DoesNotFit,
    OffloadDecodeError,
    StoreBusy,
    StoreError,
)
from offload_decode.planning.caps import Caps
from offload_decode.store.staging import surfaced

if TYPE_CHECKING:
    from offload_decode.prefill_jobs.buckets.collections import RemoteStores
    from offload_decode.store.files import Progress

TRIES = 6
"""Workers that a task may lose before it has failed; a few may be lost at random as they start."""
ACTOR_OPTIONS = {"max_restarts": -1, "max_task_retries": TRIES - 1, "scheduling_strategy": "SPREAD"}
POLL_S = 0.5
PATIENCE_S = 30.0
"""How long a worker waits for the users of stores that would have to leave the cache of its machine."""

_LOCK_S = 30.0
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".*",  # else it reports lost workers on stdout
}


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


class Lost(OffloadDecodeError):
    """A worker was lost; in the end, `TRIES` workers of a task were."""


def received(ray: Any, promised: Any) -> Any:
    """The value of a promise of Ray's, or a list of several; raises what the worker raised, and `Lost`."""
    try:
        return ray.get(promised)
    except ray.exceptions.RayTaskError as error:
        raise error.cause or error from error
    except ray.exceptions.RayError as error:
        raise Lost(str(error).strip().splitlines()[0]) from error


def all_lost(verb: str, last: Exception, resumes: bool = False) -> Lost:
    """`TRIES` workers were lost while they `verb` (in the past tense), the `last` one with that error."""
    way_out = ", and run the same command again to go on" if resumes else ""
    return Lost(
        f"{TRIES} Ray workers were lost while they {verb}, the last with: {last}; see that their machines "
        f"have the memory for it{way_out}"
    )


class TryAgain(Exception):
    """The result of a task that cannot be done here and now: it is tried again, as if its worker had been
    lost, and after `TRIES` workers `error` is its result.
    """

    def __init__(self, error: OffloadDecodeError) -> None:
        super().__init__(error)
        self.error = error


@dataclass(frozen=True)
class Reply:
    """What a worker returns. `result`: of a task, None where it is not for that machine; an error of this
    project is returned, because Ray wraps those that are raised. `stores`: those on its machine, where they
    may have changed: a worker in place of a lost one may run elsewhere, and fetched stores come and go.
    """

    result: Any = None
    stores: frozenset[str] | None = None


class Worker(ABC):
    """In a process of its own, on any machine. It knows which of the `stores` are there: at their paths or,
    where they are `remote`, in its cache.
    """

    def __init__(self, stores: Sequence[str] = (), remote: RemoteStores | None = None) -> None:
        self.stores, self.remote = stores, remote
        self.ready = False
        self.replaces_lost = False
        self._progress = (0, 0)
        self._failed = 0
        self._by_name = {remote.name(store): store for store in stores} if remote else {}

    @abstractmethod
    def begin(self) -> None:
        """Get ready for tasks."""

    @abstractmethod
    def run(self, task: Any) -> Any:
        """The result of a task, with which another worker may have been lost."""

    def here(self) -> frozenset[str]:
        if self.remote is None:
            return frozenset(filter(os.path.exists, self.stores))
        return frozenset(self._by_name[name] for name in self.remote.cache().names() if name in self._by_name)

    def load(self) -> Reply:
        """`begin`, then the stores on this machine. A worker in place of a lost one is not asked to; one that
        answered `TryAgain` is, and is dismissed where it returns an error.
        """
        try:
            if self.remote is not None:
                self.remote.check()
            if not self.ready:
                self.begin()
            if self._failed >= TRIES:
                return Reply(OffloadDecodeError(f"{TRIES} stores in a row could not be fetched"))
        except BucketError as error:
            return Reply(_on_this_machine(error))
        except OffloadDecodeError as error:
            return Reply(error)
        self.ready = True
        return Reply(stores=self.here())

    def do(self, task: Any) -> Reply:
        """The result of a task; `TryAgain` where its store could not be fetched."""
        self._progress = (0, 0)
        self.replaces_lost |= not self.ready
        loaded = Reply() if self.ready else self.load()
        if loaded.result is not None:
            lasting = not isinstance(loaded.result, BucketError)
            return loaded if lasting else Reply(TryAgain(loaded.result))
        if loaded.stores is not None and self.stores and not self.remote and task.store not in loaded.stores:
            return loaded
        result = self._result(task)
        return Reply(result, self.here() if self.remote else loaded.stores)

    def _result(self, task: Any) -> Any:
        """A lost worker may still hold a lock, for which the one in its place waits."""
        deadline = time.monotonic() + (_LOCK_S if self.replaces_lost else 0)
        while True:
            try:
                return self.run(task)
            except StoreBusy as error:
                if time.monotonic() > deadline:
                    return error
                time.sleep(POLL_S)
            except (OffloadDecodeError, TryAgain) as problem:
                return problem

    def progress(self) -> tuple[int, int]:
        """How much of the running task is done, and of how much; asked from another thread."""
        return self._progress

    @contextmanager
    def held(self, store: str) -> Iterator[str]:
        """The path of a store while it is used. Raises `TryAgain` where this machine cannot fetch it now."""
        if self.remote is None:
            yield store
            return
        with ExitStack() as stack:
            try:
                with surfaced(self.remote.cache().folder, "what was fetched", "batch"):
                    path = stack.enter_context(self.remote.held(store, self._fetching, PATIENCE_S))
            except (BucketError, StoreError, DoesNotFit) as error:
                if isinstance(error, StoreError) and type(error) is not StoreError:
                    raise  # the store itself is wrong, on every machine
                self._failed += 1
                raise TryAgain(_on_this_machine(error)) from error
            self._failed = 0
            yield str(path)

    @contextmanager
    def _fetching(self) -> Iterator[Progress]:
        yield self._note
        self._progress = (0, 0)

    def _note(self, stage: str, done: int, total: int) -> None:
        self._progress = (done, total)


def _on_this_machine(error: OffloadDecodeError) -> OffloadDecodeError:
    return type(error)(f"on the machine {platform.node()}: {error}")
