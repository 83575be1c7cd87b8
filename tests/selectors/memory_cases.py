"""Hosts over random keys: any head dimension and dtype, and many blocks of them."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from offload_decode.attention.queries import Queries
from offload_decode.attention.rows import numpy_view, tensor_view
from offload_decode.kv.host_cache import HostKV
from offload_decode.selectors import registry
from offload_decode.selectors import scores as key_scores
from offload_decode.store.memory import MemoryStore
from offload_decode.types import LayerKind, ModelShape

KINDS = (LayerKind.SLIDING, *[LayerKind.FULL] * 5, LayerKind.SLIDING)
LAYERS = (1, 2, 3, 4, 5)  # the searched ones
BATCH, TOKENS = 2, 3


class WatchedHost(HostKV):
    """`read` lists the (layer, head) whose keys were asked for."""

    def __init__(self, store):
        super().__init__(store, torch.device("cpu"))
        self.read = []

    def keys(self, layer, head):
        self.read.append((layer, head))
        return super().layer_keys(layer)[head]

    def layer_keys(self, layer):
        heads = super().layer_keys(layer)
        self.read += [(layer, head) for head in range(len(heads))]
        return heads


@dataclass
class Case:
    """A host and queries of `BATCH` sequences with `TOKENS` tokens."""

    host: WatchedHost

    @classmethod
    def over(cls, keys, heads):
        """The case of `keys` `[layers, Hkv, N, D]`, an array or nested lists, with so many query heads."""
        shape = ModelShape.uniform(KINDS, heads, len(keys[0]), keys[0][0].shape[1], window=4)
        return cls(WatchedHost(MemoryStore(shape, keys, keys)))

    @classmethod
    def drawn(cls, length, heads, kv_heads, dim, dtype):
        """Keys that differ from layer to layer and from head to head."""
        keys = [
            [numpy_view(drawn(length, dim, dtype, 100 * layer + head)) for head in range(kv_heads)]
            for layer in range(len(KINDS))
        ]
        return cls.over(keys, heads)

    @classmethod
    def zeros(cls, length, heads, kv_heads, dim):
        """Keys of nothing, in the memory of one number however many they are."""
        return cls.over(np.broadcast_to(np.float32(0), (len(KINDS), kv_heads, length, dim)), heads)

    @property
    def shape(self):
        return self.host.store.manifest.shape

    @property
    def dtype(self):
        return getattr(torch, self.host.store.manifest.dtype)

    def make(self, name, **options):
        return registry.create(name, options, self.host, self.shape)

    def queries(self, tokens=TOKENS, batch=BATCH, seed=0):
        rows = batch * self.shape.group * tokens
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn(self.shape.kv_heads, rows, self.shape.head_dim, generator=generator)
        return Queries(drawn, scaling=0.1, group=self.shape.group, tokens=tokens)

    def keys(self, layer):
        """`[Hkv, N, D]` float32."""
        heads = range(self.shape.kv_heads)
        return torch.stack([tensor_view(self.host.store.keys(layer, head)) for head in heads]).float()


def drawn(length, dim, dtype, seed):
    """Keys `[N, D]`, their channels of unlike size, around a mean that is not zero."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(length, dim, generator=generator) * torch.arange(1, dim + 1) + 2).to(dtype)


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
        monkeypatch.setattr(key_scores, "BLOCK_TOKENS", 16)
        monkeypatch.setattr(key_scores, "BLOCK_SCORES", 60)
        return Case.drawn(*request.param)


def assert_best(scores, ids, budget):
    """`ids [..., k]` are the `budget` (or all) best of `scores [..., N]`, best first, each once."""
    k = min(budget, scores.shape[-1])
    assert ids.shape == (*scores.shape[:-1], k)
    assert (ids.sort(-1).values.diff(dim=-1) > 0).all()
    torch.testing.assert_close(scores.gather(-1, ids), scores.topk(k).values, atol=1e-5, rtol=1e-4)
