"""What it costs that every commit is on the disk: a store of random rows, written with and without flushes.

    python -m benchmarks.durability [--tokens 100000] [--folder .]

The rows take no time to compute, so the share of a real prefill is smaller. Each way is timed in turn, on the
disk of FOLDER; memory that looks like a disk shows nothing.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np

from indexes import durable
from offload_decode.store.format import Manifest, token_hash
from offload_decode.store.writer import KVStoreWriter
from offload_decode.types import Document, LayerKind, ModelShape

LAYERS, HEADS, DIM, CHUNK, REPEATS = 8, 4, 64, 2048, 3


def written(path: Path, tokens: int, synced: bool) -> tuple[float, float]:
    """Seconds in which a store is written, and those of a commit (their median)."""
    shape = ModelShape.uniform((LayerKind.FULL,) * LAYERS, 2 * HEADS, HEADS, DIM, None)
    ids = np.arange(tokens, dtype=np.int32)
    manifest = Manifest(
        model_id="random",
        model_config_hash="",
        weights_hash="",
        tokenizer_hash="",
        dtype="float16",
        shape=shape,
        rope={},
        n_tokens=tokens,
        token_hash=token_hash(ids),
        prefill={"method": "dense", "chunk": CHUNK},
    )
    rows = np.random.default_rng(0).standard_normal((HEADS, CHUNK, DIM), np.float32).astype(np.float16)
    commits = []
    began = time.perf_counter()
    with (
        durable.synced(synced),
        KVStoreWriter.open(path, manifest, ids, [Document("all", 0, tokens)]) as writer,
    ):
        for start in range(0, tokens, CHUNK):
            stop = min(start + CHUNK, tokens)
            for layer in range(LAYERS):
                writer.append(layer, rows[:, : stop - start], rows[:, : stop - start])
                slots, positions, _ = writer.samples(start, stop)
                writer.put_queries(layer, slots, np.resize(rows, (HEADS, len(positions), DIM)))
            at = time.perf_counter()
            writer.commit(stop)
            commits.append(time.perf_counter() - at)
        writer.publish()
    return time.perf_counter() - began, median(commits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--folder", type=Path, default=Path())
    given = parser.parse_args()
    found: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for _ in range(REPEATS):
        for synced in (True, False):
            with TemporaryDirectory(dir=given.folder) as folder:
                found[synced].append(written(Path(folder, "s"), given.tokens, synced))
    size = 2 * LAYERS * HEADS * DIM * 2 * given.tokens
    for synced, name in ((True, "on the disk at every commit"), (False, "--no-sync")):
        whole, commit = (median(each) for each in zip(*found[synced], strict=True))
        print(
            f"{name}: {whole:.1f} s for {given.tokens:,} tokens ({size / 1e6:,.0f} MB of keys and values), "
            f"{1000 * commit:.1f} ms a commit of {CHUNK:,} tokens"
        )


if __name__ == "__main__":
    main()
