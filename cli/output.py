"""What the commands print: answers and JSON to stdout, notes and progress to stderr.

Names, manifests and errors come from outside and may contain terminal commands (escape sequences, reversed
writing): these are spelled out, as `\\x1b`. So is a model's text on a terminal; files and pipes get it
unchanged.
"""

from __future__ import annotations

import json
import math
import re
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

from offload_decode.common.errors import ConfigError

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID


# Control characters except tabs and newlines, and those that reverse the direction of writing.
_COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
NOT_IN_TEXT = "not in the text"
_BREAKS = re.compile("[\t\n\u2028\u2029]")


def shown(text: str) -> str:
    """Text that is safe on a terminal: control characters except tabs and newlines are spelled out."""
    return _COMMANDS.sub(_spelled, text)


def one_line(text: str) -> str:
    """`shown`, for a name or value within a line: tabs and newlines are spelled out too."""
    return _BREAKS.sub(_spelled, shown(text))


def answer(text: str, end: str = "\n") -> None:
    """Print a part of the result, at once."""
    print(shown(text), end=end, flush=True)


def generated(text: str, end: str = "") -> None:
    """Print a part of what a model wrote, at once."""
    print(shown(text) if sys.stdout.isatty() else text, end=end, flush=True)


def if_grounded(text: str, grounded: float | None, least: float | None) -> str:
    """An answer, or what stands for it where it is grounded less than `least`. Raises `ConfigError` where
    that is not known.
    """
    if least is None:
        return text
    if grounded is None:
        from offload_decode.engine.grounded import UNMEASURED

        raise ConfigError(UNMEASURED)
    return text if grounded >= least else NOT_IN_TEXT


def answer_json(value: object) -> None:
    print(json_line(value), flush=True)


def json_line(value: object) -> str:
    """JSON in one line, safe on a terminal. Paths become strings, named tuples objects, and numbers that are
    not finite null.
    """
    text = json.dumps(_plain(value), ensure_ascii=False, allow_nan=False, default=str)
    return _COMMANDS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def note(text: str, quiet: bool = False) -> None:
    if not quiet:
        print(shown(text), file=sys.stderr, flush=True)


