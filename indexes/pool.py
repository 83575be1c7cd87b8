"""The persistent threads that compiled loops run on, one a core."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

T = TypeVar("T")

THREADS = os.cpu_count() or 1


@cache
def pool() -> ThreadPoolExecutor:
    """Started at first use and kept: starting a thread costs as much as a small search."""
    return ThreadPoolExecutor(THREADS, thread_name_prefix="offload-decode")


def run(work: Callable[[T], object], tasks: Iterable[T]) -> None:
    """`work` for each of the tasks, which must not call `run` themselves; raises what the first to fail did.

    The last task runs on the calling thread, which would otherwise only wait.
    """
    *others, last = tasks
    started = [pool().submit(work, task) for task in others]
    try:
        work(last)
    finally:
        for future in started:
            future.result()
