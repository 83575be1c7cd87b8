"""What the benchmarks call fidelity, by its definitions."""

import numpy as np
import pytest

from benchmarks import layers
from benchmarks.layers import Float32, Ids, Layer, Truth

K = 16


@pytest.fixture(scope="module")
def layer() -> Layer:
    return layers.MadeUp(600, heads=2, group=2, dim=32, steps=3).long_tailed()


@pytest.fixture(scope="module")
def exact(layer: Layer) -> Truth:
    return Truth.of_steps(layer, [K, layer.length])


def best_ids(layer: Layer, rows: Float32, k: int) -> list[Ids]:
    """By head, in float64."""
    scores = (own @ keys.T.astype(np.float64) for own, keys in zip(rows, layer.keys, strict=True))
    return [np.argsort(-each, axis=1)[:, :k] for each in scores]


def attended(layer: Layer, rows: Float32, ids: list[Ids]) -> Float32:
    """Softmax over the chosen tokens alone, row by row in float64."""
    outs = np.empty(rows.shape, np.float32)
    for head, row in np.ndindex(rows.shape[:2]):
        own = ids[head][row]
        logits = layer.keys[head][own].astype(np.float64) @ rows[head, row] * layer.scaling
        weights = np.exp(logits - logits.max())
        outs[head, row] = weights @ layer.values[head][own].astype(np.float64) / weights.sum()
    return outs


def test_the_oracle_holds_its_own_mass(layer: Layer, exact: Truth) -> None:
    ids = best_ids(layer, exact.rows, K)
    out = attended(layer, exact.rows, ids)
    found = exact.judge(K, ids, out)
    assert found.ratio == pytest.approx(1, abs=1e-5)
    assert found.error > 1e-4
    assert found.enough
    np.testing.assert_allclose(exact.exact.top[K], out, atol=1e-4)
    weights = np.exp(layer.scaling * exact.rows[0, 0] @ layer.keys[0].T.astype(np.float64))
    share = weights[ids[0][0]].sum() / weights.sum()
    assert float(exact.exact.held[K][0, 0]) == pytest.approx(share, rel=1e-4)


def test_all_tokens_are_dense_attention(layer: Layer, exact: Truth) -> None:
    everything = best_ids(layer, exact.rows, layer.length)
    found = exact.judge(layer.length, everything, attended(layer, exact.rows, everything))
    assert found.ratio == pytest.approx(1, abs=1e-4)
    assert found.error < 1e-4
    named = exact.judge(K, None)
    assert (named.ratio, named.error) == (1, 0)


def test_a_surplus_in_one_row_makes_no_other_row_good(layer: Layer, exact: Truth) -> None:
    ids = best_ids(layer, exact.rows, layer.length)
    for own in ids:
        own[0, 1:] = -1  # one row has a single token, the others all of them
    found = exact.judge(K, ids)
    assert found.ratio < 0.99
    assert not found.enough


def test_padding_never_counts(layer: Layer, exact: Truth) -> None:
    single = best_ids(layer, exact.rows, 1)
    padded = [np.pad(own, [(0, 0), (0, 3)], constant_values=-1) for own in single]
    out = attended(layer, exact.rows, single)
    assert exact.judge(K, padded, out) == exact.judge(K, single, out)


def test_a_sample_knows_enough_from_too_little(layer: Layer) -> None:
    sample = Truth.of_sample(layer, K)
    ids = best_ids(layer, sample.rows, K)
    assert sample.judge(K, ids).enough
    assert not sample.judge(K, [own[:, 1:] for own in ids]).enough
    judged = {tuple(row) for row in layer.steps.reshape(-1, 32).tolist()}
    assert not judged & {tuple(row) for row in sample.rows.reshape(-1, 32).tolist()}, "they are others"
