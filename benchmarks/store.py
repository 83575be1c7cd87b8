"""A store's first token and its writing: `python -m benchmarks.store --store STORE [--store STORE …]`.

First token: a fresh process opens the store with its model and puts a question, with the files of store and
indexes dropped from the system's page cache, and again with them in it. Imports are told apart: a server pays
for them once. Beside it stands the time in which all files of the store are read in order from the disk. On a
virtual machine the host may hold in its memory what was dropped here: then that time tells.

Writing: `KVStoreWriter` with random keys and values, checksums and flushing to the disk included, against a
plain file of as many bytes, flushed too; the two take turns.
"""

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
from typing import Any

import numpy as np

from benchmarks import history
from benchmarks.decode import ways
from offload_decode.kv.indexes import indexes_folder
from offload_decode.store.format import KV_KINDS, Manifest, stored_types, token_hash
from offload_decode.store.reader import KVStore
from offload_decode.store.writer import KVStoreWriter
from offload_decode.types import Document, LayerKind, ModelShape

CHUNK = 2048  # tokens that are appended and committed at once
PIECE = 4 << 20  # bytes of a read or a write of plain files
ROOT = Path(__file__).parent.parent


First = dict[str, Any]
"""A way with a store, `cold` or not: medians of what `first_token` prints in fresh processes; `seconds` until
the first token, without the imports; and `read`, those in which the store is read in order."""


@dataclass(frozen=True)
class Writing:
    """Bytes of a store, and medians of the seconds in which it and a plain file of its size were written."""

    kv: str
    bytes: int
    store: float
    plain: float

    @property
    def share(self) -> float:
        """Of the plain file's speed."""
        return self.plain / self.store


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
            seconds = medians["open"] + medians["question"]
            rows.append(
                {"way": way, "cold": cold, "read": read, **medians, "tokens": tokens, "seconds": seconds}
            )
    return rows


def first_token(
    path: Path, way: str, options: dict[str, str], cold: bool, repetitions: int
) -> dict[str, float]:
    """Fresh processes, each with the store dropped before it, or read by the one before."""
    command = [sys.executable, "-m", "benchmarks.first_token", str(path.absolute()), way.partition(",")[0]]
    command += [f"{name}={value}" for name, value in options.items()]
    runs = []
    for _ in range(repetitions):
        if cold:
            drop(path)
        ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
        runs.append(json.loads(ran.stdout))
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


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
    stores, plains, size = [], [], 0
    for turn in range(repetitions):
        path = folder / f"{kv}-{turn}.kv"
        stores.append(_write_store(path, manifest, ids, chunk))
        size = sum(file.stat().st_size for file in files_of(path))
        plains.append(_write_plain(folder / "plain", size))
    return Writing(kv, size, statistics.median(stores), statistics.median(plains))


def _write_store(path: Path, manifest: Manifest, ids: np.ndarray, chunk: np.ndarray) -> float:
    """Its seconds."""
    began = time.perf_counter()
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
    return time.perf_counter() - began


def _write_plain(path: Path, size: int) -> float:
    """Its seconds."""
    began = time.perf_counter()
    piece = np.random.default_rng(0).bytes(PIECE)
    with open(path, "wb", buffering=0) as file:
        for start in range(0, size, PIECE):
            file.write(piece[: size - start])
        os.fsync(file.fileno())
    return time.perf_counter() - began


def show_first(rows: Sequence[First]) -> str:
    """A table of first tokens."""
    heads = ["way", "stored tokens", "files", "imports, s", "open, s", "question, s", "of it search, s"]
    heads += ["attend, s", "first token, s", "x reading all", "waits for a page", "read, MB"]
    parts = ("imports", "open", "question", "search", "attend", "seconds")
    cells = [
        [
            row["way"],
            f"{row['tokens']:,}",
            "cold" if row["cold"] else "warm",
            *(f"{row[part]:.2f}" for part in parts),
            f"{row['seconds'] / row['read']:.2f}x",
            f"{row['faults']:,.0f}",
            f"{row['disk'] / 1e6:,.0f}",
        ]
        for row in rows
    ]
    return history.table(heads, cells)


def show_written(rows: Sequence[Writing]) -> str:
    """A table of what was written."""
    heads = ["--kv", "MB", "store, MB/s", "plain file, MB/s", "of the plain file's speed"]
    cells = [
        [row.kv, *(f"{row.bytes / 1e6 / s:,.0f}" for s in (1, row.store, row.plain)), f"{row.share:.0%}"]
        for row in rows
    ]
    return history.table(heads, cells)


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = history.option_parser(__doc__)
    parser.add_argument(
        "--store", type=Path, action="append", required=True, help="its model is loaded, on the CPU"
    )
    parser.add_argument("--budget", default="1024", help="stored tokens for each query, of topk and quest")
    parser.add_argument("--repetitions", type=int, default=3, help="processes, and stores that are written")
    parser.add_argument("--written-tokens", type=int, default=16_384, help="of the stores that are written")
    parser.add_argument("--folder", type=Path, help="where these are written; default: beside the store")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.repetitions, arguments.written_tokens, arguments.budget = 1, 2100, "16"
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parsed(argv)
    host = history.begin(arguments, "First tokens, and writing")
    firsts: list[First] = []
    for path in arguments.store:
        firsts += first_tokens(path, arguments.budget, arguments.repetitions, 1 if arguments.quick else None)
    print(f"{show_first(firsts)}\n", flush=True)
    with TemporaryDirectory(prefix="written-", dir=arguments.folder or arguments.store[0].parent) as folder:
        writings = [
            written(Path(folder), kv, arguments.written_tokens, arguments.repetitions) for kv in KV_KINDS
        ]
    print(show_written(writings))
    figures = {}
    for row in firsts:
        name = f"{row['way']}/{row['tokens']}/{'cold' if row['cold'] else 'warm'}"
        figures[f"{name}/first token"] = row["seconds"]
        figures[f"{name}/x reading all"] = row["seconds"] / row["read"]
    figures |= {f"written/{row.kv}/of a plain file": row.share for row in writings}
    settings = {"budget": arguments.budget, "stored tokens": sorted({row["tokens"] for row in firsts})}
    details = {"first": firsts, "written": [asdict(row) for row in writings]}
    history.save(arguments, "store", settings, figures, host, **details)


if __name__ == "__main__":
    main()
