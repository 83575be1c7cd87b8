"""What `plan` expects of a layer's step, beside what the step takes: `python -m benchmarks.planned`.

Made-up long-tailed keys and values, searched and attended to as the engine does; what is expected comes of
the planner's own measurement in a smaller layer of random ones.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from itertools import cycle

import numpy as np
import torch

from benchmarks import tables
from benchmarks.layers import Float32, Layer, long_tailed
from benchmarks.ways import MemoryLayer, all_way, index_way
from offload_decode.planning.bandwidth import measure
from offload_decode.planning.request import Workload
from offload_decode.planning.traffic import LayerTraffic, layer_traffic
from offload_decode.selectors.registry import create

RATES = {"pages": "pages", "scanned": "search", "gathered": "rows", "attended": "dense"}
WAYS = ("clusters", "flat", "quest", "dense")


def expected(memory: MemoryLayer, way: str, tokens: int, k: int) -> float:
    """Seconds of a step, as `plan` reckons them."""
    dtype = memory.layer.keys[0].dtype.name
    request = Workload(
        tokens=tokens,
        selector="topk" if way in ("clusters", "flat") else way,
        index=way if way in ("clusters", "flat") else "clusters",
        budget="100%" if way == "dense" else str(k),
        dense_layers="",
    )
    rates = measure(memory.shape, dtype, request, "cpu")
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


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=131_072, help="of the layer")
    parser.add_argument("--heads", type=int, default=8, help="KV heads")
    parser.add_argument("--k", type=int, default=1024, help="tokens of each query head")
    parser.add_argument("--seconds", type=float, default=2.0, help="at least, of each way")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that everything runs")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.tokens, arguments.heads, arguments.k, arguments.seconds = 4096, 1, 64, 0.0
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
