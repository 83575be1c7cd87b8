"""A model's own indexer behind a stored prefix: what it asks, seen as it runs.

Its module (DeepSeek-V3.2, GLM-5 and their relatives) makes queries, weights and a key of every new token, in
a way that differs from family to family, then scores all keys by two matrix products and takes the best.
Behind a prefix the cache keeps the key and gives back zeros, so that the module's own choice means nothing;
the left sides of its two products are what `attention.index_queries` scores stored and generated keys by.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode

from offload_decode.attention.index_queries import IndexQueries, index_scores
from offload_decode.attention.queries import CausalMask
from offload_decode.hf.cache_layers import RUNNING, LatentLayer
from offload_decode.hf.mla import index_of


def watch_indexers(decoder: torch.nn.Module) -> None:
    """Let the indexers of a decoder leave in `Pass.asked` what they ask.

    No registered function is called for them, as for attention: their `forward` is wrapped.
    """
    for module in decoder.modules():
        if index_of(module, torch.empty(0, getattr(getattr(module, "indexer", None), "head_dim", 0))):
            indexer: Any = module.indexer
            indexer.forward = partial(_watched, indexer.forward)


@dataclass(eq=False)
class Asked:
    """What the indexer of the cache layers `kept`, one for each conversation of a packed pass, asked:
    `vectors [B, T, heads, dim]` and `weights [B, T, heads]`. Later layers may share it.
    """

    layer: int
    kept: Sequence[LatentLayer]
    vectors: Tensor
    weights: Tensor
    _made: list[IndexQueries] = field(default_factory=list, init=False)

    def queries(self, mask: Tensor | None, causal: CausalMask | None) -> IndexQueries:
        """With the scores of the generated tokens that a bool mask `[B, 1, T, S]`, or `causal`, shows."""
        if not self._made:
            keys, tokens = self.kept[0].index_keys, self.vectors.shape[1]
            if causal is not None:
                mask = causal.mask(slice(0, tokens), tokens, keys.shape[1], keys.device)
            generated = index_scores(self.vectors, self.weights, keys)
            if mask is not None:
                generated = generated.masked_fill(~mask[:, 0], -torch.inf)
            self._made.append(IndexQueries(self.layer, self.vectors, self.weights, generated))
        return self._made[0]

    def packed(self, tokens: Sequence[int], blocks: Sequence[int]) -> list[IndexQueries]:
        """Those of blocks of so many tokens, where every conversation has so many `tokens` of the pass."""
        if not self._made:
            parts = [torch.split(part, list(tokens), dim=1) for part in (self.vectors, self.weights)]
            scores = []
            for layer, count, vectors, weights in zip(self.kept, tokens, *parts, strict=True):
                keys = layer.index_keys
                shown = CausalMask().mask(slice(0, count), count, keys.shape[1], keys.device)
                scores.append(index_scores(vectors, weights, keys).masked_fill(~shown[:, 0], -torch.inf))
            most = max(own.shape[2] for own in scores)
            padded = [pad(own, (0, most - own.shape[2]), value=-torch.inf) for own in scores]
            whole = IndexQueries(self.layer, self.vectors, self.weights, torch.cat(padded, dim=1))
            ends = torch.tensor(blocks).cumsum(0).tolist()
            self._made += [whole.part(end - count, end) for end, count in zip(ends, blocks, strict=True)]
        return self._made


class _Products(TorchFunctionMode):
    """Notes the left sides `[B, T, …, …]` of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.left: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.matmul and args[0].ndim == 4:
            self.left.append(args[0])
        return func(*args, **(kwargs or {}))


def _watched(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    run = RUNNING.current
    run.indexed = run.asked = None
    with _Products() as products:
        chosen = forward(*args, **kwargs)
    if run.indexed is not None and len(products.left) == 2:
        (layer, kept), (vectors, weights) = run.indexed, products.left
        expected = (*vectors.shape[:2], 1, vectors.shape[2])
        if weights.shape == expected and vectors.shape[-1] == kept[0].index_dim:
            run.asked = Asked(layer, kept, vectors.detach().float(), weights[:, :, 0].detach().float())
    return chosen
