"""Memory beside tokens: a store of 1, 3 and 10 million tokens is written, opened, indexed and asked.

    python -m benchmarks.long_store --out FOLDER

One layer, one KV head of 64 channels in float16, made-up keys: most lie around a few thousand means, and a
few are long, as those of models are. Each stage is a process of its own, and what is printed is its anonymous
memory (RssAnon) at the most, beyond what it held when it began: pages of mapped files are not counted, as the
system drops them at need.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from indexes import durable
from offload_decode.engine.step import StoredPrefix
from offload_decode.kv.host import HostKV
from offload_decode.memory import Peak, own_memory
from offload_decode.store.format import Manifest, token_hash
from offload_decode.store.reader import KVStore
from offload_decode.store.writer import KVStoreWriter
from offload_decode.types import Document, LayerKind, ModelShape
from prefill_jobs.build import build_indexes

SHAPE = ModelShape.uniform((LayerKind.FULL,), query_heads=4, kv_heads=1, head_dim=64)
CHUNK = 1 << 16
MEANS = 4096
STEPS = 20


def chunk_of(start: int, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values `[1, T, 64]` of a chunk, the same whatever came before."""
    means = np.random.default_rng(0).standard_normal((MEANS, 64), np.float32)
    rng = np.random.default_rng(start + 1)
    near = means[rng.integers(0, MEANS, tokens)] + 0.5 * rng.standard_normal((tokens, 64), np.float32)
    keys = near * rng.lognormal(0, 0.3, (tokens, 1)).astype(np.float32)
    values = rng.standard_normal((tokens, 64), np.float32)
    return keys[None].astype(np.float16), values[None].astype(np.float16)


def queries_of(count: int, seed: int) -> np.ndarray:
    """Queries `[count, 64]` that have a few keys to find: each is near a mean."""
    means = np.random.default_rng(0).standard_normal((MEANS, 64), np.float32)
    rng = np.random.default_rng(seed)
    return means[rng.integers(0, MEANS, count)] + 0.3 * rng.standard_normal((count, 64), np.float32)


def write(path: Path, tokens: int) -> str:
    """The store, chunk by chunk."""
    ids = (np.arange(tokens, dtype=np.int32) * 7919) % 50_000
    manifest = Manifest(
        model_id="made up",
        model_config_hash="",
        weights_hash="",
        tokenizer_hash="",
        dtype="float16",
        shape=SHAPE,
        rope={},
        n_tokens=tokens,
        token_hash=token_hash(ids),
        prefill={"method": "made up"},
    )
    with KVStoreWriter.open(path, manifest, ids, [Document("made up", 0, tokens)]) as writer:
        for start in range(0, tokens, CHUNK):
            stop = min(tokens, start + CHUNK)
            writer.append(0, *chunk_of(start, stop - start))
            slots, _, _ = writer.samples(start, stop)
            asked = queries_of(slots.stop - slots.start, start + 1)
            writer.put_queries(0, slots, asked[None].astype(np.float16))
            writer.commit(stop)
        writer.publish()
    return f"{sum(file.stat().st_size for file in path.rglob('*')) / 1e9:.2f} GB"


def opened(path: Path, tokens: int) -> str:
    """The store, and the name of its contents."""
    return KVStore.open(path).store_digest[:8]


def index(path: Path, tokens: int) -> str:
    """The clusters, the default."""
    report = build_indexes(path, "clusters")
    return f"{report.bytes / 1e9:.2f} GB, recall@100 {report.recall:.3f}"


def answer(path: Path, tokens: int) -> str:
    """Steps of one layer: searched, and attended to 1,024 tokens a query head."""
    prefix = StoredPrefix.over(HostKV(KVStore.open(path), torch.device("cpu")), SHAPE, "topk", {})
    steps = torch.from_numpy(queries_of(4 * STEPS, 1)).reshape(STEPS, 1, 4, 1, 64)
    seconds = []
    for query in steps:
        began = time.perf_counter()
        prefix.attend(0, query, 64**-0.5, None)
        seconds.append(time.perf_counter() - began)
    search = prefix.selector.report()["index"]
    return f"{1000 * float(np.median(seconds)):.1f} ms a step, searching the {search}"


def measured(stage: Callable[[Path, int], str], path: Path, tokens: int) -> tuple[float, float, str]:
    """MiB at the most beyond what the process held, seconds, and what the stage says."""
    before, began = own_memory(), time.perf_counter()
    with Peak() as peak, durable.synced(False):
        told = stage(path, tokens)
    return (peak.bytes - before) / 2**20, time.perf_counter() - began, told


def in_a_process(*given: Any) -> tuple[float, float, str]:
    """`measured` in a new process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measured, given)


def lines(folder: Path, counts: list[int]) -> Iterator[str]:
    """What each stage took, at every size."""
    for tokens in counts:
        path = folder / f"{tokens}.kv"
        for stage in (write, opened, index, answer):
            most, seconds, told = in_a_process(stage, path, tokens)
            yield f"{tokens:>11,} tokens  {stage.__name__:7} {most:7.0f} MiB {seconds:7.1f} s  {told}"
        shutil.rmtree(path)
        shutil.rmtree(path.with_name(path.name + ".indexes"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, help="a folder with room for a store; it is left empty")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1_000_000, 3_000_000, 10_000_000])
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.out) as folder:
        for line in lines(Path(folder), given.tokens):
            print(line, flush=True)


if __name__ == "__main__":
    main()
