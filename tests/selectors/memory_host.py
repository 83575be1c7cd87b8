"""Random keys in memory instead of a store: any head dimension and dtype, and many blocks of them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from offload_decode.attention import ranking
from offload_decode.attention.queries import Queries
from offload_decode.kernels.rows import Rows, numpy_view
from offload_decode.selection import key_scores
from offload_decode.selectors import registry
from offload_decode.types import LayerKind, ModelShape

KINDS = (LayerKind.SLIDING, *[LayerKind.FULL] * 5, LayerKind.SLIDING)
LAYERS = (1, 2, 3, 4, 5)  # the searched ones
BATCH, TOKENS = 2, 3


class MemoryHost:
    """Stands in for `HostKV`; `read` lists the (layer, head) whose keys were asked for."""

    def __init__(self, length, kv_heads, dim, dtype):
        self.length, self.kv_heads, self.dim, self.dtype = length, kv_heads, dim, dtype
        self.device = torch.device("cpu")
        self.read = []

    def keys(self, layer, head):
        self.read.append((layer, head))
        return Rows(numpy_view(self.drawn(layer, head)))

    def layer_keys(self, layer):
        return [self.keys(layer, head) for head in range(self.kv_heads)]

    def drawn(self, layer, head):
        generator = torch.Generator().manual_seed(100 * layer + head)
        spread = torch.arange(1, self.dim + 1)  # channels of unlike size, around a mean that is not zero
        return (torch.randn(self.length, self.dim, generator=generator) * spread + 2).to(self.dtype)

    def key_norms(self, layer, head):
        return self.drawn(layer, head).float().norm(dim=-1)


@dataclass
class Case:
    """A host, a model's shape and queries of `BATCH` sequences with `TOKENS` tokens."""

    host: MemoryHost
    shape: ModelShape

    def make(self, name, **options):
        return registry.create(name, options, self.host, self.shape)

    def queries(self, tokens=TOKENS, batch=BATCH, seed=0):
        rows = batch * self.shape.group * tokens
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn(self.shape.kv_heads, rows, self.host.dim, generator=generator)
        return Queries(drawn, scaling=0.1, group=self.shape.group, tokens=tokens)

    def keys(self, layer):
        """`[Hkv, N, D]` float32."""
        return torch.stack([self.host.drawn(layer, head) for head in range(self.shape.kv_heads)]).float()


class MemoryCases:
    """A test class that inherits this has a fixture `case`."""

    @pytest.fixture(
        params=[
            (1, 2, 1, 5, torch.float32),
            (61, 4, 2, 7, torch.float16),
            (130, 6, 2, 16, torch.bfloat16),
            (97, 40, 1, 8, torch.float32),
            (33, 10, 10, 3, torch.float32),
        ],
        ids=str,
    )
    def case(self, request, monkeypatch):
        """(tokens, query heads, KV heads, head dimension, dtype)."""
        length, heads, kv_heads, dim, dtype = request.param
        monkeypatch.setattr(key_scores, "BLOCK_TOKENS", 16)
        monkeypatch.setattr(ranking, "BLOCK_SCORES", 60)
        return Case(
            MemoryHost(length, kv_heads, dim, dtype),
            ModelShape(KINDS, heads, kv_heads, dim, sliding_window=4),
        )


def assert_best(scores, ids, budget):
    """`ids [..., k]` are the `budget` (or all) best of `scores [..., N]`, best first, each once."""
    k = min(budget, scores.shape[-1])
    assert ids.shape == (*scores.shape[:-1], k)
    assert (ids.sort(-1).values.diff(dim=-1) > 0).all()
    torch.testing.assert_close(scores.gather(-1, ids), scores.topk(k).values, atol=1e-5, rtol=1e-4)
