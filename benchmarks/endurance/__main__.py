"""What commands survive: `python -m benchmarks.endurance --minutes 60 --folder FOLDER`.

In rounds drawn by chance, every command is injured in every way: killed at a random moment, capped in memory
or in the size of a file, run on a disk that fills up; and what it left has a bit flipped or a file cut, which
`verify` (of what was pushed, `pull`) must tell. Then the same command again must end as if nothing had
happened, byte for byte. A server answers after every round, always the same, in memory that does not grow;
others are killed while they answer. One table at the end; exits with 1 where anything was lost or wrong.
Commands run in forks of one process that has everything imported. Needs the repository with its test tools
(`make test`).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks import servers
from benchmarks.endurance.commands import Home, commands, inputs
from benchmarks.endurance.rounds import Outcome, Rounds
from benchmarks.endurance.serving import Steady, is_flat, killed
from benchmarks.endurance.tally import Tally
from benchmarks.machine import versions
from cli import output
from indexes.registry import usable
from tests.prefill_jobs.killing import Disk, Runner

Round = tuple[str, str, Callable[[], Outcome]]

DISK = 256 << 20


def dealt(rounds: Sequence[Round], rng: random.Random) -> Iterator[Round]:
    """All rounds in an order by chance, again and again: each comes as often as any other."""
    while True:
        yield from rng.sample(rounds, len(rounds))


def endure(home: Path, minutes: float, words: int, rng: random.Random) -> tuple[Tally, list[int]]:
    """Rounds for so many minutes, in a folder that is empty: what came of them, and the bytes of the server's
    own memory after each.
    """
    until = time.monotonic() + 60 * minutes
    inputs(home / "inputs", words, rng)
    known = commands(home / "inputs", usable())
    with Runner() as runner:
        whole = Home(runner, home / "whole")
        for command in known:
            whole.add(command)
            _say(f"alone: {command.name}, {whole.alone[command.name].seconds:.1f} s")
        disk = Disk(runner, home / "disk", DISK) if runner.has_disks else None
        rounds = Rounds(runner, whole, home / "round", disk, rng)
        store, log = whole.of("prefill") / "a.kv", home / "server.log"
        with servers.ours([store], log, "--memory-for-turns", "32MiB") as server:
            steady, tally = Steady(server), Tally()
            deck = [(each.name, injury, run) for each in known for injury, run in rounds.of(each).items()]
            deck.append(("serve", "killed", lambda: killed(store, log, rng.uniform(0, 1), steady.expected)))
            for number, (name, injury, run) in enumerate(dealt(deck, rng), start=1):
                began = time.monotonic()
                outcome = run()
                tally.add(name, injury, outcome, time.monotonic() - began)
                if outcome.lost or outcome.wrong:
                    rounds.keep(home / f"failed-{number}")
                rounds.clear()
                tally.add("serve", "asked again", steady.ask(), 0.0)
                left = until - time.monotonic()
                _say(
                    f"{number:,} ({len(deck):,} a deal): {name}, {injury}; {tally.total().lost} lost, "
                    f"{tally.total().wrong} wrong; {output.duration(max(0.0, left))} left"
                )
                if left < 0:
                    break
    return tally, steady.memory


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--folder", type=Path, help="where all of it happens, empty; else a temporary folder")
    parser.add_argument("--words", type=int, default=600, help="length of the text")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="save what came of it")
    given = parser.parse_args(argv)
    if given.folder is not None:
        given.folder.mkdir(parents=True, exist_ok=True)
        if any(given.folder.iterdir()):
            parser.error(f"{given.folder} is not empty: choose another --folder")
    # Loops that are compiled once and for all, which tests keep elsewhere.
    os.environ.setdefault("XDG_CACHE_HOME", str(Path.home() / ".cache"))
    home = (
        nullcontext(given.folder) if given.folder else TemporaryDirectory(prefix="offload-decode-endurance-")
    )
    with home as folder:
        tally, memory = endure(Path(folder).absolute(), given.minutes, given.words, random.Random(given.seed))
    flat = is_flat(memory)
    print(tally.text())
    print(
        f"the server's own memory: {memory[0] / 1e6:,.0f} MB at first, {memory[-1] / 1e6:,.0f} MB at last, "
        f"{max(memory) / 1e6:,.0f} MB at most: {'flat' if flat else 'IT GREW'}"
    )
    for words in tally.words:
        print(words)
    if given.json is not None:
        settings = {name: getattr(given, name) for name in ("minutes", "words", "seed")}
        saved = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "settings": settings,
            "versions": versions(),
            "rounds": tally.saved(),
            "amiss": tally.words,
            "server memory": memory,
            "flat": flat,
        }
        given.json.write_text(json.dumps(saved, indent=1) + "\n", encoding="utf-8")
    sys.exit(bool(tally.total().lost or tally.total().wrong or not flat))


if __name__ == "__main__":
    main()
