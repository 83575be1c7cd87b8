"""What `plan` expects of a step, beside what the step takes: `python -m benchmarks.planned`.

A layer's, of made-up long-tailed keys and values, searched and attended to as the engine does; what is
expected comes of the planner's own measurement in a smaller layer of random ones. With `--model 1B` a whole
token's, of a model with real widths and random weights (`benchmarks.width`), through the engine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from benchmarks import tables
from benchmarks.layers import Float32, Layer, long_tailed
from benchmarks.ways import MemoryLayer, all_way, index_way
from benchmarks.width_parts import SHAPES, Bench, made, stored
from offload_decode.engine.engine import Engine
from offload_decode.models.outline import outline_of
from offload_decode.planning.bandwidth import measure
from offload_decode.planning.request import Workload
from offload_decode.planning.traffic import LayerTraffic, layer_traffic, speed, traffic
from offload_decode.selectors.registry import create

RATES = {"pages": "pages", "scanned": "search", "gathered": "rows", "attended": "dense"}
WAYS = ("clusters", "flat", "quest", "dense")


def requested(way: str, tokens: int, k: int) -> Workload:
    """What `plan` is told of a way."""
    return Workload(
        tokens=tokens,
        selector="topk" if way in ("clusters", "flat") else way,
        index=way if way in ("clusters", "flat") else "clusters",
        budget="100%" if way == "dense" else str(k),
        dense_layers="",
    )


def expected(memory: MemoryLayer, way: str, tokens: int, k: int) -> float:
    """Seconds of a step, as `plan` reckons them."""
    dtype, request = memory.layer.keys[0].dtype.name, requested(way, tokens, k)
    rates = measure(memory.shape, dtype, request, "cpu", weights=0)  # a layer alone
    moved = layer_traffic(memory.shape, dtype, request, tokens, None if way == "dense" else k)
    parts = zip(LayerTraffic._fields, moved, strict=True)
    return sum(size / getattr(rates, RATES[stage]) for stage, size in parts if size)


def step(memory: MemoryLayer, way: str, k: int) -> Callable[[Float32], Float32]:
    """The step itself."""
    if way == "dense":
        return all_way(memory.layer)(k).step
    if way != "quest":
        return index_way(memory.layer, way)(k).step
    selector = create("quest", {"budget": str(k)}, memory.host, memory.shape).selector
    return lambda rows: memory.attend(rows, selector.choose(0, memory.queries(rows), k))


def seconds(work: Callable[[Float32], Float32], layer: Layer, least: float) -> float:
    """The median of steps with other queries each."""
    steps, taken = cycle(layer.steps), []
    work(next(steps))
    end = time.perf_counter() + least
    while time.perf_counter() < end or len(taken) < 3:
        rows = next(steps)
        began = time.perf_counter()
        work(rows)
        taken.append(time.perf_counter() - began)
    return float(np.median(taken))


def engine_of(bench: Bench, request: Workload) -> Engine:
    """One that asks as was planned."""
    options = {"budget": request.budget, "dense_layers": ""}
    if request.selector == "topk":
        options["index"] = request.index
    if request.selector == "dense":
        options = {}
    return Engine.open(bench.store, bench.loaded, selector=request.selector, options=options)


def whole(given: argparse.Namespace, folder: Path) -> list[list[str]]:
    """Tokens a second of every way, expected and had: the median step of the second of two turns."""
    loaded, plain = made(given.model, None)
    given.k, given.decode = [given.k], 2 if given.quick else 12
    # Its config, which is of no checkpoint, does not say the dtype.
    outline = replace(outline_of(loaded.model, given.model, loaded.shape), dtype=loaded.dtype)
    requests = {way: requested(way, given.tokens, given.k[0]) for way in WAYS}
    # Before a store of gigabytes is on its way to the disk, as `plan` does.
    foretold = {}
    for way, request in requests.items():
        moved = traffic(outline, request, on_gpu=False)
        rates = measure(loaded.shape, loaded.dtype, request, "cpu", moved.weights)
        foretold[way] = speed(moved, rates).tokens_per_second
    store, queries = stored(folder / f"{given.model}-{given.tokens}.kv", loaded, given)
    bench = Bench(loaded, plain, store, queries, given)
    lines = []
    for way, request in requests.items():
        told = foretold[way]
        for _ in range(2):  # what is mapped at first, and compiled, does not count
            took = statistics.median(seconds for seconds, _ in bench.asked(engine_of(bench, request)))
        lines.append([way, f"{told:.2f}", f"{1 / took:.2f}", f"{max(told * took, 1 / (told * took)):.2f}x"])
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=131_072, help="of the layer")
    parser.add_argument("--heads", type=int, default=8, help="KV heads")
    parser.add_argument("--k", type=int, default=1024, help="tokens of each query head")
    parser.add_argument("--seconds", type=float, default=2.0, help="at least, of each way")
    parser.add_argument("--model", choices=list(SHAPES), help="its tokens a second, and not a layer's step")
    parser.add_argument("--folder", type=Path, help="keeps what is made of a model; about 5 GB for 1B")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that everything runs")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.tokens, arguments.heads, arguments.k, arguments.seconds = 4096, 1, 64, 0.0
    if arguments.model:
        with TemporaryDirectory(prefix="offload-decode-planned-", dir=".") as temporary:
            folder = (arguments.folder or Path(temporary)).resolve()
            folder.mkdir(parents=True, exist_ok=True)
            lines = whole(arguments, folder)
        print(tables.table(["way", "expected, tokens/s", "measured, tokens/s", "apart by"], lines))
        return
    memory = MemoryLayer(long_tailed(arguments.tokens, heads=arguments.heads, steps=32))
    lines = []
    with torch.inference_mode():
        for way in WAYS:
            told = expected(memory, way, arguments.tokens, arguments.k)
            took = seconds(step(memory, way, arguments.k), memory.layer, arguments.seconds)
            lines.append(
                [way, f"{told * 1e3:.2f}", f"{took * 1e3:.2f}", f"{max(told / took, took / told):.2f}x"]
            )
    print(tables.table(["way", "expected, ms", "measured, ms", "apart by"], lines))


if __name__ == "__main__":
    main()
