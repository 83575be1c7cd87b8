"""What `width.py` compares: a Llama with real widths, a store for it, and turns of ours and transformers'."""

from __future__ import annotations

import argparse
import statistics
import sys
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from benchmarks import fidelity, layers, traffic
from benchmarks.decode import Clock, without_end
from benchmarks.gpu_decode import Asked, written
from offload_decode.attention.queries import Queries
from offload_decode.engine.engine import Engine
from offload_decode.models.arguments import with_cache
from offload_decode.models.loading import LoadedModel, wrap
from offload_decode.store.reader import KVStore
from offload_decode.types import StepStats

_LLAMA = {"num_key_value_heads": 8, "vocab_size": 128_256, "tie_word_embeddings": True}
SHAPES: dict[str, dict[str, Any]] = {
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
    | {"num_attention_heads": 32, "head_dim": 64, **_LLAMA},
    "3B": {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28}
    | {"num_attention_heads": 24, "head_dim": 128, **_LLAMA},
    "tiny": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {"head_dim": 32, **_LLAMA, "num_key_value_heads": 2, "vocab_size": 512},
}
ASKED = 1  # the token whose logits are compared


Steps = list[tuple[float, dict[str, float]]]


@dataclass(frozen=True)
class Bench:
    """The model that attends through our function, the same weights as transformers has them, the store,
    and what our ways are asked, `[layers, S, H, D]`.
    """

    loaded: LoadedModel
    plain: Any
    store: KVStore
    queries: torch.Tensor
    given: argparse.Namespace

    def engine(self, k: int) -> Engine:
        """Top-k attention as it comes."""
        return Engine.open(self.store, self.loaded, options={"budget": str(k), "index": "clusters"})

    def asked(self, engine: Engine) -> Steps:
        """A turn of ours."""
        engine.prefix = Asked(engine.prefix, self.queries)
        engine.cache, token = engine.new_cache(), ASKED
        with Clock(self.loaded.model) as clock:
            for _ in range(self.given.decode + 2):
                token = int(engine.extend([token]).argmax())
        return clock.steps()

    @torch.inference_mode()
    def generated(self, cache: DynamicCache) -> Steps:
        """A turn of transformers'; the cache is then as it was."""
        stored, token, given = cache.get_seq_length(), ASKED, with_cache(self.plain, cache)
        with Clock(self.plain) as clock:
            for _ in range(self.given.decode + 2):
                logits = self.plain(torch.tensor([[token]]), **given).logits
                token = int(logits[0, -1].argmax())
        cache.crop(stored - cache.get_seq_length())
        return clock.steps()

    @torch.inference_mode()
    def logits(self, cache: DynamicCache) -> torch.Tensor:
        """Transformers' after one token."""
        stored = cache.get_seq_length()
        found = self.plain(torch.tensor([[ASKED]]), **with_cache(self.plain, cache)).logits[0, -1].float()
        cache.crop(stored - cache.get_seq_length())
        return found

    @property
    def weights(self) -> int:
        """Bytes; the table is the head too, and is read whole."""
        return sum(part.nbytes for part in self.plain.parameters())

    @property
    def whole(self) -> int:
        """Bytes of all keys and values."""
        cost = self.store.cost()
        return cost["keys"] + cost["values"]


def made(name: str, depth: int | None) -> tuple[LoadedModel, Any]:
    """A model with random weights in bfloat16, ours and as it came; they share the weights."""
    torch.manual_seed(0)
    config = SHAPES[name] | ({"num_hidden_layers": depth} if depth else {})
    torch.set_default_dtype(torch.bfloat16)
    rope = {"rope_type": "default", "rope_theta": 500_000.0}
    model = LlamaForCausalLM(
        LlamaConfig(**config, rope_parameters=rope, max_position_embeddings=1 << 18, rms_norm_eps=1e-5)
    ).eval()
    torch.set_default_dtype(torch.float32)
    without_end(model)
    plain = deepcopy(model, {id(part): part for part in model.parameters()})
    plain.set_attn_implementation("sdpa")
    return wrap(model, None, f"random weights, {name}"), plain


def stored(path: Path, loaded: LoadedModel, given: argparse.Namespace) -> tuple[KVStore, torch.Tensor]:
    """The store with its index, and the queries; both are kept where they were made."""
    asked = path.with_suffix(".npy")
    if not asked.exists():
        sizes = SimpleNamespace(tokens=given.tokens, distinct=len(loaded.shape.layers), budget=max(given.k))
        _, queries, report = written(path, loaded, sizes, given.decode + 2)
        print(f"index: {report.seconds:.0f} s, {report.bytes / 1e6:,.0f} MB", file=sys.stderr)
        np.save(asked, queries.numpy())
    return KVStore.open(path), torch.from_numpy(np.load(asked))


def judged(bench: Bench, engine: Engine, layer: int, k: int) -> tuple[fidelity.Fidelity, traffic.Traffic]:
    """How much of dense attention some steps of a layer keep, and what the first must read."""
    shape, scaling = bench.loaded.shape, bench.loaded.shape.head_dim**-0.5
    heads = range(shape.kv_heads)
    steps = bench.queries[layer, :4].unflatten(1, (shape.kv_heads, shape.group)).numpy()
    keys, values = ([rows(layer, head) for head in heads] for rows in (bench.store.keys, bench.store.values))
    own = layers.Layer("long-tailed", keys, values, steps, steps[0], scaling)
    outs, ids = [], []
    for step in steps:
        rows = Queries(torch.from_numpy(step), scaling, None, shape.group)
        selection = engine.prefix.chosen.select(layer, rows)
        outs.append(engine.prefix.host.attend(layer, rows, selection, StepStats()).out.numpy())
        ids.append(list(selection.ids.numpy()))  # type: ignore[union-attr]
    exact = fidelity.truth(own, [k])
    built = [engine.selector.indexes.get(layer, head) for head in heads]  # type: ignore[attr-defined]
    read = traffic.of_search(own, built, steps[0], ids[0])
    assert read is not None, "what clusters read is counted"
    return fidelity.judge(own, exact, k, np.stack(outs), ids), read


def kept(bench: Bench, engine: Engine, k: int) -> dict[str, float]:
    """The means of `judged` over the first, the middle and the last layer, and the bytes of all layers."""
    depth = len(bench.loaded.shape.layers)
    found = [judged(bench, engine, layer, k) for layer in sorted({0, depth // 2, depth - 1})]
    means = {name: statistics.mean(asdict(each)[name] for each, _ in found) for name in asdict(found[0][0])}
    return means | {"bytes": depth * statistics.mean(read.in_order + read.rows for _, read in found)}


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative, of tensors of one shape."""
    return float((found - expected).norm() / expected.norm())
