"""One layer's attention step, ours beside the baselines: `python -m benchmarks.step [--tokens N,…]`.

A step is: queries `[Hkv, G, D]` in; search, values fetched, attended; outputs out. Keys are made up, with a
long tail. Every size gets a table: medians from cold caches in milliseconds, how many times as fast as the
baselines of the same run, and what of dense attention is kept. Fidelity is judged on queries that no index
was tuned on. `allowed`: the share of the time that the machine's measured bandwidths would take for the bytes
that a search of the clusters must read, in order or row by row.

What builds slowly (lists, and beyond SMALL tokens every baseline) is built for `--baseline-heads` KV heads,
and its time scaled up to all: the column `heads` says so. Torch's dense attention is tried fused and as
matrix products, in float32 and in the stored dtype; the fastest counts.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from statistics import median

import numpy as np
import torch

from benchmarks import layers, machine, ways
from benchmarks.common import option_parser, table
from benchmarks.layers import ENOUGH, Fidelity, Float32, Layer, Truth, together
from benchmarks.machine import Machine, timed
from benchmarks.ways import BASELINE, Maker, Way, all_way, index_way
from offload_decode.attention.rows import tensor_view

NEARLY = ENOUGH - 0.01  # baselines are tuned on other queries than they are judged on
DENSE = "torch dense"  # attends to all tokens, whatever k
# What ratios are taken to, by the beginning of a name: of several, the fastest.
REFERENCES = {"flat": "faiss flat per query head", "IVF": "faiss IVF", "dense": DENSE}
SMALL = 200_000  # tokens up to which baselines are built for all heads

Builders = dict[str, Callable[[], Maker]]  # by name


@dataclass(frozen=True)
class Row:
    """A way at one size. Seconds are of all `of_heads` KV heads of the layer: what was measured on `heads` of
    them is scaled up. allowed: the share of the time that the measured bandwidths allow for the bytes that
    were counted.
    """

    tokens: int
    k: int
    batch: int
    way: str
    side: str
    heads: int
    of_heads: int
    seconds: float
    parameter: str
    fidelity: Fidelity
    allowed: float | None


def measured(
    way: Way, layer: Layer, exact: Truth, k: int, host: Machine, *, batch: int = 1, seconds: float = 2.0
) -> Row:
    """Times `way` over the layer's steps in turn, `batch` of them at once, and judges every step; `exact` is
    of the same heads.
    """
    of_heads = layer.steps[:, : way.heads]
    steps = [np.ascontiguousarray(step) for step in of_heads]
    questions = [batched(of_heads, turn, batch) for turn in range(len(steps))]
    scale = len(layer.keys) / way.heads
    taken = scale * median(timed(lambda turn: way.step(questions[turn % len(questions)]), seconds=seconds))
    out = together(np.stack([way.step(step) for step in steps]))
    ids = None if way.chosen is None else way.chosen(exact.rows)
    allowed = None
    if way.traffic is not None:
        counted = [way.traffic(question) for question in questions[:4]]
        in_order = float(np.mean([traffic.in_order for traffic in counted])) * scale
        rows = float(np.mean([traffic.rows for traffic in counted])) * scale
        allowed = (in_order / host.read + rows / host.gather) / taken
    return Row(
        tokens=layer.length,
        k=k,
        batch=batch,
        way=way.name,
        side=way.side,
        heads=way.heads,
        of_heads=len(layer.keys),
        seconds=taken,
        parameter=way.parameter,
        fidelity=exact.judge(k, ids, out),
        allowed=allowed,
    )


def batched(steps: Float32, turn: int, batch: int) -> Float32:
    """`batch` steps from `turn` on as rows `[Hkv, batch · G, D]`, a step's group together."""
    return together(steps[[(turn + place) % len(steps) for place in range(batch)]])


def against(rows: Sequence[Row], row: Row, reference: str) -> float | None:
    """How many times a row is as fast as the fastest named baseline of its size, k and batch. One that holds
    less than NEARLY of the oracle's mass is none.
    """
    same = [
        other.seconds
        for other in rows
        if other.side == BASELINE
        and other.way.startswith(reference)
        and (other.tokens, other.batch) == (row.tokens, row.batch)
        and (other.k == row.k or other.way.startswith(DENSE))
        and other.fidelity.ratio >= NEARLY
    ]
    return min(same) / row.seconds if same else None


def show(rows: Sequence[Row], among: Sequence[Row] | None = None) -> str:
    """A table: milliseconds, times as fast as the baselines, fidelity. A ratio in brackets does not
    count, for its way holds less than enough of the oracle's mass.
    """
    names = ["way", "ms", *(f"x {name}" for name in REFERENCES), "mass / oracle's", "error"]
    names += ["allowed", "heads", "parameter"]
    return table(names, [list(_cells(row, among or rows)) for row in rows])


def _cells(row: Row, among: Sequence[Row]) -> Iterator[str]:
    fidelity = row.fidelity
    yield row.way
    yield f"{row.seconds * 1e3:.2f}"
    for reference in REFERENCES.values():
        ratio = against(among, row, reference)
        written = "" if ratio is None else f"{ratio:.2g}" if ratio < 10 else f"{ratio:.0f}"
        yield written if fidelity.enough or not written else f"({written})"
    yield f"{fidelity.ratio:.4f}" + ("" if fidelity.enough else " low")
    yield f"{fidelity.error:.1%}"
    yield "" if row.allowed is None else f"{row.allowed:.0%}"
    yield f"{row.heads} of {row.of_heads}" if row.heads < row.of_heads else str(row.heads)
    yield row.parameter


