"""A tiny model is small, and has every kind of layer of its model, in the model's order."""

import pytest
import torch
import transformers

from offload_decode.hf.shape import observed_shape, text_model
from offload_decode.hf.tiny_model import NoTinyModel, tiny_config_of, tiny_model_of
from tests.families import SERVED, config_of

# The released sizes that transformers takes by default, and the layers of their tiny models.
REAL = [
    ("Llama", ["full", "full"]),
    ("Gemma3Text", ["sliding", "full"]),
    ("GptOss", ["sliding", "full"]),
    ("Llama4Text", ["chunked", "chunked", "chunked", "full"]),
    ("DeepseekV3", ["full"] * 4),  # three dense ones, and experts
    ("GPT2", ["full", "full"]),
]


def kinds(config):
    return [own.kind.value for own in observed_shape(config).layers]


@pytest.mark.parametrize(("name", "layers"), REAL)
def test_the_tiny_model_of_a_released_size_is_small_and_has_each_kind_of_layer(name, layers):
    config = getattr(transformers, f"{name}Config")()
    tiny = tiny_config_of(config)
    assert type(tiny) is type(config)
    assert kinds(tiny) == layers
    assert sum(weight.numel() for weight in tiny_model_of(tiny, 0).parameters()) < 1e6
    assert set(kinds(config)) == set(layers)


@pytest.mark.skipif("qwen3_next" not in SERVED, reason="this transformers forgets states")
def test_recurrent_layers_come_before_the_attention_as_in_the_model():
    tiny = tiny_config_of(config_of("qwen3_next", num_hidden_layers=12, layer_types=None))
    assert kinds(tiny) == ["none", "full"]
    assert [bool(own.states) for own in observed_shape(tiny).layers] == [True, False]


def test_layers_that_read_the_keys_of_others_are_the_last():
    assert kinds(tiny_config_of(config_of("gemma3n")))[-2:] == ["none", "none"]


def test_heads_keep_how_they_share_keys():
    for kv_heads, few in ((32, 4), (8, 2), (1, 1)):
        tiny = tiny_config_of(transformers.LlamaConfig(num_key_value_heads=kv_heads))
        assert (tiny.num_attention_heads, tiny.num_key_value_heads) == (4, few)


def test_models_that_differ_in_sizes_have_one_tiny_config():
    small, large = (
        transformers.LlamaConfig(hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers)
        for hidden, layers in ((2048, 16), (4096, 40))
    )
    assert tiny_config_of(small).to_dict() == tiny_config_of(large).to_dict()
    rope = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4}
    scaled = transformers.LlamaConfig(rope_parameters=rope)
    assert tiny_config_of(scaled).to_dict() != tiny_config_of(small).to_dict()


def test_windows_and_lengths_are_shorter_than_the_prefix_of_the_check():
    assert tiny_config_of(transformers.Gemma2Config()).sliding_window < 10
    assert tiny_config_of(transformers.Llama4TextConfig()).attention_chunk_size < 10
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    assert tiny_config_of(transformers.LlamaConfig(rope_parameters=rope)).max_position_embeddings < 69


def test_seeds_change_a_tiny_models_weights_and_not_the_global_generator():
    tiny = tiny_config_of(config_of("llama"))
    first, again, other = (next(tiny_model_of(tiny, seed).parameters()) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_model_whose_tiny_model_cannot_be_built_says_why(monkeypatch):
    def built(config, **arguments):
        if config.hidden_size < 4096:
            raise ValueError("hidden_size must be 4096")
        return text_model(config, **arguments)

    monkeypatch.setattr("offload_decode.hf.tiny_model.text_model", built)
    with pytest.raises(NoTinyModel, match="hidden_size must be 4096"):
        tiny_config_of(transformers.LlamaConfig())


@pytest.mark.skipif("falcon_h1" not in SERVED, reason="this transformers forgets states")
@pytest.mark.parametrize("heads", [1, 4, 8, 16])
def test_the_heads_of_a_state_space_fill_its_width(heads):
    changes = {"mamba_n_groups": 1, "mamba_n_heads": heads, "mamba_d_head": 64 // heads, "mamba_d_ssm": 64}
    tiny = tiny_config_of(config_of("falcon_h1", **changes))
    assert tiny.mamba_n_heads * tiny.mamba_d_head == tiny.mamba_d_ssm
    assert tiny.mamba_n_heads == min(heads, 8)
    tiny_model_of(tiny, 0)
