"""One layer's attention step, ours beside the baselines: `python -m benchmarks.step [--store STORE]`.

A step is: queries `[Hkv, G, D]` in; search, values fetched, attended; outputs out. Every size and data set
gets a table: medians from cold caches in milliseconds, how many times as fast as the baselines of the same
run, and what of dense attention is kept. Fidelity is judged on queries that no index was tuned on: of a
store's sampled prefill queries every other group tunes, and groups between are timed and judged.
`allowed`: the share of the time that the machine's measured bandwidths would take for the bytes that the way
must read, in order or row by row.

What builds slowly (lists and graphs, and beyond SMALL tokens every baseline) is built for `--baseline-heads`
KV heads, and its time scaled up to all: the column `heads` says so. Torch's dense attention is tried fused
and as matrix products, in float32 and in the stored dtype; the fastest counts.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks import baselines, history, layers, machine, measured
from benchmarks.fidelity import Truth, truth
from benchmarks.layers import Layer
from benchmarks.measured import Row
from benchmarks.ways import WHOLE, Maker, index_way
from offload_decode.attention.rows import tensor_view
from offload_decode.common.errors import MissingBackend
from offload_decode.common.memory import Peak
from offload_decode.indexes import registry

SMALL = 200_000  # tokens up to which baselines are built for all heads
CAPTURED = 32_768  # tokens of the text that is prefilled where no store is given
GRAPHS = ("faiss-hnsw", "hnswlib")
SLOW = ("faiss-ivf", *GRAPHS)  # kinds that are built for some heads beyond so many tokens
QUOTED = ("long-tailed", "gaussian", "captured")


Builders = dict[str, Callable[[], Maker]]  # by name


def our_ways(layer: Layer, names: Sequence[str] | None, few: int) -> Builders:
    """What builds each of ours; without names graphs only where they build quickly."""
    if names is None:
        kinds = [kind for kind in registry.kinds() if kind not in GRAPHS or layer.length <= CAPTURED]
        names = [*kinds, *WHOLE]
    some = layer.heads(few) if layer.length > CAPTURED else layer
    return {
        name: partial(WHOLE[name], layer)
        if name in WHOLE
        else partial(index_way, some if name in SLOW else layer, name)
        for name in names
    }


def baseline_ways(layer: Layer, names: Sequence[str] | None, few: int) -> Builders:
    """What builds each baseline, or those whose first word is among the names."""
    some = layer.heads(few)
    most = layer if layer.length <= SMALL else some
    stored = tensor_view(layer.keys[0][:1]).dtype if layer.keys[0].ndim == 2 else torch.float32
    ways: Builders = {
        f"dense {fused} {dtype}": partial(baselines.dense, most, dtype, fused)
        for dtype in dict.fromkeys((torch.float32, stored))
        for fused in (True, False)
    }
    if torch.cuda.is_available():
        ways["offloaded"] = partial(baselines.offloaded, most)
    ways |= {
        "flat": partial(baselines.flat, most),
        "flat grouped": partial(baselines.flat, most, True),
        "ivf": partial(baselines.ivf, some),
        "hnsw": partial(baselines.hnsw, some),
        "hnswlib": partial(baselines.hnswlib, some),
    }
    return {name: build for name, build in ways.items() if names is None or name.split()[0] in names}


def counts(spelled: str, tokens: int) -> list[int]:
    """`64,1024,2%` of so many tokens."""
    ks = [round(tokens * float(k[:-1]) / 100) if k.endswith("%") else int(k) for k in spelled.split(",") if k]
    return [k for k in dict.fromkeys(ks) if 0 < k <= tokens]


def run(layer: Layer, arguments: argparse.Namespace, host: machine.Machine) -> list[Row]:
    """All rows of one data set at one size, and its table on stdout."""
    ks = counts(arguments.k, layer.length)
    more = [k for k in counts(arguments.more_k, layer.length) if k not in ks]
    exact = truth(layer, [*ks, *more])
    print(f"## {layer.name}, {layer.length:,} tokens, {layer.shape}\n\n{properties(exact)}\n", flush=True)
    rows: list[Row] = []
    few = arguments.baseline_heads
    for builders, sizes in (
        (baseline_ways(layer, arguments.baselines, few), ks),
        (our_ways(layer, arguments.ours, few), [*ks, *more]),
    ):
        for name, build in builders.items():
            print(f"{layer.name} {layer.length:,}: {name}", file=sys.stderr, flush=True)
            try:
                ready = build()
            except MissingBackend as error:
                print(f"{name} is left out: {error}", file=sys.stderr)
                continue
            for k in sizes:
                way = ready(k)
                for batch in arguments.batch:
                    row = measured.measured(
                        way, layer, exact, k, host, batch=batch, seconds=arguments.seconds
                    )
                    rows.append(row)
                    brief = f"{row.seconds * 1e3:.2f} ms, {row.fidelity.ratio:.4f} of the oracle's mass"
                    print(f"  k {k:,}, at once {batch}: {brief}", file=sys.stderr, flush=True)
            del ready
    for k in [*ks, *more]:
        for batch in arguments.batch:
            shown = [row for row in rows if (row.k, row.batch) == (k, batch)]
            print(f"k = {k:,}, {batch} step(s) at once\n\n{measured.show(shown, rows)}\n", flush=True)
    return rows


def properties(exact: Truth) -> str:
    """What the data's attention is like."""
    masses = ", ".join(f"{float(mass.mean()):.3f} at {k:,}" for k, mass in sorted(exact.mass.items()))
    return (
        f"Attention mass of the exact top-k: {masses}; sorted weights fall as rank to the {exact.slope:.2f}."
    )


