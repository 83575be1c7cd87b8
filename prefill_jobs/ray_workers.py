"""Corpora spread over the machines of a Ray cluster; the only file that knows ray.

The driver reads the corpora and hands their texts out; each worker is a Ray actor that loads the model once
and prefills one corpus after another. A worker that is lost is replaced, and its corpus is done again.
"""

from __future__ import annotations

import importlib
import logging
import os
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from offload_decode.errors import ConfigError, OffloadDecodeError, StoreBusy
from offload_decode.memory import own_memory
from offload_decode.models.loading import LoadedModel, load
from offload_decode.models.outline import outline
from offload_decode.planning.caps import Caps, apply_caps, check_prefill
from prefill_jobs.folders import EVERYTHING, Rules
from prefill_jobs.job import PrefillReport, Settings, make, prepare, settled
from prefill_jobs.many import OF_ONE, Job, Result, Results, Texts, Watch, read_all
from prefill_jobs.places import place_of

TRIES = 3
"""Workers that a corpus may lose before it counts as failed."""
POLL_S = 0.5
_LOCK_S = 30.0
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".*",  # it would tell of lost workers on stdout
}


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


@dataclass(frozen=True)
class How:
    """What all workers are told."""

    model: str
    device: str
    dtype: str
    weights: str
    settings: Settings
    staging: Path | None
    caps: Caps


class Worker:
    """In a process of its own, on any machine. Errors of this project are returned, because Ray wraps those
    that are raised.
    """

    def __init__(self, how: How) -> None:
        self.how = how
        self.loaded: LoadedModel | None = None
        self._standing = (0, 0)

    def load(self) -> OffloadDecodeError | None:
        """Load the model, under the caps."""
        how = self.how
        try:
            chunk = how.settings.chunk
            check_prefill(
                outline(how.model), chunk, how.dtype, how.device, how.caps, own_memory(), how.weights
            )
            apply_caps(how.caps, how.device)
            self.loaded = load(how.model, how.device, how.dtype, how.weights)
        except OffloadDecodeError as error:
            return error
        return None

    def prefill(self, texts: Texts, again: bool) -> Result:
        """One corpus to its store. `again`: another worker was lost with it, and may hold its lock yet."""
        self._standing = (0, 0)
        deadline = time.monotonic() + (_LOCK_S if again else 0)
        while True:
            try:
                return self._prefill(texts)
            except StoreBusy as error:
                if time.monotonic() > deadline:
                    return error
                time.sleep(POLL_S)
            except OffloadDecodeError as error:
                return error

    def standing(self) -> tuple[int, int]:
        """Tokens done, and of how many, of the corpus at work; (0, 0) before that is known."""
        return self._standing

    def _prefill(self, texts: Texts) -> PrefillReport:
        assert self.loaded is not None
        work = prepare(self.loaded, texts.documents, self.how.settings, texts.skipped)
        place = place_of(texts.job.store, self.how.staging)
        return settled(work, place) or make(self.loaded, work, place, self._note)

    def _note(self, stage: str, done: int, total: int) -> None:
        if stage == "prefill":
            self._standing = (done, total)


def prefill_on_ray(
    jobs: Sequence[Job],
    cluster: Cluster,
    *,
    model: str,
    settings: Settings,
    device: str = "auto",
    dtype: str = "auto",
    weights: str = "auto",
    staging: Path | None = None,
    rules: Rules = EVERYTHING,
    progress: Watch = lambda stage, done, total, about: None,
) -> Results:
    """`many.prefill_many`, on the workers of a cluster, whose machines need neither the corpora nor this
    process' files: only the model, and the places of the stores.

    Raises `ConfigError` where Ray is not installed, `OffloadDecodeError` where no cluster answers.
    """
    ray = installed("--workers ray")
    here = [replace(job, store=_absolute(job.store)) for job in jobs]
    results, texts = read_all(here, staging, rules)
    if texts:
        how = How(model, device, dtype, weights, settings, staging and staging.absolute(), cluster.caps)
        with connected(ray, cluster.address):
            results |= Driver(ray, cluster, how, texts, progress).run()
    return {job: results[own] for job, own in zip(jobs, here, strict=True)}


