"""Many transfers at once, counted, and stopped together."""

import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue

from offload_decode.common.errors import OffloadDecodeError
from offload_decode.store.files import Progress

Watch = Callable[[str, int, int, str], None]
"""As `Progress`, with a word on the place in the whole: a document, or how many of how many."""

FILES_AT_ONCE = 8
_REPORT_EVERY_S = 0.2
_STOP_S = 0.2
"""How long Ctrl-C waits for each thread."""


@dataclass(frozen=True)
class Transfer:
    """What was moved, and what was there already: sizes in bytes, time in seconds."""

    files: int
    bytes: int
    skipped_files: int
    skipped_bytes: int
    seconds: float


@dataclass(frozen=True)
class Item:
    """A file and its object: its bytes and their hex SHA-256."""

    path: Path
    key: str
    size: int
    sha256: str


class Stopped(OffloadDecodeError):
    """Raised in every transfer when one of them failed."""


class Meter:
    """Bytes done by all threads; after one has failed, `add` raises in the others."""

    def __init__(self) -> None:
        self.done = 0
        self.stopped = False
        self._lock = threading.Lock()

    def add(self, amount: int) -> None:
        if self.stopped:
            raise Stopped
        with self._lock:
            self.done += amount


def in_parallel(
    items: Sequence[Item], work: Callable[[Item, Meter], bool], report: Callable[[int], None]
) -> list[Item]:
    """The items for which `work` returned True; `report` gets the bytes done.

    The first error stops all and is raised. The largest come first, so that none is left over at the end.
    """
    meter, chosen = Meter(), list[Item]()
    todo = sorted(items, key=lambda item: item.size)
    results: SimpleQueue[tuple[Item, bool | BaseException]] = SimpleQueue()

    def run() -> None:
        with suppress(IndexError):  # of `pop`: nothing is left
            while not meter.stopped:
                item = todo.pop()
                try:
                    results.put((item, work(item, meter)))
                except BaseException as error:  # noqa: BLE001 - raised where results are read
                    results.put((item, error))

    # The process would wait for an executor's threads, and so Ctrl-C for a network that does not answer.
    count = min(FILES_AT_ONCE, len(todo))
    threads = [threading.Thread(target=run, daemon=True) for _ in range(count)]
    waiting: float | None = _STOP_S
    try:
        for thread in threads:
            thread.start()
        left = len(items)
        while left:
            report(meter.done)
            try:
                item, answer = results.get(timeout=_REPORT_EVERY_S)
            except Empty:
                continue
            left -= 1
            if isinstance(answer, BaseException):
                raise answer
            chosen += [item] if answer else []
        report(meter.done)
    except Exception:
        waiting = None  # no thread may be left at work after this error
        raise
    finally:
        meter.stopped = True
        for thread in threads:
            if thread.is_alive():
                thread.join(waiting)
    return chosen


def checked(items: Sequence[Item], is_right: Callable[[Item], bool], progress: Progress) -> set[Item]:
    """The items that are right already, checked in parallel."""

    def check(item: Item, meter: Meter) -> bool:
        right = is_right(item)
        meter.add(item.size)
        return right

    total = size_of(items)
    return set(in_parallel(items, check, lambda done: progress("check", done, total)) if items else ())


def move(
    items: Sequence[Item],
    there: set[Item],
    work: Callable[[Item, Meter], bool],
    stage: str,
    progress: Progress,
) -> tuple[Transfer, list[Item]]:
    """Do `work` for all items but those that are `there`: what was moved, in no time, and the items for which
    `work` returned True.
    """
    rest = [item for item in items if item not in there]
    before, total = size_of(there), size_of(items)
    chosen = in_parallel(rest, work, lambda done: progress(stage, before + done, total))
    return Transfer(len(rest), size_of(rest), len(there), before, 0.0), chosen


def size_of(items: Collection[Item]) -> int:
    return sum(item.size for item in items)