@contextmanager
def store_of(arguments: argparse.Namespace) -> Iterator[Path]:
    """The store that was given, or one of a text that the shipped model prefills now."""
    if arguments.store is not None:
        yield arguments.store
        return
    from offload_decode.evals.haystack import Haystack, python_topics
    from offload_decode.models.loading import load
    from offload_decode.prefill_jobs.corpus import TextDocument
    from offload_decode.prefill_jobs.job import prefill_texts

    text = arguments.text
    haystack = Haystack(text.name, text.read_text(encoding="utf-8")) if text else python_topics()
    loaded = load("demo", "cpu")
    with TemporaryDirectory(prefix="offload-decode-step-") as folder:
        path = Path(folder) / "captured.kv"
        cut = haystack.cut(loaded.tokenizer, arguments.captured_tokens)
        prefill_texts(loaded, [TextDocument("text", cut)], path)
        yield path


def data(arguments: argparse.Namespace) -> Iterator[Layer]:
    """Every layer that is to be measured, the largest of each kind made once."""
    steps = max(8, *arguments.batch)
    for name in arguments.data:
        if name == "captured":
            with store_of(arguments) as path:
                yield layers.captured(path, steps=4 * steps)
            continue
        sizes = {"heads": arguments.heads, "dtype": arguments.dtype, "steps": steps}
        made_up = layers.MadeUp(max(arguments.tokens), **sizes)
        whole = made_up.gaussian() if name == "gaussian" else made_up.long_tailed()
        for tokens in arguments.tokens:
            yield whole.first(tokens)


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    def names(text: str) -> list[str]:
        return [part for part in text.split(",") if part]

    parser = history.option_parser(__doc__)
    parser.add_argument("--data", type=names, default=["long-tailed", "captured"], help=", ".join(QUOTED))
    parser.add_argument("--tokens", type=numbers, default=[16_384, 131_072], help="sizes of made-up data")
    parser.add_argument("--store", type=Path, help="a store whose keys, values and queries are `captured`")
    parser.add_argument("--text", type=Path, help="without a store: a text to prefill; else Python's topics")
    parser.add_argument("--captured-tokens", type=int, default=CAPTURED, help="of that text")
    parser.add_argument("--k", default="1024", help="tokens of each query head: counts, or like 2%%")
    parser.add_argument("--more-k", default="64,2%", help="further ones, for our ways only")
    parser.add_argument("--batch", type=numbers, default=[1], help="steps (questions) at once, such as 1,16")
    parser.add_argument("--heads", type=int, default=8, help="KV heads of made-up data")
    parser.add_argument("--dtype", default="float16", help="of made-up keys and values: float16 or float32")
    parser.add_argument(
        "--ours", type=names, help="index kinds, quest and all (dense); default: all that build quickly"
    )
    parser.add_argument("--baselines", type=names, help="of: dense, offloaded, flat, ivf, hnsw, hnswlib")
    parser.add_argument("--baseline-heads", type=int, default=2, help="heads of slow baselines")
    parser.add_argument("--seconds", type=float, default=2.0, help="at most, for the repetitions of a time")
    arguments = parser.parse_args(argv)
    unknown = sorted(set(arguments.data) - set(QUOTED))
    if unknown:
        parser.error(f"unknown data {', '.join(unknown)}: choose of {', '.join(QUOTED)}")
    if arguments.quick:
        arguments.tokens, arguments.captured_tokens, arguments.heads = [2048], 1024, 2
        arguments.k, arguments.more_k, arguments.seconds, arguments.baseline_heads = "128", "32", 0.01, 1
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parsed(argv)
    host = history.begin(arguments, "One layer's attention step")
    rows: list[Row] = []
    with torch.inference_mode(), Peak() as peak:
        for layer in data(arguments):
            rows += run(layer, arguments, host)
    print(f"Most memory that was held: {peak.bytes / 2**30:.1f} GiB.")
    unsaved = ("json", "results", "store", "text", "quick")
    settings = {name: value for name, value in vars(arguments).items() if name not in unsaved}
    figures = measured.figures(rows)
    details = {"peak_bytes": peak.bytes, "rows": [row.as_json() for row in rows]}
    history.save(arguments, "step", settings, figures, host, **details)


if __name__ == "__main__":
    main()
