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
from collections.abc import Callable, Sequence
from functools import cache, partial

import torch

from benchmarks import baselines, history, layers, machine, measured
from benchmarks.fidelity import Truth
from benchmarks.layers import Layer
from benchmarks.measured import Row
from benchmarks.ways import Maker, all_way, index_way
from offload_decode.attention.rows import tensor_view

SMALL = 200_000  # tokens up to which baselines are built for all heads

Builders = dict[str, Callable[[], Maker]]  # by name


def our_ways(layer: Layer, names: Sequence[str]) -> Builders:
    """What builds each of ours: index kinds, and dense attention (`all`)."""
    kinds = {name: partial(index_way, layer, name) for name in names if name != "all"}
    return kinds | ({"all": partial(all_way, layer)} if "all" in names else {})


def baseline_ways(layer: Layer, names: Sequence[str], few: int) -> Builders:
    """What builds the baselines whose first word is among the names."""
    some = layer.heads(few)
    most = layer if layer.length <= SMALL else some
    ways: Builders = {
        f"dense {fused} {dtype}": partial(baselines.dense, most, dtype, fused)
        for dtype in dict.fromkeys((torch.float32, tensor_view(layer.keys[0][:1]).dtype))
        for fused in (True, False)
    }
    ways["flat"] = partial(baselines.flat, most)
    ways["flat grouped"] = partial(baselines.flat, most, True)
    ways["ivf"] = partial(baselines.ivf, some)
    return {name: build for name, build in ways.items() if name.split()[0] in names}


def counts(spelled: str, tokens: int) -> list[int]:
    """`64,1024,2%` of so many tokens."""
    ks = [round(tokens * float(k[:-1]) / 100) if k.endswith("%") else int(k) for k in spelled.split(",") if k]
    return [k for k in dict.fromkeys(ks) if 0 < k <= tokens]


def run(layer: Layer, arguments: argparse.Namespace, host: machine.Machine) -> list[Row]:
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
                    row = measured.measured(way, layer, exact(way.heads), k, host, **given)
                    rows.append(row)
                    brief = f"{row.seconds * 1e3:.2f} ms, {row.fidelity.ratio:.4f} of the oracle's mass"
                    print(f"  k {k:,}, at once {batch}: {brief}", file=sys.stderr, flush=True)
            del ready
    for k in [*ks, *more]:
        for batch in arguments.batch:
            shown = [row for row in rows if (row.k, row.batch) == (k, batch)]
            print(f"k = {k:,}, {batch} step(s) at once\n\n{measured.show(shown, rows)}\n", flush=True)
    return rows


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    def names(text: str) -> list[str]:
        return [part for part in text.split(",") if part]

    parser = history.option_parser(__doc__)
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


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parsed(argv)
    host = history.begin(arguments, "One layer's attention step")
    rows: list[Row] = []
    steps = max(8, *arguments.batch)
    with torch.inference_mode():
        made_up = layers.MadeUp(
            max(arguments.tokens), heads=arguments.heads, dtype=arguments.dtype, steps=steps
        )
        largest = made_up.long_tailed()
        for tokens in arguments.tokens:
            rows += run(largest.first(tokens), arguments, host)
    unsaved = ("json", "results", "quick")
    settings = {name: value for name, value in vars(arguments).items() if name not in unsaved}
    details = [row.as_json() for row in rows]
    history.save(arguments, "step", settings, measured.figures(rows), host, rows=details)


if __name__ == "__main__":
    main()
