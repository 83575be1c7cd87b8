"""Small stores, prefilled by a tiny model or made of random rows; their sizes are ragged against pages."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import numpy as np
import torch

from offload_decode.common.rows.encodings import encode
from offload_decode.models.loading import wrap
from offload_decode.prefill_jobs.job import Settings, prefill_tokens
from offload_decode.store.base import Store
from offload_decode.store.format import kv_encodings
from offload_decode.store.memory import MemoryStore
from offload_decode.store.reader import KVStore
from offload_decode.testing.tiny import VOCAB, tiny_llama
from offload_decode.types import Document, LayerKind, LayerShape, ModelShape

STORES: list[tuple[Any, ...]] = [
    (1, 4, 2),
    (37, 1, 1),
    (50, 40, 5),
    (130, 8, 8),
    (50, 4, 2, "int8"),
    (130, 8, 2, "int4-values"),
]
"""Arguments of `stored`: tokens, query heads, KV heads, and how keys and values are kept."""
WIDTHS: list[tuple[Any, ...]] = [
    (50, 4, 2, 24, 16),
    (50, 4, 2, 6, 16, "int4-values"),
    (50, 128, 1, 36, 36, "auto", True),
    (50, 8, 1, 20, 20, "int8", True),
]
"""Arguments of `of_widths`: also the widths of keys and of values, and whether these are latents."""


def stored(folder: Path, tokens: int, heads: int, kv_heads: int, kv: str = "auto") -> KVStore:
    """A store of a random Llama of two layers."""
    ids = torch.randint(3, VOCAB, (tokens,), generator=torch.Generator().manual_seed(5))
    model = tiny_llama(
        hidden_size=8 * heads,  # which transformers wants to be a multiple of the heads
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        num_hidden_layers=2,
    )
    settings = Settings(options={"chunk": 64}, kv=kv)
    documents = [Document("all", 0, tokens)]
    prefill_tokens(wrap(model), ids.numpy().astype(np.int32), documents, folder / "store", settings)
    return KVStore.open(folder / "store")


def of_widths(
    tokens: int,
    heads: int,
    kv_heads: int,
    key_dim: int,
    value_dim: int,
    kv: str = "auto",
    latent: bool = False,
) -> MemoryStore:
    """A store of random rows whose values have a width of their own, or are their keys."""
    full = LayerShape(LayerKind.FULL, kv_heads, key_dim, value_dim, latent=latent)
    rng, rows = np.random.default_rng(5), (2, kv_heads, tokens)
    keys, values = (rng.standard_normal((*rows, dim), np.float32) for dim in (key_dim, value_dim))
    queries = rng.standard_normal((2, kv_heads, heads // kv_heads * tokens // 2, key_dim), np.float32)
    keys, values = (
        encode(part, encoding) if encoding else part
        for part, encoding in zip((keys, values), kv_encodings(kv), strict=True)
    )
    return MemoryStore(ModelShape((full, full), heads), keys, keys if latent else values, queries=queries)


@cache
def of_parameter(parameter: tuple[Any, ...]) -> Store:
    """One of STORES or of WIDTHS, made once: no test changes it."""
    if parameter in WIDTHS:
        return of_widths(*parameter)
    return stored(Path(mkdtemp(dir=_folder().name)), *parameter)


@cache
def _folder() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="offload-decode-")  # removed when the process ends
