"""`demo-rope` keeps every token in every layer, and its keys turn with their places."""

from __future__ import annotations

from offload_decode.models.checkpoint import read_config


def test_every_layer_is_full_and_rotary() -> None:
    config, shape = read_config("demo-rope")
    assert config.model_type == "llama"
    assert shape.full_layers == (0, 1, 2, 3)
    assert shape.group > 1
    assert config.rope_parameters["rope_type"] == "default"
