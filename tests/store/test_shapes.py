"""A store of layers of several geometries: states, latents, windows of their own widths, nothing at all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from offload_decode.common.errors import StoreDamaged, StoreForeign
from offload_decode.store.format import Manifest
from offload_decode.store.staging import WINDOWS, partial_path
from offload_decode.types import LayerKind, LayerShape, ModelShape
from tests.store.jobs import tree
from tests.store.test_growth import CHUNK, STATES, Corpus

TOKENS = 2 * CHUNK


def shaped(latent: bool) -> Corpus:
    layers = (
        LayerShape(LayerKind.NONE, states=STATES),
        LayerShape(LayerKind.FULL, 1, 24, 24 if latent else 8, latent=latent, states=STATES[:1]),
        LayerShape(LayerKind.CHUNKED, 4, 10, 6, window=7),
        LayerShape(LayerKind.NONE),
    )
    return Corpus(ModelShape(layers, query_heads=4), TOKENS)


def begun(corpus: Corpus, path: Path) -> Path:
    """Where the windows and states lie of a store whose first chunk is committed."""
    with corpus.open(path, TOKENS) as writer:
        assert writer.states(0) is None
        corpus.feed(writer, until=CHUNK)
    return partial_path(path) / WINDOWS


@pytest.mark.parametrize("latent", [False, True])
def test_what_each_layer_keeps_is_read_back(tmp_path: Path, latent: bool) -> None:
    corpus = shaped(latent)
    store, shape = corpus.write(tmp_path / "a.kv", TOKENS), corpus.shape
    store.verify()
    assert store.manifest.shape == shape
    assert store.values(1, 0).shape == (TOKENS, shape.value_dim)
    assert not latent or store.values(1, 0) is store.keys(1, 0)
    keys, values = store.window(2)
    assert (keys.shape, values.shape) == ((4, 6, 10), (4, 6, 6))
    for layer in shape.state_layers:
        for read, expected in zip(store.states(layer), corpus.states(layer, TOKENS), strict=True):
            np.testing.assert_array_equal(read, expected)
    assert store.cost()["states"] == 2 * 6 * 3 * 2 + 2 * 4 * 5 * 4


def test_a_prefill_goes_on_with_the_states_of_its_last_commit(tmp_path: Path) -> None:
    corpus = shaped(latent=False)
    # A commit that was begun when the process was killed.
    (begun(corpus, tmp_path / "a.kv") / f"state-000-{TOKENS}").write_bytes(b"half")
    with corpus.open(tmp_path / "a.kv", TOKENS) as writer:
        for read, expected in zip(writer.states(0) or (), corpus.states(0, CHUNK), strict=True):
            np.testing.assert_array_equal(read, expected)
        corpus.feed(writer)
        writer.publish()
    assert tree(tmp_path / "a.kv") == tree(corpus.write(tmp_path / "whole.kv", TOKENS).path)


def test_a_state_that_changed_on_disk_is_damage(tmp_path: Path) -> None:
    corpus = shaped(latent=False)
    file = begun(corpus, tmp_path / "a.kv") / f"state-000-{CHUNK}"
    file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
    with pytest.raises(StoreDamaged, match="state of layer 0"):
        corpus.open(tmp_path / "a.kv", TOKENS)


@pytest.mark.parametrize(
    "wrong",
    [
        {"states": [{"name": "../conv0", "shape": [1], "dtype": "float32"}]},
        {"states": [{"name": "conv0", "shape": [1 << 40], "dtype": "float32"}]},
        {"states": [{"name": "conv0", "shape": [1 << 20, 1 << 20], "dtype": "float32"}]},
        {"states": [{"name": "conv0", "shape": [], "dtype": "float32"}]},
        {"states": [{"name": "conv0", "shape": [2], "dtype": "object"}]},
        {"states": [{"name": "conv0", "shape": [2], "dtype": "float32"}] * 2},
        {"window": 5},
        {"latent": 1},
        {"latent": True},
        {"kind": "linear"},
        {"kv_heads": 0},
    ],
    ids=str,
)
def test_a_layer_that_makes_no_sense_is_refused(wrong: dict[str, object]) -> None:
    data = shaped(latent=False).whole.manifest.to_json()
    data["shape"]["layers"][1] |= wrong
    with pytest.raises(StoreForeign, match="manifest cannot be used"):
        Manifest.from_json(data)
