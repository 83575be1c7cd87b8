"""Shapes are what transformers' own cache holds after two tokens, whatever the family."""

import json
import math
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from transformers.cache_utils import DynamicLayer

from offload_decode.common.errors import UnsupportedModel
from offload_decode.hf import shape, user_cache
from offload_decode.hf.shape import observed_shape
from offload_decode.types import LayerKind, LayerShape, ModelShape, StateShape
from tests.families import SERVED, config_of

FULL, SLIDING, CHUNKED, NONE = LayerKind.FULL, LayerKind.SLIDING, LayerKind.CHUNKED, LayerKind.NONE
STATES = pytest.mark.skipif("qwen3_next" not in SERVED, reason="this transformers forgets states")
PLAIN = ["llama", "llama-mha", "mistral", "qwen3", "gemma2", "gemma3", "gpt-oss", "mixtral", "cohere2"]


@pytest.mark.parametrize("family", PLAIN)
def test_a_plain_family_is_what_its_config_says(family):
    stated = config_of(family)
    types = getattr(stated, "layer_types", None) or []
    kinds = [LayerKind(name.removesuffix("_attention")) for name in types]
    kinds = kinds or [SLIDING if getattr(stated, "sliding_window", None) else FULL] * 3
    heads, window = stated.num_key_value_heads, getattr(stated, "sliding_window", None)
    assert observed_shape(stated) == ModelShape.uniform(kinds, 4, heads, stated.head_dim, window)


@STATES
@pytest.mark.parametrize(("dtype", "kept"), [(None, "float32"), (torch.bfloat16, "bfloat16")])
def test_recurrent_states_are_seen_in_the_dtype_that_they_are_kept_in(dtype, kept):
    shape = observed_shape(config_of("qwen3_next"), dtype)
    conv, recurrent = shape.layers[0].states
    assert (conv.name, conv.shape, conv.dtype) == ("conv0", (80, 4), kept)
    assert (recurrent.name, recurrent.shape) == ("recurrent0", (4, 8, 12))
    assert shape.layers[1] == LayerShape(FULL, 2, 16, 16)
    assert shape.layers[2] == shape.layers[0]
    assert shape.query_heads == 4


@STATES
def test_a_layer_may_have_keys_and_states():
    (layer, *_) = observed_shape(config_of("falcon_h1")).layers
    states = (StateShape("conv0", (88, 4), "float32"), StateShape("recurrent0", (8, 8, 6), "float32"))
    assert layer == LayerShape(FULL, 2, 16, 16, states=states)


def test_chunked_layers_and_layers_without_rotation():
    chunked, full = LayerShape(CHUNKED, 2, 16, 16, 8), LayerShape(FULL, 2, 16, 16)
    assert observed_shape(config_of("llama4")).layers == (chunked, chunked, full, chunked)


@pytest.mark.parametrize("shared", [0, 2])
def test_layers_that_read_the_keys_of_others_keep_none(shared):
    full, sliding = LayerShape(FULL, 2, 16, 16), LayerShape(SLIDING, 2, 16, 16, 7)
    last = (LayerShape(NONE), LayerShape(NONE)) if shared else (sliding, full)
    stated = config_of("gemma3n", num_kv_shared_layers=shared)
    assert observed_shape(stated).layers == (sliding, full, sliding, *last)


def test_latents_where_the_release_caches_them_and_heads_where_it_does_not():
    shape = observed_shape(config_of("deepseek_v3"))
    (layer,) = set(shape.layers)
    assert layer in (LayerShape(FULL, 1, 32, 32, latent=True), LayerShape(FULL, 4, 20, 10))
    assert shape.query_heads == 4


@pytest.mark.parametrize(("family", "scaling"), [("llama", None), ("granite", 0.2), ("gemma3n", 1.0)])
def test_another_scaling_than_that_of_the_width_is_seen(family, scaling):
    layers = observed_shape(config_of(family)).layers
    assert {own.scaling for own in layers if own.kind is not NONE} == {scaling}


def test_a_latent_is_scaled_by_the_width_of_the_keys_that_it_stands_for():
    layer, *_ = observed_shape(config_of("deepseek_v3")).layers
    if not layer.latent:
        pytest.skip("this transformers caches heads")
    assert layer.scaling == pytest.approx(20**-0.5 * (0.1 * math.log(4) + 1) ** 2)


def test_a_thread_that_has_run_no_pass_observes_a_shape():
    with ThreadPoolExecutor(1) as pool:
        assert len(pool.submit(observed_shape, config_of("cohere2", vocab_size=97)).result().layers) == 3


def test_what_is_published_in_few_bits_is_observed_without_them():
    stated = config_of("llama")
    expected = observed_shape(stated)
    stated.quantization_config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    assert observed_shape(stated) == expected
    assert stated.quantization_config


@pytest.mark.parametrize("family", ["granitemoe", "dbrx", "gpt2", "phi3-longrope", "jetmoe", "longcat_flash"])
def test_what_asks_its_tensors_for_numbers_is_observed_too(family):
    assert observed_shape(config_of(family)).full_layers


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("mamba", {}, "in none of its layers"),
        ("falcon", {}, "code of its own"),
        ("bloom", {}, "layer 0 .* code of its own"),
        ("gemma", {"num_attention_heads": 3}, "3 query heads for 2 KV heads"),
        ("longcat_flash", {"head_dim": 16}, "does not run with another cache"),
    ],
)
def test_what_cannot_be_stored_is_refused_with_the_reason(family, changes, reason):
    with pytest.raises(UnsupportedModel, match=reason):
        observed_shape(config_of(family, **changes))


def held(heads, dim):
    layer = DynamicLayer()
    layer.update(*torch.zeros(2, 1, heads, 2, dim))
    return layer


def test_full_layers_of_several_geometries_are_refused():
    layers, seen = [held(2, 16), held(1, 24)], dict.fromkeys((0, 1), shape._Seen(None, 4, None))
    with pytest.raises(UnsupportedModel, match=r"1 KV heads of 24 .* and .* 2 KV heads of 16"):
        shape._shape("twofold", SimpleNamespace(), SimpleNamespace(layers=layers), seen)


@STATES
def test_a_config_is_observed_once_and_what_took_long_is_remembered_between_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(user_cache, "_known", {})
    monkeypatch.setattr(shape, "_LONG_S", 0.0)
    calls, observe = [], shape._observed
    monkeypatch.setattr(shape, "_observed", lambda text: calls.append(text) or observe(text))
    stated = config_of("qwen3_next")
    first = observed_shape(stated)
    assert observed_shape(stated) == first
    user_cache._known.clear()
    assert observed_shape(stated) == first
    assert len(calls) == 1
    (kept,) = (path for path in tmp_path.rglob("*") if path.is_file())
    assert observed_shape(config_of("qwen3_next", head_dim=32)).head_dim == 32
    assert len(calls) == 2
    kept.write_text(json.dumps({"layers": []}))
    user_cache._known.clear()
    assert observed_shape(stated) == first
    assert len(calls) == 3
