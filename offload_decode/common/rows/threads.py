"""The persistent threads that compiled loops run on, one a core."""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from math import ceil
from pathlib import Path
from typing import NamedTuple, TypeVar

T = TypeVar("T")

_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of a container on Linux: microseconds of all cores in each period


def quota(file: Path = _QUOTA) -> int | None:
    """Cores whose time this container may use, rounded up; None without a limit, or where none is told."""
    try:
        most, period = file.read_text(encoding="ascii").split()
        return max(1, ceil(int(most) / int(period)))
    except (OSError, ValueError, ZeroDivisionError):  # "max" is no number
        return None


_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
THREADS = min(_CORES, quota() or _CORES)
"""The cores that this process may use, where the system tells."""


class Share(NamedTuple):
    """Every `step`-th task from `first`: what one thread does. A task is `rows` rows of one head."""

    rows: int
    first: int
    step: int


@cache
def pool() -> ThreadPoolExecutor:
    """Started at first use and kept: starting a thread costs as much as a small search."""
    return ThreadPoolExecutor(THREADS, thread_name_prefix="offload-decode")


def run(work: Callable[[T], object], tasks: Iterable[T]) -> None:
    """`work` for each of the tasks, at least one; tasks must not call `run` themselves.

    The last task runs on the calling thread, which would otherwise only wait. Returns, or raises an
    error of one of them, when all have ended.
    """
    *others, last = tasks
    started = [pool().submit(work, task) for task in others]
    try:
        work(last)
    finally:
        wait(started)
    for future in started:
        future.result()


# Threads do not survive a fork: the child starts its own.
os.register_at_fork(after_in_child=pool.cache_clear)
