"""A model with real widths on a CPU, beside transformers and llama.cpp: `python -m benchmarks.width 1B`.

Random weights in the shape of Llama 3.2 1B or 3B, and 131,072 long-tailed keys and values (`layers.py`) of
every layer as its store. Ours: top-k attention with the default index. Beside it transformers' full
DynamicCache of the same keys and values, and llama.cpp (`--llama PYTHON`) with the same weights as GGUF and
its context filled with the same, flash attention on and off. Each of them takes turns with ours; a turn is a
dozen greedy tokens and counts with its median step, and of several turns the fastest counts.

Ours is asked made-up queries, others for every layer and step, for a random model's own would attend to
nothing in particular; those who read everything take as long for any query. Fidelity is of these queries:
the share of the attention mass of the exact top-k, and the error against dense attention. That all hold the
same keys and values is seen in the logits after one token: of transformers, llama.cpp, and our own dense
attention with the model's own queries; `empty` are transformers' where nothing is stored. A ratio in brackets
does not count: that way holds less than 0.99 of the exact top-k's mass.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import DynamicCache

from benchmarks import history, machine, tables
from benchmarks.decode import STAGES, full_cache
from benchmarks.fidelity import ENOUGH
from benchmarks.llama_beside import GET, Llama
from benchmarks.llama_gguf import KINDS, write_llama
from benchmarks.width_parts import ASKED, SHAPES, Bench, Steps, distance, kept, made, stored
from offload_decode.engine.engine import Engine
from offload_decode.errors import ConfigError
from offload_decode.evals.made_with import made_with
from offload_decode.memory import Peak, give_back

FULL = "transformers, full cache"


@dataclass(frozen=True)
class Row:
    """A way that took turns with those of the same `group`: medians of the seconds of a step, one for each
    turn, and where those of the fastest went. bytes: what a step must read of weights, keys and values.
    """

    group: str
    way: str
    turns: list[float]
    stages: dict[str, float]
    bytes: int

    @property
    def seconds(self) -> float:
        return min(self.turns)

    @classmethod
    def of(cls, group: str, way: str, turns: Sequence[Steps], size: int) -> Row:
        medians = [statistics.median(seconds for seconds, _ in turn) for turn in turns]
        best = turns[medians.index(min(medians))]
        stages = {name: statistics.median(parts[name] for _, parts in best) for name in best[0][1]}
        return cls(group, way, medians, stages, size)


def turns(ways: dict[str, Callable[[], Steps]], rounds: int) -> dict[str, list[Steps]]:
    """Every way in turn, again and again, after a round that is not counted."""
    found: dict[str, list[Steps]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, work in ways.items():
            steps = work()
            if number:
                found[name].append(steps)
            print(
                f"  {name}: {statistics.median(seconds for seconds, _ in steps) * 1e3:.0f} ms",
                file=sys.stderr,
                flush=True,
            )
    return found


def weights_file(bench: Bench, folder: Path, kind: str) -> Path:
    """Where the weights lie for llama.cpp."""
    return folder / f"{bench.given.shape}-{len(bench.loaded.shape.layers)}-{kind}.gguf"


@contextmanager
def full_llama(bench: Bench, folder: Path, kind: str, flash: bool) -> Iterator[tuple[Llama, float]]:
    """llama.cpp with a full context, and seconds of its step where the context is empty."""
    gguf = weights_file(bench, folder, kind)
    if not gguf.exists():
        write_llama(gguf, bench.plain, kind)
    threads, log = torch.get_num_threads(), folder / "llama.log"
    with Llama(bench.given.llama, gguf, bench.given.tokens, threads, flash, log) as llama:
        empty = statistics.median(seconds for seconds, _ in llama.generated(ASKED, bench.given.decode))
        llama.fill(bench.store, folder)
        yield llama, empty


def compared(bench: Bench, folder: Path) -> tuple[list[Row], dict[str, Any]]:
    """All rows, and what was seen besides."""
    given = bench.given
    engines = {f"topk, k = {k:,}": bench.engine(k) for k in given.k}
    found: dict[str, Any] = {
        name: kept(bench, engine, k) for (name, engine), k in zip(engines.items(), given.k, strict=True)
    }
    ours = {name: lambda engine=engine: bench.asked(engine) for name, engine in engines.items()}
    sizes = {name: bench.weights + round(found[name]["bytes"]) for name in ours}
    sizes[FULL] = bench.weights + bench.whole

    def rows(beside: str, work: Callable[[], Steps]) -> list[Row]:
        print(beside, file=sys.stderr, flush=True)
        ran = turns({**ours, beside: work}, given.rounds)
        return [Row.of(beside, name, taken, sizes[name]) for name, taken in ran.items()]

    expected, table = beside_transformers(bench, found, rows)
    give_back()
    if not given.llama:
        print(f"llama.cpp is left out: {GET}.\n")
        return table, found
    try:
        for kind, flash in product(given.gguf, (True, False)):
            name = f"llama.cpp, {kind}, flash attention {'on' if flash else 'off'}"
            with full_llama(bench, folder, kind, flash) as (llama, empty):
                sizes[name] = weights_file(bench, folder, kind).stat().st_size + bench.whole
                after = torch.from_numpy(llama.logits([ASKED], folder))
                found["logits"][name] = distance(after, expected)
                table += rows(name, partial(llama.generated, ASKED, given.decode))
                found[name] = {"empty_seconds": empty, **llama.ask("told")}
    except ConfigError as error:
        print(f"{error}\n")
    return table, found


def beside_transformers(
    bench: Bench, found: dict[str, Any], rows: Callable[[str, Callable[[], Steps]], list[Row]]
) -> tuple[torch.Tensor, list[Row]]:
    """Its logits after one token, and the rows of its turns; its cache is gone afterwards."""
    cache = full_cache(bench.store, bench.plain.config, 1)
    expected, nothing = bench.logits(cache), bench.logits(DynamicCache(config=bench.plain.config))
    dense = Engine.open(bench.store, bench.loaded, selector="dense").extend([ASKED])
    found["logits"] = {"empty": distance(nothing, expected), "ours, dense": distance(dense, expected)}
    return expected, rows(FULL, lambda: bench.generated(cache))


def show(rows: Sequence[Row], found: dict[str, Any]) -> str:
    """A table of all rows, and one of what ours keeps of dense attention."""
    heads = ["beside", "way", "tokens/s", "step, ms", "ours is faster by"]
    heads += [*(f"{name}, ms" for name in STAGES), "GB read"]
    lines = []
    for row in rows:
        base = next(one for one in rows if one.group == one.way == row.group)
        lines.append(
            [
                row.group,
                row.way,
                f"{1 / row.seconds:,.2f}",
                f"{row.seconds * 1e3:,.0f}",
                "" if row is base else ratio(row, base, found),
                *(f"{row.stages[name] * 1e3:,.1f}" if row.stages else "" for name in STAGES),
                f"{row.bytes / 1e9:.2f}",
            ]
        )
    quality = [
        [
            name,
            *(f"{found[name][part]:.4f}" for part in ("ratio", "ratio_p5", "ratio_worst", "mass")),
            f"{found[name]['error_dense']:.1%}",
            f"{found[name]['error_topk']:.1%}",
        ]
        for name in dict.fromkeys(row.way for row in rows if row.way in found and "ratio" in found[row.way])
    ]
    says = ["way", "mass / exact top-k's", "p5", "worst", "mass", "error", "to exact k"]
    logits = "; ".join(f"{name} {value:.2%}" for name, value in found["logits"].items())
    return (
        f"{tables.table(heads, lines)}\n\n{tables.table(says, quality)}\n\n"
        f"Logits after one token, from transformers': {logits}."
    )


def ratio(row: Row, base: Row, found: dict[str, Any]) -> str:
    """How many times as fast; in brackets, for it does not count, where a way holds too little."""
    written = f"{base.seconds / row.seconds:.2f}x"
    return written if found[row.way]["ratio"] >= ENOUGH else f"({written})"


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """Ratios within a group, and tokens a second of the fastest turn."""
    found = {}
    for row in rows:
        base = next(one for one in rows if one.group == one.way == row.group)
        found[f"{row.group}/{row.way}/tokens per second"] = 1 / row.seconds
        if row is not base:
            found[f"{row.group}/{row.way}/x"] = base.seconds / row.seconds
    return found


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    def names(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=list(SHAPES), help="tiny: to see that everything runs")
    parser.add_argument("--layers", type=int, help="fewer than the shape has")
    parser.add_argument("--tokens", type=int, default=131_072, help="stored")
    parser.add_argument("--k", type=lambda text: [int(k) for k in text.split(",")], default=[1024, 64])
    parser.add_argument("--decode", type=int, default=16, help="tokens of a turn")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each way")
    parser.add_argument("--llama", type=Path, metavar="PYTHON", help="a Python that has llama-cpp-python")
    parser.add_argument("--gguf", type=names, default=["BF16"], help=f"weights there: of {', '.join(KINDS)}")
    parser.add_argument("--folder", type=Path, help="keeps what is made; about 8 GB for 1B")
    parser.add_argument("--json", type=Path, help="saves each shape; default: width.json in the results")
    given = parser.parse_args(argv)
    if given.json is None and given.shape != "tiny":
        given.json = history.RESULTS / "width.json"
    return given


def main(argv: Sequence[str] | None = None) -> None:
    given = parsed(argv)
    host = machine.measure(1 << 22) if given.shape == "tiny" else machine.measure()
    loaded, plain = made(given.shape, given.layers)
    depth, all_of_them = len(loaded.shape.layers), SHAPES[given.shape]["num_hidden_layers"]
    name = f"{given.shape}, {depth} of {all_of_them} layers, {given.tokens:,} stored tokens"
    print(f"# {name}\n\n{host.lines()}\n", flush=True)
    with TemporaryDirectory(prefix="offload-decode-width-", dir=".") as temporary, Peak() as peak:
        folder = (given.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        named = f"{given.shape}-{depth}x{given.tokens}-{given.decode}"
        store, queries = stored(folder / f"{named}.kv", loaded, given)
        bench = Bench(loaded, plain, store, queries, given)
        rows, found = compared(bench, folder)
        kv_bytes = bench.whole
    print(f"{show(rows, found)}\n\nMost memory of this process: {peak.bytes / 2**30:.1f} GiB.")
    report = {
        "date": date.today().isoformat(),
        "shape": SHAPES[given.shape] | {"num_hidden_layers": depth, "of_layers": all_of_them},
        "settings": {"tokens": given.tokens, "k": given.k, "decode": given.decode, "rounds": given.rounds},
        "threads": torch.get_num_threads(),
        "made_with": made_with(loaded),
        **machine.made_with(host),
        "weights_bytes": bench.weights,
        "kv_bytes": kv_bytes,
        "peak_bytes": peak.bytes,
        "figures": figures(rows),
        "rows": [asdict(row) for row in rows],
        "seen": found,
    }
    if given.json is None:
        return
    earlier = json.loads(given.json.read_text()) if given.json.exists() else {}
    given.json.write_text(json.dumps(earlier | {given.shape: report}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
