"""From how many tokens on a search is slower than attention to everything: measured once on a machine."""

import time
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any

import torch

from offload_decode.common.rows import threads
from offload_decode.common.rows.compiled import features
from offload_decode.engine.step import StoredPrefix
from offload_decode.hf.user_cache import cached
from offload_decode.kv.host_cache import HostKV
from offload_decode.models.made_with import cpu_name
from offload_decode.selectors.topk import TopK
from offload_decode.types import ModelShape

_FEW, _MANY = 64, 1024
_LOOPS = 3  # counted up as loops become faster: what was measured with others is measured again
_LEAST = 4 * _FEW  # tokens: fewer are attended to before a search has begun
_ALIKE = 512  # tokens by which stores may differ that share what was measured
_LAYERS, _ROUNDS, _ENOUGH = 3, 7, 3.0


@dataclass(frozen=True)
class Crossover:
    """Seconds of a layer's step: of attention to all `tokens`, and to `few` or `many` that a search finds."""

    tokens: int
    dense_s: float
    few: int
    few_s: float
    many: int
    many_s: float

    @property
    def largest_k(self) -> int:
        """The largest k for which to search takes no longer; 0 for none. Between those measured, and beyond
        them, seconds grow with k along a line.
        """
        if self.few_s >= self.dense_s:
            return 0
        slope = (self.many_s - self.few_s) / (self.many - self.few)
        longest = self.tokens if slope <= 0 else self.few + int((self.dense_s - self.few_s) / slope)
        return min(longest, self.tokens)


def decide(prefix: StoredPrefix, shape: ModelShape, wanted: bool) -> None:
    """Let `topk` attend to everything on a host, where that is faster, and `wanted` or its option says so."""
    selector, host = prefix.selector, prefix.host
    if not isinstance(selector, TopK) or host.device.type != "cpu":
        return
    asked = selector.options.crossover
    as_usual = selector.options.index == selector.options.tail == "auto"
    if asked == "no" or (asked == "auto" and not (wanted and as_usual)):
        return
    index, selector.fastest = selector.indexes.kind, True
    if host.length < _LEAST:
        selector.largest_k = 0
    else:
        rows = host.layer_keys(shape.full_layers[0])[0], host.layer_values(shape.full_layers[0])[0]
        layouts = [own.layout for own in rows]
        machine = [threads.THREADS, cpu_name(), sorted(features())]
        of = [
            "crossover",
            _LOOPS,
            host.length // _ALIKE,
            asdict(shape),
            layouts,
            index,
            selector.options.tail,
            *machine,
        ]
        found = cached(of, lambda: measure(host, shape, index, selector.options.tail), asdict, _parsed)
        selector.largest_k = found.largest_k


def _parsed(stated: Any) -> Crossover:
    found = Crossover(**stated)
    if not all(isfinite(own) for own in asdict(found).values()) or found.few >= found.many:
        raise ValueError("no crossover")
    return found


def measure(host: HostKV, shape: ModelShape, index: str, tail: str) -> Crossover:
    """With the store's own queries. The quickest of some rounds counts, in which the ways take turns, as
    other work only adds to it.
    """
    many = min(_MANY, host.length // 2)
    searched = {"index": index, "tail": tail}
    prefixes = [
        StoredPrefix.over(host, shape, "dense", {}),
        *(StoredPrefix.over(host, shape, "topk", {**searched, "budget": str(k)}) for k in (_FEW, many)),
    ]
    layers = shape.full_layers[len(shape.full_layers) // 2 :][:_LAYERS]
    queries = [_query(host, shape, layer) for layer in layers]
    seconds = [float("inf")] * len(prefixes)
    with torch.inference_mode():
        for number in range(_ROUNDS):
            for way, prefix in enumerate(prefixes):
                began = time.perf_counter()
                for layer, query in zip(layers, queries, strict=True):
                    prefix.attend(layer, query, query.shape[-1] ** -0.5, None)
                if number:  # the first round compiles, and reads what is mapped
                    seconds[way] = min(seconds[way], (time.perf_counter() - began) / len(layers))
            if number and seconds[0] > _ENOUGH * seconds[2]:
                break
    return Crossover(host.length, seconds[0], _FEW, seconds[1], many, seconds[2])


def _query(host: HostKV, shape: ModelShape, layer: int) -> torch.Tensor:
    """Queries of a token, `[1, H, 1, D]`: stored ones, or numbers drawn where there are too few."""
    group, rows = shape.query_heads // shape.kv_heads, []
    for head in range(shape.kv_heads):
        stored = torch.from_numpy(host.store.queries(layer, head)[-group:].astype("float32"))
        rows += [stored, torch.randn(group - len(stored), shape.head_dim)]
    return torch.cat(rows)[None, :, None]
