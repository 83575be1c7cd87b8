"""A round: a command, what happens to it, and whether the same command again ends as if nothing had."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from benchmarks.endurance import injuries
from benchmarks.endurance.commands import Command, Home, left
from tests.prefill_jobs.killing import PAGE, Disk, Ran, Runner


class Outcome(NamedTuple):
    """Whether the injury met anything; what was `lost` (the same command again does not end) or `wrong` (it
    ends in something else, or nobody was told), in a few words where it was.
    """

    struck: bool
    lost: str = ""
    wrong: str = ""


class Rounds:
    """Rounds in `folder`, which begin with what lies in `home`; `disk` is where a disk may be filled."""

    def __init__(self, runner: Runner, home: Home, folder: Path, disk: Disk | None, rng: random.Random):
        self._runner, self._home, self._folder, self._disk, self._rng = runner, home, folder, disk, rng

    def of(self, command: Command) -> dict[str, Callable[[], Outcome]]:
        """What may happen to a command, by name."""
        found: dict[str, Callable[[], Outcome]] = {
            name: lambda injury=injury: self._running(command, injury, self._folder, self._folder)
            for name, injury in injuries.RUNNING.items()
        }
        if self._disk is not None:
            found[injuries.FULL] = lambda: self._on_a_full_disk(command)
        if command.check is None:
            return found | {"output cut": lambda: self._torn(command)}
        return found | {
            name: lambda injury=injury: self._lying(command, injury)
            for name, injury in injuries.LYING.items()
        }

    def keep(self, folder: Path) -> None:
        """Keep what the last round left."""
        for left_over in (self._folder, *((self._disk.seen / "round",) if self._disk else ())):
            if left_over.exists():
                shutil.copytree(left_over, folder)

    def clear(self) -> None:
        """Remove what the last round left."""
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._disk is not None:
            self._disk.empty()

    def _running(self, command: Command, injury: injuries.Injury, folder: Path, seen: Path) -> Outcome:
        """`folder` is the round's as commands name it, `seen` where this process sees it."""
        self._home.begin(command, seen)
        ran = injury(self._runner, command.arguments(folder), self._home.alone[command.name], self._rng)
        wrong = "" if not ran.code or (ran.killed and injury is injuries.kill) else untold(ran)
        return self._again(command, folder, seen, bool(ran.code), wrong)

    def _on_a_full_disk(self, command: Command) -> Outcome:
        assert self._disk is not None
        files = (self._home.of(command.name) / name for name in self._home.made(command))
        needed = sum(-(-file.stat().st_size // PAGE) * PAGE for file in files)
        injury = injuries.full(self._disk, needed)
        return self._running(command, injury, self._disk.folder / "round", self._disk.seen / "round")

    def _torn(self, command: Command) -> Outcome:
        """What a power cut leaves of an output that was being written: its beginning."""
        self._home.begin(command, self._folder)
        for name in self._home.made(command):
            own, other = str(self._home.of(command.name)), str(self._folder)
            text = (self._home.of(command.name) / name).read_text().replace(own, other)
            (self._folder / name).write_text(text)
            injuries.cut(self._folder / name, self._rng)
        return self._again(command, self._folder, self._folder, True, "")

    def _again(self, command: Command, folder: Path, seen: Path, struck: bool, wrong: str) -> Outcome:
        ran = self._runner.run(command.arguments(folder), kill_after=injuries.PATIENCE)
        if ran.code:
            return Outcome(struck, lost=f"{ran.code}: {ran.err[-300:]}", wrong=wrong)
        whole, found = self._home.whole[command.name], left(seen, folder)
        others = sorted(name for name in whole | found if whole.get(name) != found.get(name))
        return Outcome(struck, wrong=wrong or (f"differs in {', '.join(others[:5])}" if others else ""))

    def _lying(self, command: Command, injury: Callable[[Path, random.Random], None]) -> Outcome:
        assert command.check is not None
        shutil.copytree(self._home.of(command.name), self._folder)
        name = self._rng.choice(self._home.covered(command))
        injury(self._folder / name, self._rng)
        ran = self._runner.run(command.check(self._folder), kill_after=injuries.PATIENCE)
        wrong = f"{name} is another, and nobody was told" if not ran.code else untold(ran)
        shutil.copy(self._home.of(command.name) / name, self._folder / name)
        mended = self._runner.run(command.check(self._folder), kill_after=injuries.PATIENCE)
        return Outcome(True, lost=f"{mended.code}: {mended.err[-300:]}" if mended.code else "", wrong=wrong)


def untold(ran: Ran) -> str:
    """What is amiss where a command failed without an error in one sentence."""
    errors = [line for line in ran.err.splitlines() if line.startswith("error: ")]
    if ran.killed:
        return f"it hangs: {ran.err[-300:]}"
    told = ran.code in (1, 2) and errors and not any("unexpected" in line for line in errors)
    return "" if told else f"{ran.code} without a sentence: {ran.err[-300:]}"
