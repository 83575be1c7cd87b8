"""Is `error=E@0.95` kept to? `python -m benchmarks.error_bound --model M --stores A.kv B.kv`.

Queries of a dense answer are put to each store: for every way the share of the heads' outputs whose error,
relative to dense attention's length, is at most E (budgets: .05), that of the worst layer, the error that is
stated in the mean, megabytes of keys and values a token, and milliseconds of all layers a token, the least of
some rounds in which the ways take turns.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from benchmarks.common import option_parser, table
from offload_decode.engine.step import StoredPrefix
from offload_decode.evals.recorded_queries import Call, run_dense
from offload_decode.kv.host_cache import HostKV
from offload_decode.models.loading import load
from offload_decode.store.reader import KVStore
from offload_decode.types import AttentionState, ModelShape

QUESTION = "Summarize what happens in this text."
WAYS: dict[str, dict[str, str]] = {
    "dense": {},
    "budget=2%": {"budget": "2%"},
    "budget=1024": {"budget": "1024"},
    **{f"error={error}@0.95": {"error": f"{error}@0.95"} for error in (0.1, 0.05, 0.02)},
}


@dataclass
class Measured:
    """Of a way: the errors of each layer's outputs, and the least seconds of each layer's step."""

    prefix: StoredPrefix
    most: float
    errors: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)

    def ask(self, call: Call) -> AttentionState:
        began = time.perf_counter()
        state = self.prefix.attend(call.layer, call.query, call.scaling, call.softcap)
        took = time.perf_counter() - began
        self.seconds[call.layer] = min(took, self.seconds.get(call.layer, took))
        return state

    def judge(self, call: Call, exact: AttentionState) -> None:
        out = self.ask(call).out
        error = (out - exact.out).norm(dim=-1) / exact.out.norm(dim=-1)
        self.errors.setdefault(call.layer, []).append(error.flatten())

    def row(self, name: str, tokens: int) -> list[str]:
        kept = {layer: (torch.cat(own) <= self.most).double() for layer, own in self.errors.items()}
        every, worst = torch.cat(list(kept.values())).mean(), min(own.mean() for own in kept.values())
        stats = self.prefix.take_stats()
        stated = f"{stats.tail_error:.3f}" if stats.tail_rows else ""
        whole = f"{100 * stats.whole_rows / stats.rows:.1f}" if stats.tail_rows else ""
        moved, took = stats.bytes_moved / tokens / 1e6, 1000 * sum(self.seconds.values())
        return [
            name,
            f"{100 * every:.2f}",
            f"{100 * worst:.1f}",
            stated,
            whole,
            f"{moved:.0f}",
            f"{took:.1f}",
        ]


def measured(host: HostKV, shape: ModelShape, calls: list[Call], ways: Mapping[str, dict[str, str]]) -> str:
    """The table of one store."""
    found = {}
    for name, options in ways.items():
        prefix = StoredPrefix.over(host, shape, "topk" if options else "dense", options)
        found[name] = Measured(prefix, float(options.get("error", "0.05").partition("@")[0]))
    for way in found.values():  # compiled, read and drawn before it counts
        for layer in shape.full_layers:
            way.ask(next(call for call in calls if call.layer == layer))
        way.prefix.take_stats()
        way.seconds.clear()
    dense = StoredPrefix.over(host, shape, "dense", {})
    for call in calls:
        exact = dense.attend(call.layer, call.query, call.scaling, call.softcap)
        for way in found.values():
            way.judge(call, exact)
    tokens = len(calls) // len(shape.full_layers)
    heads = ["way", "within, %", "worst layer", "stated", "dense rows, %", "MB a token", "ms a token"]
    return table(heads, [way.row(name, tokens) for name, way in found.items()])


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--model", required=True, help="a folder, an id, or a .gguf file")
    parser.add_argument("--stores", nargs="+", required=True, help="with their indexes beside them")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of the answer whose queries are put")
    arguments = parser.parse_args()
    loaded = load(arguments.model)
    for path in arguments.stores:
        store = KVStore.open(path)
        with torch.inference_mode():
            run = run_dense(loaded, store, QUESTION, arguments.tokens + 1, lambda: None)
            calls = [call for call in run.calls if call.query.shape[2] == 1]
            print(f"{path}: {store.manifest.n_tokens:,} tokens", flush=True)
            print(measured(HostKV(store, torch.device("cpu")), loaded.shape, calls, WAYS), flush=True)


if __name__ == "__main__":
    main()
