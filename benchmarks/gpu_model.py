"""An 8B-shaped model with random weights on a card: `python -m benchmarks.gpu_model prefill` (or `decode`).

`prefill`: random tokens for `--minutes`, with the GPU memory capped as by `--gpu-memory`.

`decode`: greedy, from 1M stored tokens under a cap of 16 GiB, with attention on the host, on the device,
there with a cache, of pinned rows, and without CUDA graphs. Only `--distinct` layers of long-tailed keys and
values are made, and the model's layers read them in turns: 32 layers of 1M tokens (137 GB) do not fit into
128 GiB. Bounds of cells may come from processor caches then, and flatter the figures: raise --distinct. A
random model's queries would not meet the keys: made-up ones replace them, others for every layer and step.
Real text's are alike from step to step, these are not: the device's cache hits less often than it would.

Prints JSON, and saves it. `--tiny` runs the same steps with a small model anywhere; its times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import layers
from benchmarks.common import option_parser
from offload_decode.cli.options import byte_count
from offload_decode.common.memory import own_memory
from offload_decode.config import STREAMED, split_pairs
from offload_decode.engine.engine import Engine
from offload_decode.engine.step import StoredPrefix
from offload_decode.hf.cuda_graphs import WORTH, GraphForward, report
from offload_decode.models.fingerprints import weights_hash
from offload_decode.models.layer_streaming import stream
from offload_decode.models.loading import LoadedModel, wrap
from offload_decode.models.made_with import made_with
from offload_decode.models.quantization import check_weights, quantize_on_gpu
from offload_decode.planning.caps import Caps, apply_caps
from offload_decode.prefill_jobs.indexing import build_indexes
from offload_decode.prefill_jobs.job import Settings, prefill_tokens
from offload_decode.store.format import Array, Manifest, token_hash
from offload_decode.store.reader import KVStore
from offload_decode.store.writer import KVStoreWriter
from offload_decode.types import Document

EIGHT_BILLION = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 1 << 24,
}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 1 << 24,
}
WARM_UP = WORTH + 4  # tokens before the clock starts: passes are captured by then
PLAIN = "host, no graphs"
WAYS = {  # where attention is computed, and the bytes of the device's cache
    "host": ("host", 0),
    "device": ("device", 0),
    "device, 2 GiB cached": ("device", 2 << 30),
    "pinned": ("pinned", 0),
    PLAIN: ("host", 0),
}


class Enough(Exception):
    """The time is up."""


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


def model_of(arguments: argparse.Namespace, device: str) -> LoadedModel:
    """A model with random weights in 16 bits, on the host where they are streamed or taken in few."""
    weights = arguments.weights
    torch.set_default_dtype(torch.float16)
    with torch.device(device if weights == "auto" else "cpu"):
        model = LlamaForCausalLM(LlamaConfig(**(TINY if arguments.tiny else EIGHT_BILLION)))
    torch.set_default_dtype(torch.float32)
    known = weights_hash(model)
    if weights == STREAMED:
        stream(model, torch.device(device))
    elif weights != "auto":
        model = quantize_on_gpu(model, weights, torch.device(device))
    return replace(wrap(model, None, "random weights", known), streamed=weights == STREAMED)


def prefill(arguments: argparse.Namespace, device: str, folder: Path) -> dict[str, Any]:
    """Tokens, seconds, and the peaks of memory, until the time is up."""
    if device == "cuda" and arguments.gpu_memory:
        apply_caps(Caps(byte_count(arguments.gpu_memory), None), device)
    loaded = model_of(arguments, device)
    ids = np.random.default_rng(0).integers(0, loaded.model.config.vocab_size, arguments.tokens)
    settings = Settings(arguments.method, split_pairs(arguments.option))
    done, seconds, memory, began = 0, 0.0, 0, 0.0

    def watch(stage: str, now: int, total: int) -> None:
        nonlocal done, seconds, memory, began
        if stage != "prefill":
            return
        began = began or time.perf_counter()
        done, seconds, memory = now, time.perf_counter() - began, max(memory, own_memory())
        if seconds > 60 * arguments.minutes:
            raise Enough

    with suppress(Enough):
        documents = [Document("random", 0, len(ids))]
        prefill_tokens(loaded, ids.astype(np.int32), documents, folder / "s", settings, progress=watch)
    return {
        "made_with": made_with(loaded),
        "tokens": done,
        "seconds": seconds,
        "tokens_per_second": done / max(seconds, 1e-9),
        "peak_host_bytes": memory,
        "written_bytes": sum(file.stat().st_blocks * 512 for file in folder.rglob("*") if file.is_file()),
    }


def decode(arguments: argparse.Namespace, device: str, folder: Path) -> dict[str, Any]:
    """Tokens/s, seconds by stage (`search_s` waits for the device's query) and bytes over the bus."""
    ways = WAYS
    if arguments.tiny:
        vars(arguments).update(tokens=8192, distinct=1, decode=4, budget=32, weights="auto")
        device, ways = "cpu", {"host": WAYS["host"]}
    elif arguments.weights != "auto":  # 16 GB by themselves
        apply_caps(Caps(16 << 30, None), device)
    check_weights(arguments.weights)
    loaded = model_of(arguments, device)
    steps = (WARM_UP + arguments.decode) * -(-len(loaded.shape.layers) // arguments.distinct)
    store, queries, built = written(folder / "s", loaded, arguments, steps)
    options, found = {"budget": str(arguments.budget), "index": "clusters"}, {}
    for name, (attend, cache) in ways.items():
        engine = Engine.open(store, loaded, options=options, attend=attend, device_cache=cache)
        if name == PLAIN:
            forward: GraphForward = loaded.model.base_model.forward
            forward.refused = "the plain passes are timed"
        found[name] = decoded(engine, queries, arguments.decode)
        found[name]["graphs"] = report(loaded.model.base_model)
    index = {"seconds": built.seconds, "recall": built.recall}
    return {"made_with": made_with(loaded), "index": index, "ways": found}


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


def parsed() -> argparse.Namespace:
    parser = option_parser(__doc__)
    parser.add_argument("what", choices=("prefill", "decode"))
    parser.add_argument("--tiny", action="store_true", help="a small model, on the CPU where there is no GPU")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for the figures")
    parser.add_argument("--tokens", type=int, help="to prefill at most (131072), or stored (1048576)")
    parser.add_argument(
        "--weights", choices=("auto", STREAMED, "int4", "int8"), default="auto", help="auto: float16"
    )
    prefilled = parser.add_argument_group("prefill")
    prefilled.add_argument("--minutes", type=float, default=10, help="at most")
    prefilled.add_argument("--gpu-memory", help="cap, as of `offload-decode prefill`")
    prefilled.add_argument("--method", default="dense", help="prefill method")
    prefilled.add_argument("-o", "--option", action="append", help="its options", default=[])
    decoding = parser.add_argument_group("decode")
    decoding.add_argument("--distinct", type=int, default=4, help="layers that are made, 32 at most")
    decoding.add_argument("--decode", type=int, default=32, help="tokens that are timed, each way")
    decoding.add_argument("--budget", type=int, default=1024, help="stored tokens for each query")
    arguments = parser.parse_args()
    arguments.tokens = arguments.tokens or (1 << 17 if arguments.what == "prefill" else 1 << 20)
    return arguments


def main() -> int:
    arguments, there = parsed(), torch.cuda.is_available()
    if not (there or arguments.tiny):
        print("gpu_model.py needs a CUDA device, and torch sees none here.", file=sys.stderr)
        return 2
    with TemporaryDirectory(prefix="offload-decode-gpu-", dir=".") as folder:
        measure = prefill if arguments.what == "prefill" else decode
        measured = measure(arguments, "cuda" if there else "cpu", Path(folder).resolve())
    figures = {
        "date": date.today().isoformat(),
        "card": torch.cuda.get_device_name() if there else "none",
        "settings": {name: str(value) for name, value in vars(arguments).items() if name != "out"},
        **measured,
        "peak_gpu_bytes": torch.cuda.max_memory_reserved() if there else 0,
    }
    text = json.dumps(figures, indent=1)
    print(text)
    if not arguments.tiny:
        way = [arguments.method, arguments.gpu_memory or "whole"] if arguments.what == "prefill" else []
        name = "_".join(["gpu", arguments.what, *way, arguments.weights])
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / f"{name}.json").write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
