"""How the cost of one layer's step grows with the stored tokens: `python -m benchmarks.growth`.

The same queries are put to longer and longer beginnings of one long-tailed text. For every way: milliseconds
at each size, from cold caches; the slope of log cost against log N; and the cost at the largest size in units
of that at FROM tokens. A slope below 1 is sub-linear. Dense attention, which is linear, stands beside them.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks import baselines, history, layers, machine, measured, step, tables
from benchmarks.fidelity import truth
from benchmarks.layers import Layer
from benchmarks.measured import Row
from benchmarks.ways import Maker

FROM = 65_536


def slope(points: Sequence[tuple[int, float]]) -> float:
    """Of log cost against log N, by least squares; NaN for fewer than two sizes."""
    if len(points) < 2:
        return float("nan")
    sizes, costs = np.log(np.array(points, np.float64)).T
    return float(np.polyfit(sizes, costs, 1)[0])


def growth(points: Sequence[tuple[int, float]], start: int = FROM) -> float:
    """The cost at the largest size over that at `start`, or at the smallest size where that is not there."""
    costs = dict(points)
    return costs[max(costs)] / costs.get(start, costs[min(costs)])


def curves(rows: Sequence[Row]) -> dict[str, list[tuple[int, float]]]:
    """Seconds by size of each way."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        found.setdefault(row.way, []).append((row.tokens, row.seconds))
    return found


def run(whole: Layer, arguments: argparse.Namespace, host: machine.Machine) -> list[Row]:
    """Every way at every size."""
    rows = []
    for tokens in arguments.tokens:
        layer = whole.first(tokens)
        exact = truth(layer, [arguments.k])
        print(f"{tokens:,} tokens. {step.properties(exact)}", flush=True)
        makers = step.our_ways(layer, step.ours(arguments, tokens), arguments.heads)
        offered: dict[str, Callable[[], Maker]] = {
            "dense, fused": partial(baselines.dense, layer, torch.float32, True),
            "dense, matmul": partial(baselines.dense, layer, torch.float32, False),
            **makers,
        }
        for name, build in offered.items():
            print(f"{tokens:,}: {name}", file=sys.stderr, flush=True)
            way = build()(arguments.k)
            rows.append(measured.measured(way, layer, exact, arguments.k, host, seconds=arguments.seconds))
            del way
            gc.collect()
    return rows


def report(rows: Sequence[Row]) -> str:
    """A table: milliseconds at each size, the slope, the growth, and the least mass of any size."""
    sizes = sorted({row.tokens for row in rows})
    heads = ["way", *(f"{size:,}" for size in sizes), "slope", "growth", "mass / oracle's"]
    lines = []
    for way, points in curves(rows).items():
        own = {row.tokens: row for row in rows if row.way == way}
        times = [f"{own[size].seconds * 1e3:.2f}" if size in own else "" for size in sizes]
        worst = min(own.values(), key=lambda row: row.fidelity.ratio).fidelity
        mark = "" if worst.enough else " low"
        ends = [f"{slope(points):.2f}", f"{growth(points):.1f}x", f"{worst.ratio:.4f}{mark}"]
        lines.append([way, *times, *ends])
    return tables.table(heads, lines)


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return sorted({int(part) for part in text.split(",")})

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = [16_384, 65_536, 262_144, 1_048_576]
    parser.add_argument("--tokens", type=numbers, default=sizes, help="sizes, separated by commas")
    parser.add_argument("--k", type=int, default=1024, help="tokens of each query head")
    parser.add_argument("--heads", type=int, default=2, help="KV heads of the layer")
    parser.add_argument("--dtype", default="float16", help="of keys and values: float16 or float32")
    parser.add_argument("--ours", type=lambda text: text.split(","), help="index kinds, and quest")
    parser.add_argument("--seconds", type=float, default=2.0, help="at most, for the repetitions of a time")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that everything runs")
    parser.add_argument("--json", type=Path, help="save everything that was measured")
    parser.add_argument("--results", type=Path, default=history.RESULTS, help="for the plot and the history")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.tokens, arguments.k, arguments.heads, arguments.seconds = [1024, 4096], 64, 1, 0.01
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parsed(argv)
    host = machine.measure(1 << 22) if arguments.quick else machine.measure()
    print(f"# A step's cost against the stored tokens\n\n{host.lines()}\n")
    with torch.inference_mode():
        whole = layers.long_tailed(max(arguments.tokens), heads=arguments.heads, dtype=arguments.dtype)
        rows = run(whole, arguments, host)
    print(f"\nMilliseconds, {whole.shape}, k = {arguments.k:,}\n\n{report(rows)}")
    settings = {name: getattr(arguments, name) for name in ("tokens", "k", "heads", "dtype", "ours")}
    points = curves(rows)
    figures = {f"{way}/slope": slope(own) for way, own in points.items()}
    figures |= {f"{way}/growth": growth(own) for way, own in points.items()}
    if arguments.json:
        saved = {"settings": settings, **machine.made_with(host), "figures": figures}
        saved["rows"] = [row.as_json() for row in rows]
        arguments.json.write_text(json.dumps(saved, indent=1) + "\n", encoding="utf-8")
    if not arguments.quick:
        lines = {
            f"{way}, slope {slope(own):.2f}": [(size, seconds * 1e3) for size, seconds in own]
            for way, own in points.items()
        }
        tables.draw(
            arguments.results / "growth.png",
            "A step's cost against the stored tokens",
            {f"{whole.shape}, k = {arguments.k:,}": lines},
            across="stored tokens",
            up="milliseconds a step",
            footnote=host.lines(),
        )
        history.append(arguments.results, "growth", settings, figures, host)


if __name__ == "__main__":
    main()
