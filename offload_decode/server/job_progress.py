"""How far a running job is, and how long the rest will take."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """How far a running job is: `done` of `total` in a stage (tokens of a prefill, heads of an index), and
    the seconds that are left of it, None where that cannot be told yet.
    """

    stage: str
    done: int
    total: int
    left_s: float | None = None


class Speed:
    """Progress with the time that is left, by the speed since a stage began."""

    def __init__(self) -> None:
        self._stage, self._first, self._began = "", 0, 0.0

    def __call__(self, stage: str, done: int, total: int) -> Progress:
        now = time.monotonic()
        if stage != self._stage:
            self._stage, self._first, self._began = stage, done, now
        ran = done - self._first
        left = (now - self._began) * (total - done) / ran if ran > 0 else None
        return Progress(stage, done, total, left)
