"""A store of layers of several geometries: states, latents, windows of their own widths, nothing at all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from offload_decode.common.errors import StoreDamaged, StoreForeign
from offload_decode.store.format import Manifest
from offload_decode.store.reader import KVStore
from offload_decode.store.staging import WINDOWS, partial_path
from offload_decode.store.writer import KVStoreWriter
from offload_decode.types import LayerKind, LayerShape, ModelShape, StateShape
from tests.store.jobs import Job, make_job

TOKENS, CHUNK = 40, 16
STATES = (StateShape("conv0", (6, 3), "float16"), StateShape("recurrent0", (2, 4, 5), "float32"))


def shaped(latent: bool) -> tuple[Job, ModelShape]:
    values = 24 if latent else 8
    shape = ModelShape(
        (
            LayerShape(LayerKind.NONE, states=STATES),
            LayerShape(LayerKind.FULL, 1, 24, values, latent=latent, states=STATES[:1]),
            LayerShape(LayerKind.CHUNKED, 4, 10, 6, window=7),
            LayerShape(LayerKind.NONE),
        ),
        query_heads=4,
    )
    return make_job(TOKENS, shape=shape), shape


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def run(path: Path, job: Job, shape: ModelShape, stop: int = TOKENS) -> None:
    """Write the tokens from where the store stands up to `stop`, with numbers that depend on them alone."""
    with KVStoreWriter.open(path, job.manifest, job.tokens, job.documents) as writer:
        for start in range(writer.done, stop, CHUNK):
            end = min(start + CHUNK, stop)
            for layer, own in enumerate(shape.layers):
                if own.kind is not LayerKind.NONE:
                    whole = numbers(own.kv_heads, TOKENS, own.key_dim + own.value_dim, seed=layer)
                    part = whole[:, start:end].astype(np.float16)
                    keys = part[..., : own.key_dim]
                    writer.append(layer, keys, keys if own.latent else part[..., own.key_dim :])
                if own.states:
                    assert (writer.states(layer) is None) == (start == 0)
                    writer.put_states(layer, states(layer, own, end))
            slots, _, _ = writer.samples(start, end)
            writer.put_queries(1, slots, numbers(1, slots.stop - slots.start, 24).astype(np.float16))
            writer.commit(end)
        if stop == TOKENS:
            writer.publish()


def states(layer: int, own: LayerShape, tokens: int) -> list[np.ndarray]:
    return [numbers(*state.shape, seed=100 * layer + tokens).astype(state.dtype) for state in own.states]


@pytest.mark.parametrize("latent", [False, True])
def test_what_each_layer_keeps_is_read_back(tmp_path: Path, latent: bool) -> None:
    job, shape = shaped(latent)
    run(tmp_path / "a.kv", job, shape)
    store = KVStore.open(tmp_path / "a.kv")
    store.verify()
    assert store.manifest.shape == shape
    assert store.values(1, 0).shape == (TOKENS, shape.value_dim)
    assert not latent or store.values(1, 0) is store.keys(1, 0)
    keys, values = store.window(2)
    assert (keys.shape, values.shape) == ((4, 6, 10), (4, 6, 6))
    for layer in shape.state_layers:
        for read, expected in zip(
            store.states(layer), states(layer, shape.layers[layer], TOKENS), strict=True
        ):
            np.testing.assert_array_equal(read, expected)
    assert store.cost()["states"] == 2 * 6 * 3 * 2 + 2 * 4 * 5 * 4


def test_a_prefill_goes_on_with_the_states_of_its_last_commit(tmp_path: Path) -> None:
    job, shape = shaped(latent=False)
    run(tmp_path / "whole.kv", job, shape)
    run(tmp_path / "a.kv", job, shape, stop=CHUNK)
    # A commit that was begun when the process was killed.
    (partial_path(tmp_path / "a.kv") / WINDOWS / "state-000-32").write_bytes(b"half")
    with KVStoreWriter.open(tmp_path / "a.kv", job.manifest, job.tokens, job.documents) as writer:
        found = writer.states(0)
        assert found is not None
        for read, expected in zip(found, states(0, shape.layers[0], CHUNK), strict=True):
            np.testing.assert_array_equal(read, expected)
    run(tmp_path / "a.kv", job, shape)
    sums = [(tmp_path / name / "SHA256SUMS").read_bytes() for name in ("whole.kv", "a.kv")]
    assert sums[0] == sums[1]


def test_a_state_that_changed_on_disk_is_damage(tmp_path: Path) -> None:
    job, shape = shaped(latent=False)
    run(tmp_path / "a.kv", job, shape, stop=CHUNK)
    file = partial_path(tmp_path / "a.kv") / WINDOWS / f"state-000-{CHUNK}"
    file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
    with pytest.raises(StoreDamaged, match="state of layer 0"):
        KVStoreWriter.open(tmp_path / "a.kv", job.manifest, job.tokens, job.documents)


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
    job, _ = shaped(latent=False)
    data = job.manifest.to_json()
    data["shape"]["layers"][1] |= wrong
    with pytest.raises(StoreForeign, match="manifest cannot be used"):
        Manifest.from_json(data)
