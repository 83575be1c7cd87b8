"""Progress on stderr: a bar with speed and time left on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

from offload_decode.cli.output import duration, note, one_line, size

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

PLAIN_EVERY_S = 10.0

# What each stage of a job counts; a stage that is not here is only named.
_UNITS = {
    "prefill": "tokens",
    "collect": "documents",
    "index": "heads",
    "verify": "bytes",
    "verify documents": "documents",
    "copy": "arrays",
    "hash indexes": "bytes",
    "check": "bytes",
    "push": "bytes",
    "push documents": "documents",
    "pull": "bytes",
    "pull documents": "documents",
    "verify indexes": "heads",
    "answer": "questions",
    "draw texts": "texts",
    "fidelity": "tokens",
}


class Progress:
    """Called with `(stage, done, total)`, and where in a larger whole that is; a new stage starts anew. Used
    as a context manager.
    """

    def __init__(self, quiet: bool = False):
        self._shown = not quiet
        self._bar: Bar | None = None
        self._task: TaskID | None = None
        self._stage = ""
        self._first = 0
        self._began = self._last = 0.0

    def __enter__(self) -> Self:
        if self._shown and sys.stderr.isatty():
            self._bar = _bar()
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, stage: str, done: int, total: int, about: str = "") -> None:
        if not self._shown:
            return
        about = one_line(about)
        if stage != self._stage:
            self._stage, self._first = stage, done
            self._began = self._last = time.monotonic()
        if self._bar is not None:
            self._draw(self._bar, stage, done, total, about)
        elif (now := time.monotonic()) - self._last >= PLAIN_EVERY_S:
            self._last = now
            note(_line(stage, done, total, (done - self._first) / (now - self._began), about))

    def _draw(self, bar: Bar, stage: str, done: int, total: int, about: str) -> None:
        if self._task is None or bar.tasks[-1].description != stage:
            if self._task is not None:
                bar.remove_task(self._task)
            self._task = bar.add_task(
                stage,
                total=None,
                completed=done,
                counts="",
                about="",
                began=self._began,
                first=done,
            )
        elapsed = time.monotonic() - self._began
        speed = (done - self._first) / elapsed if elapsed else 0.0
        known = total if stage in _UNITS else None
        named = f" {about}" if about else ""
        bar.update(
            self._task, completed=done, total=known, counts=_counts(stage, done, total, speed), about=named
        )


def _bar() -> Bar:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}{task.fields[about]}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[counts]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )


def _counts(stage: str, done: int, total: int, speed: float) -> str:
    unit = _UNITS.get(stage)
    if unit is None:
        return ""
    if unit == "bytes":
        return f"{size(done)} of {size(total)}, {size(speed)}/s"
    return f"{done:,} of {total:,} {unit}, {_speed(speed)} {unit}/s"


def _line(stage: str, done: int, total: int, speed: float, about: str) -> str:
    counts = _counts(stage, done, total, speed)
    left = f", {duration((total - done) / speed)} left" if counts and speed else ""
    named = f"{stage} {about}" if about else stage
    return f"{named}: {counts}{left}" if counts else f"{named} …"


def _speed(speed: float) -> str:
    return f"{speed:,.0f}" if speed >= 10 else f"{speed:.2g}"
