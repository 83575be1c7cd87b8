"""The data that benchmarks run on."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks import layers
from benchmarks.fidelity import truth
from benchmarks.ways import MemoryLayer
from offload_decode.common.rows.encodings import decode, encode
from offload_decode.store.memory import MemoryStore
from offload_decode.types import LayerKind, ModelShape, Selection


@pytest.mark.parametrize("make", [layers.MadeUp.long_tailed, layers.MadeUp.gaussian])
def test_the_same_seed_makes_the_same_layer(make: object) -> None:
    first, again, other = (
        make(layers.MadeUp(300, heads=2, group=2, dim=16, steps=2, seed=seed))  # type: ignore[operator]
        for seed in (0, 0, 1)
    )
    for ours, theirs in zip((*first.keys, *first.values), (*again.keys, *again.values), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(first.steps, again.steps)
    assert not np.array_equal(first.keys[0], other.keys[0])
    assert first.keys[0].shape == (300, 16)
    assert first.steps.shape == (2, 2, 2, 16)
    assert first.tuning.shape == (2, layers.TUNING * 2, 16)


def test_a_part_of_a_layer_is_a_view() -> None:
    whole = layers.MadeUp(300, heads=2, group=2, dim=16, steps=2).long_tailed()
    part = whole.first(100).heads(1)
    assert (part.length, len(part.keys), part.steps.shape[1], len(part.tuning)) == (100, 1, 1, 1)
    assert np.shares_memory(part.keys[0], whole.keys[0])


def test_the_long_tail_is_long() -> None:
    """Neither a few tokens nor all of them: weights fall about as a power of their rank."""
    layer = layers.MadeUp(16_384, heads=1, steps=8).long_tailed()
    exact = truth(layer, [64, 1024])
    assert 0.4 < float(exact.mass[64].mean()) < 0.8
    assert 0.7 < float(exact.mass[1024].mean()) < 0.98
    assert -2.2 < exact.slope < -1
    independent = layers.MadeUp(16_384, heads=1, steps=8).gaussian()
    assert float(truth(independent, [1024]).mass[1024].mean()) < 0.4


def test_queries_that_tune_are_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = ModelShape.uniform((LayerKind.SLIDING, LayerKind.FULL), 4, 2, 8, 16)
    sampled = np.arange(2 * 40 * 8, dtype=np.float32).reshape(2, 40, 8)
    rows = np.zeros((2, 2, 50, 8), np.float32)
    store = MemoryStore(shape, rows, rows, queries=[[], sampled])
    monkeypatch.setattr(layers.KVStore, "open", lambda path: store)
    layer = layers.captured(Path("store"), steps=5)
    assert layer.steps.shape == (5, 2, 2, 8)
    assert layer.scaling == 8**-0.5
    for head in range(2):
        judged = {tuple(row) for row in layer.steps[:, head].reshape(-1, 8).tolist()}
        tuning = {tuple(row) for row in layer.tuning[head].tolist()}
        assert len(judged) == 10
        assert not judged & tuning
        # A group's rows are neighbours among the samples.
        gaps = np.diff(layer.steps[:, head, :, 0], axis=1)
        np.testing.assert_array_equal(gaps, 8)


@pytest.mark.parametrize("encoding", ["int8-rows", "int4-rows"])
def test_what_a_store_keeps_encoded_is_attended_to_as_it_is(
    encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = ModelShape.uniform((LayerKind.FULL, LayerKind.FULL), 4, 2, 8)
    keys, values, queries = np.random.default_rng(0).standard_normal((3, 2, 2, 50, 8), np.float32)
    stored = [encode(rows, encoding) for rows in (keys, values)]
    store = MemoryStore(shape, *stored, queries=queries)
    monkeypatch.setattr(layers.KVStore, "open", lambda path: store)
    layer = layers.captured(Path("store"), steps=2)
    rows = layer.steps[0]
    logits = layer.scaling * rows @ np.stack([decode(own) for own in layer.keys]).transpose(0, 2, 1)
    weights = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    expected = weights @ np.stack([decode(own) for own in layer.values])
    np.testing.assert_allclose(MemoryLayer(layer).attend(rows, Selection(None)), expected, atol=1e-5)
