"""What the benchmarks call fidelity, by its definitions."""

import numpy as np
import pytest

from benchmarks import layers
from benchmarks.fidelity import Fidelity, Ids, Sample, Truth, judge, scores, truth
from benchmarks.layers import Float32, Layer

K = 16


@pytest.fixture(scope="module")
def layer() -> Layer:
    return layers.MadeUp(600, heads=2, group=2, dim=32, steps=3).long_tailed()


@pytest.fixture(scope="module")
def exact(layer: Layer) -> Truth:
    return truth(layer, [K, layer.length])


def best_ids(layer: Layer, k: int) -> list[list[Ids]]:
    steps, heads, _, _ = layer.steps.shape
    return [
        [np.argsort(-scores(layer.steps[s, h], layer.keys[h]), axis=1)[:, :k] for h in range(heads)]
        for s in range(steps)
    ]


def attended(layer: Layer, ids: list[list[Ids]]) -> Float32:
    """Softmax over the chosen tokens alone, row by row in float64."""
    outs = np.empty(layer.steps.shape, np.float32)
    for place in np.ndindex(layer.steps.shape[:3]):
        step, head, row = place
        own = ids[step][head][row]
        logits = layer.keys[head][own].astype(np.float64) @ layer.steps[place] * layer.scaling
        weights = np.exp(logits - logits.max())
        outs[place] = weights @ layer.values[head][own].astype(np.float64) / weights.sum()
    return outs


def judged(layer: Layer, exact: Truth, ids: list[list[Ids]]) -> Fidelity:
    return judge(layer, exact, K, attended(layer, ids), ids)


def test_the_oracle_holds_its_own_mass(layer: Layer, exact: Truth) -> None:
    found = judged(layer, exact, best_ids(layer, K))
    assert found.ratio == pytest.approx(1, abs=1e-5)
    assert found.ratio_worst == pytest.approx(1, abs=1e-5)
    assert found.mass == pytest.approx(float(exact.mass[K].mean()), rel=1e-4)
    assert found.error_topk < 1e-4 < found.error_dense
    assert found.enough


def test_all_tokens_are_dense_attention(layer: Layer, exact: Truth) -> None:
    everything = best_ids(layer, layer.length)
    found = judge(layer, exact, K, attended(layer, everything), everything)
    assert found.mass == pytest.approx(1, abs=1e-4)
    assert found.error_dense < 1e-4
    named = judge(layer, exact, K, exact.dense, None)
    assert named.mass == 1
    assert named.error_dense == 0


def test_the_mass_of_everything_is_one(layer: Layer, exact: Truth) -> None:
    np.testing.assert_allclose(exact.mass[layer.length], 1, atol=1e-5)
    np.testing.assert_allclose(exact.best[layer.length], exact.dense, atol=1e-4)


def test_a_surplus_in_one_row_makes_no_other_row_good(layer: Layer, exact: Truth) -> None:
    ids = best_ids(layer, layer.length)
    for by_head in ids:
        for head, own in enumerate(by_head):
            kept = own.copy()
            kept[0, 1:] = -1  # one row has a single token, the other all of them
            by_head[head] = kept
    found = judge(layer, exact, K, exact.dense, ids)
    assert found.ratio < 0.99
    assert not found.enough


def test_a_token_counts_once_and_padding_never(layer: Layer, exact: Truth) -> None:
    single = [[own[:, :1] for own in by_head] for by_head in best_ids(layer, K)]
    repeated = [[np.repeat(own, 5, 1) for own in by_head] for by_head in single]
    padded = [[np.pad(own, [(0, 0), (0, 3)], constant_values=-1) for own in by_head] for by_head in single]
    outs = attended(layer, single)
    once = judge(layer, exact, K, outs, single)
    assert judge(layer, exact, K, outs, repeated) == once
    assert judge(layer, exact, K, outs, padded) == once


def test_a_sample_knows_enough_from_too_little(layer: Layer) -> None:
    sample = Sample.of(layer, K)
    exact = [
        np.argsort(-scores(rows, keys), axis=1)[:, :K]
        for rows, keys in zip(sample.rows, layer.keys, strict=True)
    ]
    assert sample.holds_enough(exact)
    assert sample.holds_enough(exact[:1])
    assert not sample.holds_enough([own[:, 1:] for own in exact])