class Driver:
    """Hands texts to workers until none are left."""

    def __init__(self, ray: Any, cluster: Cluster, how: How, texts: Sequence[Texts], progress: Watch) -> None:
        self.ray = ray
        self.how = how
        self.texts = texts
        self.progress = progress
        self.queue = deque(texts)
        self.results: Results = {}
        self.losses: Counter[Job] = Counter()
        self.lost_loading = 0
        self.loading: dict[Any, Any] = {}  # worker by what it has promised
        self.running: dict[Any, tuple[Any, Texts]] = {}
        self.idle: list[Any] = []
        self.standing: dict[Job, tuple[int, int]] = {}
        self._asked: dict[Any, Job] = {}
        count, share = shares(ray, cluster.workers, how.device)
        self.share = {**share, "max_concurrency": 2, "max_restarts": 0, "scheduling_strategy": "SPREAD"}
        self.count = min(count, len(texts))

    def run(self) -> Results:
        """Until every corpus has its result. Raises what concerns all of them."""
        while self.queue or self.running:
            while len(self.idle) + len(self.loading) < min(self.count - len(self.running), len(self.queue)):
                self._start()
            while self.idle and self.queue:
                self._give(self.idle.pop(), self.queue.popleft())
            ready, _ = self.ray.wait([*self.loading, *self.running], num_returns=1, timeout=POLL_S)
            for promise in ready:
                if promise in self.loading:
                    self._loaded(promise)
                else:
                    self._finished(promise)
            self._watch()
        return self.results

    def _start(self) -> None:
        worker = self.ray.remote(Worker).options(**self.share).remote(self.how)
        self.loading[worker.load.remote()] = worker

    def _give(self, worker: Any, texts: Texts) -> None:
        promise = worker.prefill.remote(self.ray.put(texts), self.losses[texts.job] > 0)
        self.running[promise] = worker, texts

    def _loaded(self, promise: Any) -> None:
        worker = self.loading.pop(promise)
        try:
            error = self._get(promise, worker)
        except Lost as lost:
            self.lost_loading += 1
            if self.lost_loading == TRIES:
                raise OffloadDecodeError(
                    f"{TRIES} Ray workers were lost while they loaded the model, the last with: {lost}; "
                    "see that their machines have the memory for it"
                ) from lost
            return
        if error is not None:
            raise error
        self.lost_loading = 0
        self.idle.append(worker)

    def _finished(self, promise: Any) -> None:
        worker, texts = self.running.pop(promise)
        try:
            result = self._get(promise, worker)
        except Lost as lost:
            self.losses[texts.job] += 1
            if self.losses[texts.job] < TRIES:
                self.queue.appendleft(texts)
            else:
                self.results[texts.job] = OffloadDecodeError(
                    f"{TRIES} Ray workers were lost while they prefilled it, the last with: {lost}; see that "
                    "their machines have the memory for it, and run the same command again to go on"
                )
            return
        if not isinstance(result, (PrefillReport, *OF_ONE)):
            raise result
        self.results[texts.job] = result
        self.idle.append(worker)

    def _get(self, promise: Any, worker: Any) -> Any:
        """What a worker answered; what it raised; or `Lost`."""
        errors = self.ray.exceptions
        try:
            return self.ray.get(promise)
        except errors.RayTaskError as error:
            raise error.cause or error from error
        except errors.RayError as error:
            with suppress(errors.RayError):
                self.ray.kill(worker)  # it may only be out of reach
            raise Lost(str(error).strip().splitlines()[0]) from None

    def _watch(self) -> None:
        """Show how far all are, in tokens; those of corpora that are not begun are estimated by length."""
        waiting = list(self._asked)
        for promise in self.ray.wait(waiting, num_returns=len(waiting), timeout=0)[0] if waiting else []:
            job = self._asked.pop(promise)
            with suppress(self.ray.exceptions.RayError):
                self.standing[job] = self.ray.get(promise)
        now = {texts.job: worker for worker, texts in self.running.values()}
        for job in now.keys() - self._asked.values():
            self._asked[now[job].standing.remote()] = job
        self.progress(*self._progress({job: self.standing.get(job, (0, 0)) for job in now}))

    def _progress(self, standing: dict[Job, tuple[int, int]]) -> tuple[str, int, int, str]:
        length = {texts.job: texts.characters for texts in self.texts}
        made = {
            job: found.n_tokens for job, found in self.results.items() if isinstance(found, PrefillReport)
        }
        known = made | {job: total for job, (_, total) in standing.items() if total}
        about = f"{len(self.results)} of {len(self.texts)} done, {len(self.running)} at work"
        if not known:
            return "start workers", 0, 1, about
        each = sum(known.values()) / sum(length[job] for job in known)
        done = sum(length[job] for job in self.results) * each + sum(now for now, _ in standing.values())
        return "prefill", round(done), round(sum(length.values()) * each), about


class Lost(Exception):
    """A worker is gone, with its machine or alone."""


def shares(ray: Any, wanted: int | None, device: str) -> tuple[int, dict[str, int]]:
    """How many workers, and what Ray is to keep for each: a GPU, or its part of a machine's processors. As
    many as are `wanted`; else one for each GPU, or for each machine where there are none.
    """
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    gpus = int(sum(machine.get("GPU", 0) for machine in machines))
    if gpus and device != "cpu":
        return min(wanted or gpus, gpus), {"num_cpus": 1, "num_gpus": 1}
    cpus = [int(machine["CPU"]) for machine in machines if machine.get("CPU", 0) >= 1]
    if not cpus:
        raise OffloadDecodeError("the Ray cluster has no processors for workers: add machines to it")
    count = wanted or len(cpus)
    each = max(1, min(cpus) // -(-count // len(cpus)))
    return min(count, sum(cpu // each for cpu in cpus)), {"num_cpus": each}


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
    except (OSError, RuntimeError, ValueError) as error:
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


def _absolute(store: str) -> str:
    return store if "://" in store else os.path.abspath(store)
