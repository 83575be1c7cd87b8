"""A store's first token and its writing: `python -m benchmarks.store --store STORE [--store STORE …]`.

First token: a fresh process opens the store with its model and puts a question, with the files of store and
indexes dropped from the system's page cache, and again with them in it. Imports are told apart: a server pays
for them once. Beside it stands the time in which all files of the store are read in order from the disk. On a
virtual machine the host may hold in its memory what was dropped here: then that time tells.

Writing: `KVStoreWriter` with random keys and values, checksums and flushing to the disk included, against a
plain file of as many bytes, flushed too; the two take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from benchmarks import history, machine, tables
from offload_decode.indexes import registry
from offload_decode.kv.indexes import indexes_folder
from offload_decode.store.format import KV_KINDS, Manifest, stored_types, token_hash
from offload_decode.store.reader import KVStore
from offload_decode.store.writer import KVStoreWriter
from offload_decode.types import Document, LayerKind, ModelShape

CHUNK = 2048  # tokens that are appended and committed at once
PIECE = 4 << 20  # bytes of a read or a write of plain files
ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class First:
    """Medians of the seconds of some fresh processes; question: with search and attend in it; read: in which
    the store is read in order. faults: times that a page was waited for; disk: bytes that were read from it.
    """

    tokens: int
    read: float
    way: str
    cold: bool
    imports: float
    open: float
    question: float
    search: float
    attend: float
    faults: float
    disk: float

    @property
    def seconds(self) -> float:
        """Until the first token, without the imports."""
        return self.open + self.question


@dataclass(frozen=True)
class Writing:
    """Bytes of a store, and medians of the seconds in which it and a plain file of its size were written."""

    kv: str
    bytes: int
    store: float
    plain: float


def files_of(path: Path) -> Iterator[Path]:
    """All files of a store and of the indexes beside it."""
    for folder in (path, indexes_folder(path)):
        yield from (file for file in folder.rglob("*") if file.is_file())


def drop(path: Path) -> None:
    """Take a store out of the page cache."""
    for file in files_of(path):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # pages that are not written yet would stay
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def read_all(path: Path) -> tuple[int, float]:
    """Bytes of a store, and the seconds that reading them in order takes from the disk."""
    drop(path)
    buffer, total, began = bytearray(PIECE), 0, time.perf_counter()
    for file in sorted(path.rglob("*")):
        if file.is_file():
            with open(file, "rb", buffering=0) as opened:
                while got := opened.readinto(buffer):
                    total += got
    return total, time.perf_counter() - began


def first_tokens(path: Path, budget: str, repetitions: int, most: int | None) -> list[First]:
    """Every way with a store, or the first `most` of them, cold and warm."""
    tokens = KVStore.open(path).manifest.n_tokens
    size, read = read_all(path)
    print(
        f"{tokens:,} tokens: {size / 1e6:,.0f} MB, read from the disk in {read:.2f} s "
        f"({size / 1e6 / read:,.0f} MB/s)\n"
    )
    rows = []
    for way, options in list(ways(path, budget).items())[:most]:
        first_token(path, way, options, False, 1)  # what is compiled and verified once, is
        for cold in (True, False):
            print(f"{way}, {'cold' if cold else 'warm'}", file=sys.stderr, flush=True)
            medians = first_token(path, way, options, cold, repetitions)
            rows.append(First(tokens, read, way, cold, **medians))
    return rows


def first_token(
    path: Path, way: str, options: dict[str, str], cold: bool, repetitions: int
) -> dict[str, float]:
    """Fresh processes, each with the store dropped before it, or read by the one before."""
    command = [sys.executable, "-m", "benchmarks.first_token", str(path.absolute()), way.partition(",")[0]]
    command += [f"{name}={value}" for name, value in options.items()]
    found = []
    for _ in range(repetitions):
        if cold:
            drop(path)
        ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
        found.append(json.loads(ran.stdout))
    return {
        name: statistics.median(run[name] for run in found)
        for name in ("imports", "open", "question", "search", "attend", "faults", "disk")
    }


def ways(path: Path, budget: str) -> dict[str, dict[str, str]]:
    """Our ways: the options of each."""
    found = indexes_folder(path)
    kinds = [kind for kind in registry.kinds() if kind == "flat" or (found / kind).is_dir()]
    return {
        **{f"topk, {kind}": {"budget": budget, "index": kind} for kind in kinds},
        "quest": {"budget": budget, "dense_layers": ""},
    }


def written(folder: Path, kv: str, tokens: int, repetitions: int) -> Writing:
    """A store of random keys and values of 4 layers, 8 KV heads and 128 channels, and a plain file."""
    shape = ModelShape.uniform((LayerKind.FULL,) * 4, query_heads=32, kv_heads=8, head_dim=128)
    ids = np.arange(tokens, dtype=np.int32)
    manifest = Manifest(
        model_id="random",
        model_config_hash="0" * 64,
        weights_hash="0" * 64,
        tokenizer_hash="",
        template="plain",
        dtype="float16",
        rope={},
        shape=shape,
        n_tokens=tokens,
        token_hash=token_hash(ids),
        kv=stored_types(kv, "float16", shape),
        prefill={"method": "none"},
        query_samples=1024,
    )
    chunk = np.random.default_rng(0).standard_normal((8, CHUNK, 128), np.float32).astype(np.float16)
    seconds: dict[str, list[float]] = {"store": [], "plain": []}
    size = 0
    for turn in range(repetitions):
        path = folder / f"{kv}-{turn}.kv"
        began = time.perf_counter()
        _write_store(path, manifest, ids, chunk)
        seconds["store"].append(time.perf_counter() - began)
        size = sum(file.stat().st_size for file in files_of(path))
        began = time.perf_counter()
        _write_plain(folder / "plain", size)
        seconds["plain"].append(time.perf_counter() - began)
    return Writing(kv, size, statistics.median(seconds["store"]), statistics.median(seconds["plain"]))


def _write_store(path: Path, manifest: Manifest, ids: np.ndarray, chunk: np.ndarray) -> None:
    with KVStoreWriter.open(path, manifest, ids, [Document("random", 0, len(ids))]) as writer:
        for start in range(0, len(ids), CHUNK):
            stop = min(start + CHUNK, len(ids))
            rows = chunk[:, : stop - start]
            for layer in manifest.shape.full_layers:
                writer.append(layer, rows, rows)
                slots, positions, _ = writer.samples(start, stop)
                writer.put_queries(layer, slots, rows[:, positions - start])
            writer.commit(stop)
        writer.publish()


def _write_plain(path: Path, size: int) -> None:
    piece = np.random.default_rng(0).bytes(PIECE)
    with open(path, "wb", buffering=0) as file:
        for start in range(0, size, PIECE):
            file.write(piece[: size - start])
        os.fsync(file.fileno())


def show_first(rows: Sequence[First]) -> str:
    """A table of first tokens."""
    heads = ["way", "stored tokens", "files", "imports, s", "open, s", "question, s", "of it search, s"]
    heads += ["attend, s", "first token, s", "x reading all", "waits for a page", "read, MB"]
    return tables.table(
        heads,
        [
            [
                row.way,
                f"{row.tokens:,}",
                "cold" if row.cold else "warm",
                *(f"{n:.2f}" for n in (row.imports, row.open, row.question, row.search, row.attend)),
                f"{row.seconds:.2f}",
                f"{row.seconds / row.read:.2f}x",
                f"{row.faults:,.0f}",
                f"{row.disk / 1e6:,.0f}",
            ]
            for row in rows
        ],
    )


def show_written(rows: Sequence[Writing]) -> str:
    """A table of what was written."""
    heads = ["--kv", "MB", "store, MB/s", "plain file, MB/s", "of the plain file's speed"]
    cells = [
        (
            row.kv,
            row.bytes / 1e6,
            row.bytes / 1e6 / row.store,
            row.bytes / 1e6 / row.plain,
            row.plain / row.store,
        )
        for row in rows
    ]
    return tables.table(
        heads, [[kv, *(f"{n:,.0f}" for n in numbers), f"{share:.0%}"] for kv, *numbers, share in cells]
    )


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--store", type=Path, action="append", required=True, help="its model is loaded, on the CPU"
    )
    parser.add_argument("--budget", default="1024", help="stored tokens for each query, of topk and quest")
    parser.add_argument("--repetitions", type=int, default=3, help="processes, and stores that are written")
    parser.add_argument("--written-tokens", type=int, default=16_384, help="of the stores that are written")
    parser.add_argument("--folder", type=Path, help="where these are written; default: beside the store")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that everything runs")
    parser.add_argument("--json", type=Path, help="save everything that was measured")
    parser.add_argument("--results", type=Path, default=history.RESULTS, help="for the plot and the history")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.repetitions, arguments.written_tokens, arguments.budget = 1, 2100, "16"
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parsed(argv)
    host = machine.measure(1 << 22) if arguments.quick else machine.measure()
    print(f"# First tokens, and writing\n\n{host.lines()}\n")
    firsts: list[First] = []
    for path in arguments.store:
        firsts += first_tokens(path, arguments.budget, arguments.repetitions, 1 if arguments.quick else None)
    print(f"{show_first(firsts)}\n", flush=True)
    with TemporaryDirectory(prefix="written-", dir=arguments.folder or arguments.store[0].parent) as folder:
        writings = [
            written(Path(folder), kv, arguments.written_tokens, arguments.repetitions) for kv in KV_KINDS
        ]
    print(show_written(writings))
    figures = {
        f"{row.way}/{row.tokens}/{'cold' if row.cold else 'warm'}/{name}": value
        for row in firsts
        for name, value in (("first token", row.seconds), ("x reading all", row.seconds / row.read))
    }
    figures |= {f"written/{row.kv}/of a plain file": row.plain / row.store for row in writings}
    settings = {"budget": arguments.budget, "stored tokens": sorted({row.tokens for row in firsts})}
    if arguments.json:
        saved = {"settings": settings, **machine.made_with(host), "figures": figures}
        saved |= {"first": [asdict(row) for row in firsts], "written": [asdict(row) for row in writings]}
        arguments.json.write_text(json.dumps(saved, indent=1) + "\n", encoding="utf-8")
    if not arguments.quick:
        panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
        for row in firsts:
            panel = panels.setdefault("dropped from the page cache" if row.cold else "in the page cache", {})
            panel.setdefault(row.way, []).append((row.tokens, row.seconds))
            panel.setdefault("reading the store in order", []).append((row.tokens, row.read))
        tables.draw(
            arguments.results / "store.png",
            "From opening a store to the first token, imports apart",
            panels,
            across="stored tokens",
            up="seconds",
            footnote=host.lines(),
        )
        history.append(arguments.results, "store", settings, figures, host)


if __name__ == "__main__":
    main()
