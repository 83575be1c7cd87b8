"""What happens to a command, or to what it left."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

from tests.prefill_jobs.killing import Disk, Ran, Runner

Injury = Callable[[Runner, list[str], Ran, random.Random], Ran]
"""Runs a command while something happens to it, and tells how it ended; `Ran` is of the command alone."""

PATIENCE = 300.0
"""Seconds after which a command hangs, and is killed."""

# Powers of two: bytes beyond what the imports take, and of a file, which standard error is too.
_MEMORY = 23, 29
_FILE = 13, 18


def kill(runner: Runner, command: list[str], alone: Ran, rng: random.Random) -> Ran:
    """SIGKILL at a change of the file system, or at any moment."""
    if alone.steps and rng.random() < 0.5:
        return runner.run(command, kill_at=rng.randint(1, alone.steps))
    return runner.run(command, kill_after=rng.uniform(0, alone.seconds))


def memory(runner: Runner, command: list[str], alone: Ran, rng: random.Random) -> Ran:
    """A cap of the memory that the process may allocate."""
    return runner.run(command, kill_after=PATIENCE, memory=int(2 ** rng.uniform(*_MEMORY)))


def file_size(runner: Runner, command: list[str], alone: Ran, rng: random.Random) -> Ran:
    """A limit on the size of a file, as a quota or an old file system has it."""
    return runner.run(command, kill_after=PATIENCE, limit=int(2 ** rng.uniform(*_FILE)))


def full(disk: Disk, needed: int) -> Injury:
    """A disk that has room for some of the `needed` bytes."""

    def fill(runner: Runner, command: list[str], alone: Ran, rng: random.Random) -> Ran:
        disk.leave(rng.randrange(max(1, needed)))
        try:
            return runner.run(command, kill_after=PATIENCE)
        finally:
            disk.free()

    return fill


def flip(file: Path, rng: random.Random) -> None:
    """Another bit, somewhere in a file."""
    bit = rng.randrange(8 * file.stat().st_size)
    with open(file, "r+b") as opened:
        opened.seek(bit // 8)
        byte = opened.read(1)[0]
        opened.seek(bit // 8)
        opened.write(bytes([byte ^ 1 << bit % 8]))


def cut(file: Path, rng: random.Random) -> None:
    """A shorter file."""
    os.truncate(file, rng.randrange(file.stat().st_size))


RUNNING: dict[str, Injury] = {"killed": kill, "memory cap": memory, "file size limit": file_size}
LYING: dict[str, Callable[[Path, random.Random], None]] = {"bit flipped": flip, "file cut": cut}
FULL = "disk full"