def _spelled(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def _plain(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def size(amount: float) -> str:
    """Bytes in decimal units."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:,.0f} {unit}" if unit == "bytes" or amount >= 100 else f"{amount:.3g} {unit}"
        amount /= 1000
    return f"{amount:,.0f} TB" if amount >= 100 else f"{amount:.3g} TB"


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def duration(seconds: float) -> str:
    """Seconds, or minutes and seconds, or hours and minutes."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def facts(pairs: Sequence[tuple[str, str]]) -> str:
    """Names and values, one pair per line."""
    width = max(len(name) for name, _ in pairs)
    return "\n".join(f"{name.ljust(width)}  {one_line(value)}" for name, value in pairs)


def some(names: Sequence[str], most: int = 5) -> str:
    more = f" and {len(names) - most:,} more (--json lists them)" if len(names) > most else ""
    return f"{', '.join(map(one_line, names[:most]))}{more}"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns of equal width, the first to the left and the others to the right."""
    rows = [[one_line(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows
    )


PLAIN_EVERY_S = 10.0

# What each stage of a job counts; other stages are only named.
_UNITS = {
    **dict.fromkeys(("prefill", "eval", "fidelity"), "tokens"),
    **dict.fromkeys(("collect", "verify documents", "push documents", "pull documents"), "documents"),
    **dict.fromkeys(("index", "verify indexes"), "heads"),
    **dict.fromkeys(("verify", "hash indexes", "check", "push", "pull"), "bytes"),
    **{"copy": "arrays", "run again": "chunks", "answer": "questions", "draw texts": "texts"},
}


_GROWING = "prefill"
"""A stage each of whose tokens attends to those before it: the time grows with their square too. Not so
`eval`, whose texts are prefilled one after another.
"""


class _Pace:
    """Of a stage: elapsed seconds, fitted as a (n - start) + b (n² - start²), with b where it grows, from the
    end of the first step on: this one may compile loops, and read what is mapped.
    """

    def __init__(self, first: int, grows: bool, began: float):
        self.first, self.grows, self.began = first, grows, began
        self._start: tuple[int, float] | None = None
        self._sums = [0.0] * 5  # of u², v², u v, u t, v t

    def left(self, done: int, total: int, now: float) -> float | None:
        """Seconds until `total`, where `done` are done now; None before there is anything to judge by."""
        if self._start is None:
            if done > self.first:
                self._start = done, now
            return 0.0 if done == total else None
        start, since = self._start
        u, v, t = float(done - start), float(done**2 - start**2), now - since
        terms = u * u, v * v, u * v, u * t, v * t
        self._sums = [held + term for held, term in zip(self._sums, terms, strict=True)]
        uu, vv, uv, ut, vt = self._sums
        if not uu or t <= 0:
            return None
        a, b = ut / uu, 0.0
        apart = uu * vv - uv * uv
        if self.grows and apart > 1e-9 * uu * vv:
            a, b = (ut * vv - vt * uv) / apart, (vt * uu - ut * uv) / apart
            if a < 0:
                a, b = 0.0, vt / vv
            elif b < 0:
                a, b = ut / uu, 0.0
        return a * (total - done) + b * (total**2 - done**2)


class Progress:
    """Progress on stderr: a bar on a terminal, elsewhere a line every `PLAIN_EVERY_S` seconds.

    A context manager that is called with `(stage, done, total)` and `about`, the item being processed.
    """

    def __init__(self, quiet: bool = False):
        self._quiet = quiet
        self._bar: Bar | None = None
        self._task: TaskID | None = None
        self._stage = ""
        self._pace = _Pace(0, grows=False, began=0.0)
        self._last = 0.0

    def __enter__(self) -> Self:
        if not self._quiet and sys.stderr.isatty():
            self._bar = _bar()
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, stage: str, done: int, total: int, about: str = "") -> None:
        if self._quiet:
            return
        now, about = time.monotonic(), f" {one_line(about)}" if about else ""
        if stage != self._stage:
            self._stage, self._pace = stage, _Pace(done, stage == _GROWING, now)
            self._last = now
            if self._bar is not None:
                if self._task is not None:
                    self._bar.remove_task(self._task)
                self._task = self._bar.add_task(stage, total=None, completed=done, counts="", about="")
        left, passed = self._pace.left(done, total, now), now - self._pace.began
        speed = (done - self._pace.first) / passed if passed > 0 else 0.0
        counts = _counts(stage, done, total, speed)
        if counts and left is not None:
            counts += f", {duration(left)} left"
        if self._bar is not None and self._task is not None:
            known = total if stage in _UNITS else None
            self._bar.update(self._task, completed=done, total=known, counts=counts, about=about)
        elif now - self._last >= PLAIN_EVERY_S:
            self._last = now
            note(f"{stage}{about}: {counts}" if counts else f"{stage}{about} …")


def _bar() -> Bar:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    named = TextColumn("{task.description}{task.fields[about]}", markup=False)
    columns = named, BarColumn(), TextColumn("{task.fields[counts]}")
    stderr = Console(stderr=True)
    return Progress(*columns, console=stderr, transient=True, redirect_stdout=False, redirect_stderr=False)


def _counts(stage: str, done: int, total: int, speed: float) -> str:
    unit = _UNITS.get(stage)
    if unit is None:
        return ""
    if unit == "bytes":
        return f"{size(done)} of {size(total)}, {size(speed)}/s"
    rate = f"{speed:,.0f}" if speed >= 10 else f"{speed:.2g}"
    return f"{done:,} of {total:,} {unit}, {rate} {unit}/s"
