"""What was done and what came of it: a line for every command and injury."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.endurance.rounds import Outcome
from benchmarks.tables import table

HEADS = ("command", "injury", "times", "struck", "recovered", "lost", "wrong", "seconds")


@dataclass
class Line:
    """Of one command and one injury."""

    command: str
    injury: str
    times: int = 0
    struck: int = 0
    recovered: int = 0
    lost: int = 0
    wrong: int = 0
    seconds: float = 0.0

    def add(self, outcome: Outcome, seconds: float) -> None:
        self.times += 1
        self.struck += outcome.struck
        self.lost += bool(outcome.lost)
        self.wrong += bool(outcome.wrong)
        self.recovered += not (outcome.lost or outcome.wrong)
        self.seconds += seconds


def _name(line: Line) -> tuple[str, str]:
    return line.command, line.injury


@dataclass
class Tally:
    """All lines, and in words what was lost or wrong."""

    lines: dict[tuple[str, str], Line] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)

    def add(self, command: str, injury: str, outcome: Outcome, seconds: float) -> None:
        line = self.lines.setdefault((command, injury), Line(command, injury))
        line.add(outcome, seconds)
        self.words += [f"{command}, {injury}: {word}" for word in (outcome.lost, outcome.wrong) if word]

    def total(self) -> Line:
        """The sum of all lines."""
        whole = Line("all", "")
        for line in self.lines.values():
            for name in HEADS[2:]:
                setattr(whole, name, getattr(whole, name) + getattr(line, name))
        return whole

    def text(self) -> str:
        return table(HEADS, list(self._rows()))

    def saved(self) -> list[dict[str, Any]]:
        return [asdict(line) for line in self.lines.values()]

    def _rows(self) -> Iterator[list[str]]:
        for line in (*sorted(self.lines.values(), key=_name), self.total()):
            numbers = (getattr(line, name) for name in HEADS[2:-1])
            yield [line.command, line.injury, *map("{:,}".format, numbers), f"{line.seconds:,.0f}"]
