"""A collection: stores and questions a second, what the list of documents costs, and what a thousand machines
would meet.

    python -m benchmarks.collection --texts FOLDER --documents 200 --workers 1 2

cuts documents out of the texts of a folder, collects them with the shipped model, and asks each one question.
With --out the collection stays, and another run goes on with it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from offload_decode import Engine
from offload_decode.collections.collection import Collection
from offload_decode.collections.journal import Entry, Journal, read
from offload_decode.collections.words import WORDS, ranked
from offload_decode.memory import Peak, own_memory
from offload_decode.models.loading import load
from offload_decode.store.reader import KVStore
from prefill_jobs.collect import Maker, collect
from prefill_jobs.job import Settings

FILES = "/proc/self/fd"
QUESTION = "What is the special magic number for brisk-lantern mentioned in the provided text?"


def cut(texts: Path, documents: int, characters: int, out: Path) -> None:
    """Documents of a quarter to twice so many characters, each another part of the texts."""
    whole = "\n".join(path.read_text(errors="replace") for path in sorted(texts.rglob("*")) if path.is_file())
    rng = np.random.default_rng(0)
    for number in range(documents):
        length = int(characters * rng.choice([0.25, 0.5, 1, 2]))
        start = int(rng.integers(0, max(1, len(whole) - length)))
        (out / f"{number:05}.txt").write_text(f"Document {number}. {whole[start : start + length]}")


def answered(path: Path, documents: int, worker: int, workers: int) -> float:
    """Seconds in which one of several workers asks its share of the documents; loading is not counted."""
    collection, loaded = Collection(path), load("demo", "cpu")
    began = time.perf_counter()
    for entry in collection.entries[:documents][worker::workers]:
        Engine.open(KVStore.open(collection.store(entry)), loaded).answer(QUESTION, 16)
    return time.perf_counter() - began


def asked(path: Path, documents: int, workers: int) -> float:
    """Questions a second of so many processes, one to each of so many documents."""
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        shares = pool.starmap(answered, [(path, documents, worker, workers) for worker in range(workers)])
    return documents / max(shares)


def listed(counts: list[int], folder: Path) -> Iterator[str]:
    """What the list costs, of made-up documents."""
    for count in counts:
        path = folder / f"{count}.jsonl"
        path.touch()
        entry = Entry("2024/report-0000000.txt", "0" * 64, f"stores/ab/ab{'0' * 30}.kv", 9999, {"year": 2024})
        Journal(path).put(entry)
        line = path.read_bytes()
        path.write_bytes(b"".join(line.replace(b"0000000.txt", b"%07d.txt" % n) for n in range(count)))
        began = time.perf_counter()
        with Peak() as peak:
            held = len(read(path)[0])
        seconds = time.perf_counter() - began
        yield (
            f"a list of {held:,}: {path.stat().st_size / count:.0f} bytes a line, read in {seconds:.2f} s, "
            f"{peak.bytes / 2**20:,.0f} MiB in the process at most"
        )
    began = time.perf_counter()
    journal = Journal(path)
    opened = time.perf_counter()
    for number in range(100):
        journal.put(entry._replace(tokens=number + 1))
    each = (time.perf_counter() - opened) / 100
    yield f"a line added to it, flushed to the disk: {1000 * each:.2f} ms (opened in {opened - began:.2f} s)"


def opened(store: Path, count: int, folder: Path) -> str:
    """What opening so many stores takes, one after another: copies of one, by hard links."""
    paths = [folder / f"{number:06}.kv" for number in range(count)]
    for path in paths:
        shutil.copytree(store, path, copy_function=os.link)
    KVStore.open(store)
    before, files = own_memory(), len(os.listdir(FILES))
    times = []
    with Peak() as peak:
        for path in paths:
            began, processor = time.perf_counter(), time.process_time()
            KVStore.open(path)
            times.append((time.perf_counter() - began, time.process_time() - processor))
    own = sum(1 for path in store.rglob("*") if path.is_file())
    (half, busy), (worst, _) = np.median(times, 0), np.quantile(times, 0.99, 0)
    late = np.median(times[-count // 10 :], 0)[1]
    left = len(os.listdir(FILES)) - files
    return (
        f"{count:,} stores of {own} files opened: median {1000 * half:.1f} ms (p99 {1000 * worst:.1f}), "
        f"{1000 * busy:.1f} ms of processor time ({1000 * late:.1f} in the last tenth); "
        f"{(peak.bytes - before) / 2**20:.1f} MiB more at most, {left} files more left open"
    )


def fanned_out(machines: int, rng: np.random.Generator, spare: int = 1) -> tuple[float, float]:
    """Median and 99th percentile of the time, in units of one machine's median, until every machine has said
    which of its documents it would ask; of each, the first of `spare` copies counts.

    A machine's time is lognormal, with a hundredth of them ten times as slow (Dean and Barroso 2013).
    """
    shape = (1000, machines, spare)
    times = rng.lognormal(0, 0.3, shape) * np.where(rng.random(shape) < 0.01, 10, 1)
    last = times.min(-1).max(-1)
    return float(np.median(last)), float(np.quantile(last, 0.99))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--out", type=Path, help="a folder that keeps the texts and the collection")
    parser.add_argument("--documents", type=int, default=2000)
    parser.add_argument("--asked", type=int, default=2000, help="documents that are asked, at most")
    parser.add_argument("--characters", type=int, default=4000)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--stores", type=int, default=10_000)
    parser.add_argument("--lines", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    given = parser.parse_args()
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=given.out) as folder:  # stores are linked into it
        for told in measured(given, Path(folder), given.out or Path(folder)):
            print(told, flush=True)
    rng = np.random.default_rng(0)
    for machines in (1, 10, 100, 1000):
        parts = (f"{m:.1f} / {p:.1f} with {n}" for n in (1, 2) for m, p in [fanned_out(machines, rng, n)])
        print(f"fan-out to {machines:,} machines, median / p99, copies of each: {', '.join(parts)}")


def measured(given: argparse.Namespace, folder: Path, kept: Path) -> Iterator[str]:
    """All that runs here, line by line."""
    yield from listed(given.lines, folder)
    texts, out = kept / "texts", kept / "collection"
    texts.mkdir(exist_ok=True)
    cut(given.texts, given.documents, given.characters, texts)
    maker = Maker("demo", Settings(), device="cpu")
    _ = maker.loaded
    with Peak() as peak:
        report = collect(str(texts), out, maker)
    yield (
        f"collect: {report.made:,} stores of {report.tokens:,} tokens, {len(report.failed):,} failed, "
        f"{report.made / report.seconds:.2f} stores/s, {report.prefilled / report.seconds:,.0f} tokens/s, "
        f"{peak.bytes / 2**20:,.0f} MiB at most"
    )
    report = collect(str(texts), out, maker)
    yield f"collect again: {report.kept / report.seconds:,.0f} documents/s"
    began = time.perf_counter()
    collection = Collection(out)
    yield f"the collection opens in {1000 * (time.perf_counter() - began):.1f} ms"
    began = time.perf_counter()
    for entry in collection.entries:
        KVStore.open(collection.store(entry))
    each = (time.perf_counter() - began) / len(collection.entries)
    files = len(os.listdir(FILES))
    yield f"a store opens in {1000 * each:.1f} ms; {files} files are open after all of them"
    yield opened(collection.store(collection.entries[0]), given.stores, folder / "many")
    began = time.perf_counter()
    ranked(out / WORDS, QUESTION)
    yield f"ranked by BM25 in {1000 * (time.perf_counter() - began):.1f} ms"
    for workers in given.workers:
        documents = min(given.asked, len(collection.entries))
        yield f"{asked(out, documents, workers):.2f} questions/s with {workers} workers"


if __name__ == "__main__":
    main()