def our_ways(layer: Layer, names: Sequence[str]) -> Builders:
    """What builds each of ours: index kinds, and dense attention (`all`)."""
    kinds = {name: partial(index_way, layer, name) for name in names if name != "all"}
    return kinds | ({"all": partial(all_way, layer)} if "all" in names else {})


def baseline_ways(layer: Layer, names: Sequence[str], few: int) -> Builders:
    """What builds the baselines whose first word is among the names."""
    some = layer.heads(few)
    most = layer if layer.length <= SMALL else some
    found: Builders = {
        f"dense {fused} {dtype}": partial(ways.dense, most, dtype, fused)
        for dtype in dict.fromkeys((torch.float32, tensor_view(layer.keys[0][:1]).dtype))
        for fused in (True, False)
    }
    found["flat"] = partial(ways.flat, most)
    found["flat grouped"] = partial(ways.flat, most, True)
    found["ivf"] = partial(ways.ivf, some)
    return {name: build for name, build in found.items() if name.split()[0] in names}


def counts(spelled: str, tokens: int) -> list[int]:
    """`64,1024,2%` of so many tokens."""
    ks = [round(tokens * float(k[:-1]) / 100) if k.endswith("%") else int(k) for k in spelled.split(",") if k]
    return [k for k in dict.fromkeys(ks) if 0 < k <= tokens]


def run(layer: Layer, arguments: argparse.Namespace, host: Machine) -> list[Row]:
    """All rows of one size, and its table on stdout."""
    ks = counts(arguments.k, layer.length)
    more = [k for k in counts(arguments.more_k, layer.length) if k not in ks]
    print(f"## {layer.length:,} tokens, {layer.shape}\n", flush=True)
    rows: list[Row] = []

    @cache
    def exact(heads: int) -> Truth:
        return Truth.of_steps(layer.heads(heads), [*ks, *more])

    for builders, sizes in (
        (baseline_ways(layer, arguments.baselines, arguments.baseline_heads), ks),
        (our_ways(layer, arguments.ours), [*ks, *more]),
    ):
        for name, build in builders.items():
            print(f"{layer.length:,}: {name}", file=sys.stderr, flush=True)
            ready = build()
            for k in sizes:
                way = ready(k)
                for batch in arguments.batch:
                    given = {"batch": batch, "seconds": arguments.seconds}
                    row = measured(way, layer, exact(way.heads), k, host, **given)
                    rows.append(row)
                    brief = f"{row.seconds * 1e3:.2f} ms, {row.fidelity.ratio:.4f} of the oracle's mass"
                    print(f"  k {k:,}, at once {batch}: {brief}", file=sys.stderr, flush=True)
            del ready
    for k in [*ks, *more]:
        for batch in arguments.batch:
            shown = [row for row in rows if (row.k, row.batch) == (k, batch)]
            print(f"k = {k:,}, {batch} step(s) at once\n\n{show(shown, rows)}\n", flush=True)
    return rows


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    def names(text: str) -> list[str]:
        return [part for part in text.split(",") if part]

    parser = option_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that everything runs")
    parser.add_argument("--tokens", type=numbers, default=[16_384, 131_072], help="sizes, such as 131072")
    parser.add_argument("--k", default="1024", help="tokens of each query head: counts, or like 2%%")
    parser.add_argument("--more-k", default="64,2%", help="further ones, for our ways only")
    parser.add_argument("--batch", type=numbers, default=[1], help="steps (questions) at once, such as 1,16")
    parser.add_argument("--heads", type=int, default=8, help="KV heads")
    parser.add_argument("--dtype", default="float16", help="of keys and values: float16 or float32")
    parser.add_argument(
        "--ours", type=names, default=["clusters", "flat", "all"], help="index kinds, and all (dense)"
    )
    parser.add_argument(
        "--baselines", type=names, default=["dense", "flat", "ivf"], help="of: dense, flat, ivf"
    )
    parser.add_argument("--baseline-heads", type=int, default=2, help="heads of slow baselines")
    parser.add_argument("--seconds", type=float, default=2.0, help="at most, for the repetitions of a time")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.tokens, arguments.heads, arguments.seconds = [2048], 2, 0.01
        arguments.k, arguments.more_k, arguments.baseline_heads = "128", "32", 1
    return arguments


def main(argv: Sequence[str] | None = None) -> list[Row]:
    arguments = parsed(argv)
    host = machine.measure(arguments.quick)
    print(f"# One layer's attention step\n\n{host.lines()}\n", flush=True)
    rows: list[Row] = []
    steps = max(8, *arguments.batch)
    with torch.inference_mode():
        made_up = layers.MadeUp(
            max(arguments.tokens), heads=arguments.heads, dtype=arguments.dtype, steps=steps
        )
        largest = made_up.long_tailed()
        for tokens in arguments.tokens:
            rows += run(largest.first(tokens), arguments, host)
    return rows


if __name__ == "__main__":
    main()
