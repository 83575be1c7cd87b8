"""What a prefill and its indexes survive: `python -m benchmarks.endurance --kills 100 --flips 1000`.

Kills (SIGKILL) at random moments of prefill and index building, each resumed by the same commands and
compared with an unbroken run, bit for bit; bit flips over every file of the store and of its indexes, each
looked for by `verify`; and a small disk that fills up at many points, made roomy, and resumed. Prints one
table; exits with 1 where anything did not hold. Needs the repository with its test tools (`make test`).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import typer

from cli import output
from cli.verify import verify
from tests.prefill_jobs import killing
from tests.prefill_jobs.killing import Disk, Job, Runner, kill_at_random, tree

Row = tuple[str, str, str]


def kills(job: Job, count: int, rng: random.Random) -> Iterator[Row]:
    """Rows of the kills by stage, and how many ends were another than an unbroken run's."""
    stages, spoilt = kill_at_random(job, count, rng)
    for name, number in sorted(stages.items()):
        yield f"killed: {name}", f"{number:,}", ""
    yield "kills in all, resumed", f"{count:,}", held(len(spoilt), "bit-identical")


def flips(store: Path, count: int, rng: random.Random) -> Row:
    """Flip one bit, verify, flip it back: every file at least once, the others by chance over all bytes."""
    files = sorted(
        file for root in (store, Path(f"{store}.indexes")) for file in root.rglob("*") if file.is_file()
    )
    sizes = [file.stat().st_size for file in files]
    unseen = 0
    for file in files[:count] + rng.choices(files, sizes, k=max(0, count - len(files))):
        bit = rng.randrange(8 * file.stat().st_size)
        _flip(file, bit)
        name = str(file.relative_to(store.parent)).partition("/")[2]
        unseen += not any(name in problem for problem in problems(store))
        _flip(file, bit)
    unseen += len(problems(store))
    return f"bits flipped, over {len(files):,} files", f"{count:,}", held(unseen, "found and named by verify")


def problems(store: Path) -> list[str]:
    """What `offload-decode verify` says."""
    out = io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.suppress(typer.Exit),
    ):
        verify(store, as_json=True, quiet=True)
    return list(json.loads(out.getvalue())["problems"])


def full_disks(runner: Runner, job: Job, disk: Disk, times: int) -> Row:
    """Run the job with ever more room: where it is too little there is one sentence, and a resume."""
    needed = sum(-(-len(data) // killing.PAGE) for data in job.whole.values()) * killing.PAGE
    commands, sentences, wrong = job.commands(disk.folder), 0, 0
    for room in range(0, needed, max(1, needed // times)):
        disk.leave(room)
        ran = runner.run(*commands)
        disk.free()
        if ran.code:
            told = [line for line in ran.err.splitlines() if line.startswith("error: ")]
            clear = (
                ran.code == 1 and len(told) == 1 and "No space left" in told[0] and "Traceback" not in ran.err
            )
            sentences += clear
            wrong += not clear
            published = (disk.seen / "store.kv").exists()
            wrong += runner.run(*commands[int(published) :]).code != 0
        wrong += tree(disk.seen) != job.whole
        disk.empty()
    return "disks that filled up", f"{sentences:,}", held(wrong, "a sentence, then a resume, bit-identical")


def held(failures: int, what: str) -> str:
    return what if not failures else f"FAILED {failures:,} times: not {what}"


def _flip(file: Path, bit: int) -> None:
    data = bytearray(file.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--disks", type=int, default=20, help="how often a disk is to fill up")
    parser.add_argument("--corpus", type=Path, help="a text; one of some words is made where none is given")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--kinds", default="clusters,faiss-ivf,faiss-hnsw", help="indexes to build")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "prefill", nargs="*", help="further options of prefill, after --: -- --method quoka -o chunk=64"
    )
    arguments = parser.parse_args()
    rng, began = random.Random(arguments.seed), time.perf_counter()
    with TemporaryDirectory(prefix="offload-decode-endurance-") as home, Runner() as runner:
        corpus = arguments.corpus or Path(home, "corpus.txt")
        if arguments.corpus is None:
            corpus.write_text(" ".join(rng.choice(["corpus", "key", "value"]) for _ in range(600)))
        options = arguments.prefill or ["-o", "chunk=64"]

        def commands(folder: Path) -> list[list[str]]:
            store = folder / "store.kv"
            prefill = killing.prefill(corpus.absolute(), arguments.model, store, *options)
            return [prefill, *(killing.index(store, kind) for kind in arguments.kinds.split(","))]

        job = Job(runner, Path(home, "job"), commands)
        rows: list[Row] = [("what was done", "times", "what held")]
        rows += kills(job, arguments.kills, rng)
        job.clear()
        job.resume()
        rows.append(flips(job.store, arguments.flips, rng))
        if runner.has_disks:
            size = 2 * sum(map(len, job.whole.values())) + 64 * 2**20
            rows.append(full_disks(runner, job, Disk(runner, Path(home, "disk"), size), arguments.disks))
        else:
            rows.append(("disks that filled up", "0", "skipped: it takes the right to mount a tmpfs"))
    print(output.table(rows))
    print(f"in {output.duration(time.perf_counter() - began)}", file=sys.stderr)
    sys.exit(any("FAILED" in row[2] for row in rows))


if __name__ == "__main__":
    main()
