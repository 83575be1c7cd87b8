"""Fingerprints: every number that shapes an answer counts, and nothing else; one for a checkpoint, whichever
release of transformers reads it.
"""

import copy
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from offload_decode.common.errors import StoreMismatch
from offload_decode.engine.engine import Engine
from offload_decode.models.fingerprints import config_hash, weights_hash
from offload_decode.models.loading import load, wrap
from offload_decode.store.format import fingerprint_version
from offload_decode.store.reader import KVStore
from tests.families import PLAIN, config_of
from tests.tiny import saved, tiny_model, token_store

# The same under transformers 5.5 and 5.24. A change of any of them makes every store of that family another
# model's, and is a new FINGERPRINT_VERSION.
FROZEN = (
    {"llama": "56b6b24cfb40", "llama-mha": "408bae430670", "llama-yarn": "7b990ed0f5f3"}
    | {"mistral": "f67c7fbf6236", "mistral-sliding": "01db70becee2", "qwen2": "dbb55d237660"}
    | {"qwen3": "188638c25e48", "smollm3": "3b42f9b5a7ca", "gemma2": "1e8a1e40eb90"}
    | {"gemma3": "d35172609f18", "phi3": "726832f672a0", "gpt-oss": "2093f41df3e6"}
    | {"mixtral": "66b17e1d8950", "qwen3-moe": "b3ac5285084c", "olmo2": "acb9879d47b6"}
    | {"granite": "89c6107dfcfc", "cohere2": "d5083558f65f", "glm4": "6c4474de1b81"}
)

ROPE = {
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": 1.0, "truncate": True},
}
SHAPING = [
    ("gemma2", "hidden_activation", "silu"),
    ("gemma3", "hidden_activation", "silu"),
    ("gemma2", "final_logit_softcapping", 7.0),
    ("gemma2", "query_pre_attn_scalar", 11),
    ("gpt-oss", "swiglu_limit", 3.0),
    ("gpt-oss", "swiglu_alpha", 1.5),
    ("granite", "logits_scaling", 3.0),
    ("granite", "residual_multiplier", 0.8),
    ("cohere2", "logit_scale", 2.0),
    ("smollm3", "no_rope_layers", [1, 1, 1]),
    ("qwen3-moe", "norm_topk_prob", True),
    ("llama", "rms_norm_eps", 1e-5),
    ("llama", "partial_rotary_factor", 0.5),
    ("llama", "a_field_of_tomorrow", 1),
]
HARMLESS = (
    {"use_cache": False, "dtype": torch.bfloat16, "_name_or_path": "/elsewhere"}
    | {"transformers_version": "9.9", "architectures": ["Other"], "eos_token_id": 7, "pad_token_id": 5}
    | {"output_attentions": False, "initializer_range": 0.5, "attention_dropout": 0.1}
    | {"max_position_embeddings": 9999}
)


@pytest.mark.parametrize("family", FROZEN)
def test_a_fingerprint_is_that_of_every_release(family):
    assert config_hash(config_of(family))[:14] == f"2:{FROZEN[family]}"


@pytest.mark.parametrize(
    ("family", "name", "value", "counts"),
    [*((*one, True) for one in SHAPING), *(("llama", *one, False) for one in HARMLESS.items())],
)
def test_a_field_counts_where_it_shapes_numbers(family, name, value, counts):
    config = tiny_model(family).config
    before = config_hash(config)
    setattr(config, name, value)
    assert (config_hash(config) != before) == counts


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, given in ROPE.items() for name in given])
def test_every_rope_parameter_counts(kind, name):
    given = {"rope_type": kind, "rope_theta": 1e4, "original_max_position_embeddings": 64, **ROPE[kind]}
    before = config_hash(tiny_model(rope_parameters=copy.deepcopy(given)).config)
    changed = given | {name: not given[name] if name == "truncate" else given[name] * 2}
    assert config_hash(tiny_model(rope_parameters=changed).config) != before


