"""Decoding with an 8B-shaped model, 1M stored tokens and 16 GiB of GPU memory: `benchmarks/gpu_decode.py`.

Random weights, quantized; long-tailed keys and values; the index kind `clusters`. Greedy decoding with
attention on the host, on the device, there with a cache, of pinned rows, and without CUDA graphs: tokens/s,
seconds by stage (`search_s` waits for the device's query), bytes over the bus. A share is the bytes' time at
the measured bandwidth, of the step's.

Shared: only `--distinct` layers are made, and the model's layers read them in turns: 32 layers of 1M tokens
(137 GB) do not fit into 128 GiB. A step reads as many bytes as with layers of their own, but where processor
caches hold `bytes_between_turns`, what is read until a layer's turn comes again, some come from there (bounds
of cells above all) and the figures flatter: raise --distinct. The disk, the page cache and the address
translation of a whole store stay out of sight. The device's cache tells all layers apart.

Queries: a random model's would not meet the keys; made-up ones replace them, others for every layer and step.
Real text's are alike from step to step, these are not: the device's cache hits less often than it would.
`--tiny`: a small plain model on the CPU, its times mean nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import fidelity, layers, machine
from benchmarks.gpu_prefill import EIGHT_BILLION, TINY, no_device, option_parser, save
from benchmarks.ways import search_traffic
from offload_decode.engine.engine import Engine
from offload_decode.engine.step import StoredPrefix
from offload_decode.hf.cuda_graphs import WORTH, GraphForward, report
from offload_decode.models.fingerprints import weights_hash
from offload_decode.models.loading import LoadedModel, wrap
from offload_decode.models.made_with import made_with
from offload_decode.models.quantization import check_weights, quantize_on_gpu
from offload_decode.planning.caps import Caps, apply_caps
from offload_decode.prefill_jobs.indexing import build_indexes
from offload_decode.store.format import Array, Manifest, token_hash
from offload_decode.store.reader import KVStore
from offload_decode.store.writer import KVStoreWriter
from offload_decode.types import Document

WARM_UP = WORTH + 4  # tokens before the clock starts: passes are captured by then
PLAIN = "host, no graphs"
MOVED = 1 << 27  # bytes


def device_rates(device: torch.device, moved: int) -> dict[str, float]:
    """Bytes a second: `weights` of a linear layer in the product with one row, `bus` from pinned memory."""
    layer = torch.zeros(moved // 4096, 2048, dtype=torch.float16, device=device)
    row = torch.zeros(1, 2048, dtype=layer.dtype, device=device)
    host = torch.empty(moved, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = torch.empty(moved, dtype=torch.uint8, device=device)
    works: dict[str, Callable[[], object]] = {
        "weights": lambda: torch.nn.functional.linear(row, layer),
        "bus": lambda: target.copy_(host, non_blocking=True),
    }

    def finished(work: Callable[[], object]) -> None:
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return {
        name: moved / median(machine.timed(lambda _, work=work: finished(work), cold=False, seconds=0.2))  # type: ignore[misc]
        for name, work in works.items()
    }


class SharedStore(KVStore):
    """A store of few layers as one of many, which take turns in reading them."""

    distinct = 1

    def _rows(self, layer: int, kind: str, kv_head: int) -> Array:
        return super()._rows(layer % self.distinct, kind, kv_head)

    def digest(self, layer: int, kv_head: int) -> str:
        return super().digest(layer % self.distinct, kv_head)


class MadeUpQueries(StoredPrefix):
    """A stored prefix that attends with made-up queries `[distinct, S, H, D]` in place of the model's."""

    def __init__(self, prefix: StoredPrefix, queries: torch.Tensor):
        super().__init__(prefix.host, prefix.chosen, prefix.tail)
        self.queries, self.step = queries, -1

    def begin(self, layer: int, query: torch.Tensor, *rest: Any) -> Any:
        distinct, turns = len(self.queries), -(-len(self.selector.shape.layers) // len(self.queries))
        self.step += layer == 0
        made_up = self.queries[layer % distinct, self.step * turns + layer // distinct]
        return super().begin(layer, made_up.view_as(query), *rest)

    def fresh(self) -> MadeUpQueries:
        """Itself: there is one conversation."""
        return self


def model_of(config: dict[str, int], weights: str, device: str) -> LoadedModel:
    """A model with random weights; on the host in 16 bits before they are taken in few."""
    torch.set_default_dtype(torch.float16)
    model = LlamaForCausalLM(LlamaConfig(**config))
    torch.set_default_dtype(torch.float32)
    known = weights_hash(model)
    taken = model.to(device) if weights == "auto" else quantize_on_gpu(model, weights, torch.device(device))
    return wrap(taken, None, "random weights", known)


def written(
    path: Path, loaded: LoadedModel, arguments: argparse.Namespace, steps: int
) -> tuple[KVStore, torch.Tensor, Any]:
    """The store of `distinct` layers with its indexes, opened as one of all layers, and the queries."""
    shape, tokens, distinct = loaded.shape, arguments.tokens, arguments.distinct
    ids = np.random.default_rng(0).integers(0, loaded.model.config.vocab_size, tokens).astype(np.int32)
    known = {n: getattr(loaded, n) for n in ("model_id", "weights_hash", "tokenizer_hash", "dtype", "rope")}
    few = replace(shape, layers=shape.layers[:distinct])
    known |= {"model_config_hash": loaded.config_hash, "shape": few}
    counts = {"n_tokens": tokens, "query_samples": layers.TUNING * shape.group}
    manifest = Manifest(**known, **counts, token_hash=token_hash(ids), prefill={"method": "long-tailed"})
    queries = []
    with KVStoreWriter.open(path, manifest, ids, [Document("long-tailed", 0, tokens)]) as writer:
        for number in range(distinct):
            sizes = {"heads": shape.kv_heads, "group": shape.group, "dim": shape.head_dim}
            made_up = layers.MadeUp(tokens, **sizes, dtype=loaded.dtype, steps=steps, seed=number)
            made = made_up.long_tailed()
            for start in range(0, tokens, layers.BLOCK):
                part = slice(start, start + layers.BLOCK)
                writer.append(
                    number, *(np.stack([r[part] for r in side]) for side in (made.keys, made.values))
                )
            writer.put_queries(number, writer.samples(0, tokens)[0], made.tuning.astype(loaded.dtype))
            queries.append(torch.from_numpy(made.steps).flatten(1, 2))
        writer.commit(tokens)
        writer.publish()
    report = build_indexes(path, "clusters", k=arguments.budget)
    for layer in range(distinct, len(shape.layers)):
        name, own = (f"layer-{number:03d}-" for number in (layer, layer % distinct))
        for file in report.folder.glob(own + "*"):
            os.link(file, file.with_name(file.name.replace(own, name)))
    store = SharedStore.open(path)
    store.distinct, store.manifest = distinct, replace(store.manifest, shape=shape)
    return store, torch.stack(queries).to(loaded.device), report


def search_bytes(engine: Engine, queries: torch.Tensor, k: int) -> tuple[Any, float]:
    """What a step of one layer must read on the host, and what share of the exact top-k's mass it finds."""
    shape, heads = engine.loaded.shape, range(engine.loaded.shape.kv_heads)
    steps = queries[0, :2].unflatten(1, (shape.kv_heads, shape.group)).cpu().numpy()
    keys, values = ([rows(0, head) for head in heads] for rows in (engine.store.keys, engine.store.values))
    layer = layers.Layer(keys, values, steps, steps[0], shape.head_dim**-0.5)
    built = [engine.selector.indexes.get(0, head) for head in heads]  # type: ignore[attr-defined]
    ids = type(built[0]).search_heads(built, steps[0], k).ids
    exact = fidelity.Truth.of_steps(layer, [k])
    judged = exact.judge(k, list(type(built[0]).search_heads(built, exact.rows, k).ids))
    return search_traffic(layer, built, steps[0], list(ids)), judged.ratio


def decoded(engine: Engine, queries: torch.Tensor, tokens: int) -> dict[str, Any]:
    """Seconds and costs of a token, the mean of `tokens` after a warm-up."""
    prefix = engine.prefix = MadeUpQueries(engine.prefix, queries)
    engine.cache = engine.new_cache()
    token, began = 1, 0.0
    for step in range(WARM_UP + tokens):
        if step == WARM_UP:
            prefix.take_stats()
            began = time.perf_counter()
        token = int(engine.extend([token]).argmax())  # waits for the device
    seconds = (time.perf_counter() - began) / tokens
    assert prefix.step + 1 == WARM_UP + tokens, "every step asked the made-up queries"
    stats = asdict(prefix.take_stats())
    each = {name: value / tokens for name, value in stats.items() if not isinstance(value, dict)}
    return {"tokens_per_second": 1 / seconds, "seconds": seconds, **each, "attended": stats["attended"]}


def main() -> int:
    parser = option_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=1 << 20, help="stored")
    parser.add_argument("--distinct", type=int, default=4, help="layers that are made, 32 at most")
    parser.add_argument("--decode", type=int, default=32, help="tokens that are timed, each way")
    parser.add_argument("--budget", type=int, default=1024, help="stored tokens for each query")
    parser.add_argument("--weights", default="int4", choices=("int4", "int8", "auto"), help="auto: float16")
    arguments = parser.parse_args()
    if no_device(arguments, "gpu_decode.py"):
        return 2
    device, ways = "cpu", {"host": ("host", 0)}
    if arguments.tiny:
        vars(arguments).update(tokens=8192, distinct=1, decode=4, budget=32, weights="auto")
    else:
        device, ways["device"] = "cuda", ("device", 0)
        ways["device, 2 GiB cached"] = ("device", 2 << 30)
        ways["pinned"] = ("pinned", 0)
        ways[PLAIN] = ("host", 0)
        if arguments.weights != "auto":  # 16 GB by themselves
            apply_caps(Caps(16 << 30, None), device)
    check_weights(arguments.weights)
    loaded = model_of(TINY if arguments.tiny else EIGHT_BILLION, arguments.weights, device)
    depth = len(loaded.shape.layers)
    steps = (WARM_UP + arguments.decode) * -(-depth // arguments.distinct)
    host = machine.measure(arguments.tiny)
    rates = device_rates(torch.device(device), 1 << 22 if arguments.tiny else MOVED)
    table = loaded.model.get_input_embeddings().weight  # one row of it is read
    weights = sum(part.nbytes for part in loaded.model.parameters() if part is not table)
    with TemporaryDirectory(prefix="offload-decode-gpu-", dir=".") as folder:
        path, options = Path(folder).resolve() / "s", {"budget": str(arguments.budget), "index": "clusters"}
        store, queries, built = written(path, loaded, arguments, steps)
        found: dict[str, Any] = {}
        for name, (attend, cache) in ways.items():
            engine = Engine.open(store, loaded, options=options, attend=attend, device_cache=cache)
            if name == PLAIN:
                forward: GraphForward = loaded.model.base_model.forward
                forward.refused = "the plain passes are timed"
            found[name] = decoded(engine, queries, arguments.decode)
            found[name]["graphs"] = report(loaded.model.base_model)
        read, mass = search_bytes(engine, queries, arguments.budget)
    allowed = depth * (read.in_order / host.read + read.rows / host.gather)
    for own in found.values():
        times = {
            "host": allowed,
            "weights": weights / rates["weights"],
            "bus": own["bus_bytes"] / rates["bus"],
        }
        own["shares"] = {name: value / own["seconds"] for name, value in times.items()}
    figures = {
        "date": date.today().isoformat(),
        "card": "none" if arguments.tiny else torch.cuda.get_device_name(),
        "settings": {name: str(value) for name, value in vars(arguments).items() if name != "out"},
        "made_with": made_with(loaded),
        **machine.made_with(host),
        "bandwidths": rates,
        "index": {"seconds": built.seconds, "recall": built.recall, "of the exact top-k's mass": mass},
        "weights_bytes": weights,
        "host_bytes_a_token": depth * (read.in_order + read.rows),
        "bytes_between_turns": arguments.distinct * (read.in_order + read.rows),
        "peak_gpu_bytes": 0 if arguments.tiny else torch.cuda.max_memory_reserved(),
        "ways": found,
    }
    save(arguments, figures, "gpu_decode.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
