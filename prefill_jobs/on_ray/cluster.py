"""A Ray cluster: reaching one, and what its machines have for workers. Ray is imported here alone."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from offload_decode.common.errors import ConfigError, OffloadDecodeError
from offload_decode.planning.caps import Caps

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