def test_a_partial_rotary_factor_counts():
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
    assert config_hash(config_of("glm4")) != config_hash(config_of("glm4", rope_parameters=rope))


def test_weights_of_any_size_are_told_apart():
    """float32 positions would overflow beyond 2**24 elements."""
    large = torch.nn.Linear(4096, 8193, bias=False, dtype=torch.bfloat16)
    before = weights_hash(large)
    with torch.no_grad():
        large.weight[-1, -1] += 1
    assert weights_hash(large) != before


def test_whole_numbers_are_the_same_however_they_are_spelled():
    ropes = ({"rope_type": "default", "rope_theta": theta} for theta in (10000, 10000.0))
    first, second = (config_hash(tiny_model(rope_parameters=rope).config) for rope in ropes)
    assert first == second


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_element_of_one_row_counts(dtype):
    model = tiny_model().to(dtype)
    before = weights_hash(model)
    for name, weight in model.named_parameters():
        flat = weight.data.view(-1)
        place = flat.numel() * 2 // 3
        kept = flat[place].clone()
        flat[place] = torch.nextafter(kept, kept + 1) if dtype == torch.float32 else kept * 1.01 + 0.01
        assert weights_hash(model) != before, name
        flat[place] = kept
    assert weights_hash(model) == before


@pytest.mark.parametrize("family", PLAIN)
def test_rotary_frequencies_count_where_they_are_not_those_of_the_config(family, tmp_path):
    """`to` rounds them to a dtype that a model loaded in it does not round them to."""
    tiny_model(family).save_pretrained(tmp_path)
    read = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    rounded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).to(torch.bfloat16)
    assert weights_hash(rounded) != weights_hash(read)
    # A pass sets those of longrope anew, by its length, from the original ones.
    known_by = "original_inv_freq" if "longrope" in family else "inv_freq"
    frequencies = {name: own for name, own in read.named_buffers() if known_by in name}
    assert all(own.dtype == torch.float32 for own in frequencies.values())
    before = weights_hash(read)
    for own in frequencies.values():
        own *= 1 + 1e-6  # as another processor
        assert weights_hash(read) == before
        own *= 1.01
        assert weights_hash(read) != before
        own /= 1.01 * (1 + 1e-6)


def test_a_model_in_memory_is_that_of_its_folder(tmp_path):
    model = tiny_model()
    saved(model, tmp_path)
    loaded, wrapped = load(str(tmp_path), "cpu"), wrap(model)
    assert (loaded.weights_hash, loaded.config_hash) == (wrapped.weights_hash, wrapped.config_hash)


def test_weights_that_share_memory_or_have_gaps_are_known_by_what_they_hold():
    whole = torch.nn.Linear(6, 4, bias=False)
    other = torch.nn.Linear(6, 4, bias=False)
    other.weight = torch.nn.Parameter(whole.weight.detach().t().contiguous().t())
    assert not other.weight.is_contiguous()
    assert weights_hash(other) == weights_hash(whole)
    tied = torch.nn.ModuleList([whole, whole])
    apart = torch.nn.ModuleList([whole, other])
    assert weights_hash(tied) == weights_hash(apart)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return token_store(tmp_path_factory.mktemp("known") / "store", wrap(tiny_model()), range(3, 40))


def test_a_store_is_refused_by_a_model_of_which_one_row_was_tuned(store):
    model = tiny_model()
    assert Engine.open(store, model).extend([5]).isfinite().all()
    with torch.no_grad():
        model.model.embed_tokens.weight[77, 5] += 1e-3
    with pytest.raises(StoreMismatch, match="other weights"):
        Engine.open(store, model)


def test_a_store_of_an_earlier_release_is_told_from_one_of_another_model(store):
    opened, model = KVStore.open(store), wrap(tiny_model())
    assert fingerprint_version(opened.manifest.weights_hash) == "2"
    opened.manifest = replace(opened.manifest, weights_hash="ab" * 32, model_config_hash="cd" * 32)
    with pytest.raises(StoreMismatch, match=r"made by another release .* prefill again"):
        Engine.open(opened, model)
