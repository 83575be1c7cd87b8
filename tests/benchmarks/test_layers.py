"""The data that benchmarks run on."""

import numpy as np

from benchmarks import layers


def test_the_same_seed_makes_the_same_layer() -> None:
    first, again, other = (
        layers.MadeUp(300, heads=2, group=2, dim=16, steps=2, seed=seed).long_tailed() for seed in (0, 0, 1)
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
    logits = layer.scaling * layer.steps[:, 0].reshape(-1, 128) @ layer.keys[0].astype(np.float32).T
    weights = -np.sort(-np.exp(logits - logits.max(1, keepdims=True)))
    weights /= weights.sum(1, keepdims=True)
    assert 0.4 < weights[:, :64].sum(1).mean() < 0.8
    assert 0.7 < weights[:, :1024].sum(1).mean() < 0.98
    ranks = np.geomspace(10, 10_000, 40).astype(int)
    slope = np.polyfit(np.log(ranks), np.log(weights[:, ranks - 1].T), 1)[0].mean()
    assert -2.2 < slope < -1
