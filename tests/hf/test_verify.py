"""A model is served if its tiny model equals plain generation behind a stored prefix, and refused with the
reason if it does not.
"""

import pytest
import torch
import transformers
from transformers import cache_utils
from transformers.cache_utils import DynamicLayer
from transformers.models.llama import modeling_llama

from offload_decode.common.errors import UnsupportedModel
from offload_decode.hf import user_cache, verify
from offload_decode.hf.cache import CorpusCache
from offload_decode.hf.compat import cache_in
from offload_decode.hf.verify import CLOSE, EquivalenceCheck, check_equivalence, shape_of
from offload_decode.models.checkpoint import read_config
from offload_decode.models.loading import load, wrap
from offload_decode.models.size_estimate import estimate_size
from tests.families import FAMILIES, KINDS, SERVED, config_of, slow_but
from tests.tiny import tiny_model


@pytest.fixture
def afresh(tmp_path, monkeypatch):
    """Nothing is remembered of an earlier check, and nothing of this one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(user_cache, "_known", {})


@pytest.fixture
def tried(afresh, monkeypatch):
    """The seeds of tiny models that were run."""
    seeds, run = [], verify._tried
    monkeypatch.setattr(verify, "_tried", lambda *given: seeds.append(given[1]) or run(*given))
    return seeds


@pytest.mark.parametrize("family", slow_but(KINDS, FAMILIES))
def test_what_passes_the_check_is_what_the_exactness_suite_serves(family):
    try:
        shape_of(config_of(family))
    except UnsupportedModel:
        assert family not in SERVED
        return
    assert family in SERVED
    assert 0 < check_equivalence(config_of(family)).difference <= CLOSE


def refused(family: str, reason: str) -> None:
    """Nothing opens such a model."""
    model = tiny_model(family)
    with pytest.raises(UnsupportedModel, match=reason):
        wrap(model)
    with pytest.raises(UnsupportedModel, match=reason):
        shape_of(model.config)


ATTEND = modeling_llama.LlamaAttention.forward


def by_length(self, hidden_states, *args, **kwargs):
    out, weights = ATTEND(self, hidden_states, *args, **kwargs)
    return out * (1 + 1e-3 * (hidden_states.shape[1] < 70)), weights


def code_of_its_own(self, hidden_states, position_embeddings, **given):
    keys, values = (
        part(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        for part in (self.k_proj, self.v_proj)
    )
    if (cache := cache_in(given)) is not None:
        keys, values = cache.update(keys, values, self.layer_idx)
    return self.o_proj(self.q_proj(hidden_states)), None


def blind(self, hidden_states, *args, **kwargs):
    out, weights = ATTEND(self, hidden_states, *args, **kwargs)
    return out * 0, weights


def failing(self, hidden_states, *args, **kwargs):
    if self.layer_idx == 1 and len(hidden_states) == 2:
        raise RuntimeError("no batches")
    return ATTEND(self, hidden_states, *args, **kwargs)


@pytest.mark.parametrize(
    ("attend", "reason"),
    [
        (by_length, "in one token, LlamaAttention of layer 0 gives other numbers"),
        (code_of_its_own, "layer 0 of this 'llama' model attends in code of its own"),
        (blind, "do not depend on the tokens before"),
        (failing, "in a padded batch, LlamaAttention of layer 1: RuntimeError: no batches"),
    ],
)
def test_an_attention_that_is_not_equivalent_is_refused(afresh, monkeypatch, attend, reason):
    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", attend)
    refused("llama", reason)


def test_a_layer_type_that_is_not_known_is_refused(afresh, monkeypatch):
    class Compressed(DynamicLayer):
        """Keeps something else."""

    if hasattr(cache_utils, "DYNAMIC_LAYER_TYPE_MAPPING"):
        monkeypatch.setitem(cache_utils.DYNAMIC_LAYER_TYPE_MAPPING, "full_attention", Compressed)
    monkeypatch.setattr(cache_utils, "DynamicLayer", Compressed)
    refused("qwen2", r"layer 0 of this 'qwen2' model keeps more than .*\(Compressed\)")


def test_a_mixer_that_keeps_its_state_to_itself_is_refused():
    refused("recurrent_gemma", r"RecurrentGemmaAttention of layer \d|code of its own")


@pytest.mark.skipif("qwen3_next" not in SERVED, reason="this transformers forgets states itself")
def test_a_mixer_that_forgets_its_state_is_refused(afresh, monkeypatch):
    mixer = transformers.models.qwen3_next.modeling_qwen3_next.Qwen3NextGatedDeltaNet
    run = mixer.forward

    def forgetful(self, hidden_states, **kwargs):
        out, cache = run(self, hidden_states, **kwargs), cache_in(kwargs)
        if isinstance(cache, CorpusCache):
            states = cache.layers[self.layer_idx].states
            states.put("recurrent0", torch.zeros_like(states.held["recurrent0"]))
        return out

    monkeypatch.setattr(mixer, "forward", forgetful)
    refused("qwen3_next", r"in one token, Qwen3Next\w+ of layer \d gives other numbers")


def test_a_check_is_remembered_in_the_process_and_between_processes(tried, monkeypatch):
    first = check_equivalence(config_of("llama"))
    assert check_equivalence(config_of("llama")) == first
    user_cache._known.clear()
    assert check_equivalence(config_of("llama")) == first
    assert tried == [0]
    user_cache._known.clear()
    monkeypatch.setattr(verify, "_code", lambda: "another release")
    assert check_equivalence(config_of("llama")) == first
    assert tried == [0, 0]


def test_models_with_one_tiny_config_share_its_check(tried):
    check_equivalence(transformers.LlamaConfig(hidden_size=2048, num_hidden_layers=4))
    check_equivalence(transformers.LlamaConfig(hidden_size=1024, num_hidden_layers=6, intermediate_size=99))
    assert tried == [0]


def test_what_fails_with_one_set_of_weights_is_tried_with_another(afresh, monkeypatch):
    found = [EquivalenceCheck(1.0, "a tie"), EquivalenceCheck(1e-6)]
    monkeypatch.setattr(verify, "_tried", lambda tiny, seed, trial: found[seed])
    assert check_equivalence(config_of("llama")) == found[1]


@pytest.mark.parametrize("kept", ["", "[]", "{}", '{"difference": "0", "reason": ""}', "[" * 5000])
def test_an_unreadable_result_is_checked_again(tried, tmp_path, kept):
    first = check_equivalence(config_of("llama"))
    for file in (path for path in tmp_path.rglob("*") if path.is_file()):
        file.write_text(kept)
    user_cache._known.clear()
    assert check_equivalence(config_of("llama")) == first
    assert tried == [0, 0]


def test_a_check_changes_no_random_numbers(afresh):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    check_equivalence(config_of("llama"))
    assert torch.equal(torch.rand(3), expected)


def test_nothing_opens_a_model_that_is_not_equivalent(afresh, monkeypatch, tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "model")
    failed = EquivalenceCheck(0.5, "in one token, it differs")
    monkeypatch.setattr(verify, "_tried", lambda tiny, seed, trial: failed)
    for opened in (load, read_config, estimate_size):
        with pytest.raises(UnsupportedModel, match=r"'llama' .* in one token, it differs; use"):
            opened(str(tmp_path / "model"))


def test_a_prefix_of_little_effect_is_no_reason_to_refuse() -> None:
    assert check_equivalence(config_of("modernbert-decoder", num_attention_heads=8)).served
