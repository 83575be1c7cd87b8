"""A model in bfloat16 is prefilled by products of bfloat16 where the processor has them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from offload_decode.attention import dense
from offload_decode.attention import dense as half_products
from offload_decode.attention.dense import attend_bf16
from offload_decode.models.loading import wrap
from offload_decode.prefill_jobs.job import Settings, prefill_tokens
from offload_decode.store.reader import KVStore
from offload_decode.types import Document
from tests.families import VOCAB
from tests.tiny import tiny_model

TOKENS, CHUNK = 300, 64


def prefilled(folder: Path, kv: str = "auto") -> KVStore:
    tokens = np.random.default_rng(2).integers(3, VOCAB, TOKENS).astype(np.int32)
    model = wrap(tiny_model("llama").to(torch.bfloat16))
    given = Settings(options={"chunk": CHUNK}, kv=kv)
    prefill_tokens(model, tokens, [Document("all", 0, TOKENS)], folder, given)
    return KVStore.open(folder)


def last_values(store: KVStore) -> np.ndarray:
    layer = store.manifest.shape.full_layers[-1]
    heads = range(store.manifest.shape.kv_heads)
    return np.stack([np.asarray(store.values(layer, head), np.float32) for head in heads])


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many keys were met at once in products of bfloat16."""
    met: list[int] = []

    def noted(*given: torch.Tensor) -> object:
        met.append(given[1].shape[2])
        return attend_bf16(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(dense, "attend_bf16", noted)
    return met


def test_the_store_is_that_of_float32_products_but_for_rounding(
    taken: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(half_products, "has_bf16_products", lambda: False)
    wanted = last_values(prefilled(tmp_path / "without"))
    assert not taken
    monkeypatch.setattr(half_products, "has_bf16_products", lambda: True)
    found = last_values(prefilled(tmp_path / "with"))
    assert set(taken) == {64, 128, 192}, "a last chunk of 44 rows is too short"
    off = np.abs(found - wanted).max() / np.abs(wanted).max()
    assert 0 < off < 2**-5, "values that went through a model in bfloat16"


def test_rows_in_fewer_bits_are_met_in_float32(
    taken: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(half_products, "has_bf16_products", lambda: True)
    prefilled(tmp_path / "store", kv="int4-values")
    assert not taken
