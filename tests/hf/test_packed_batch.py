"""Joint passes: checked for each model, and checked like any other."""

import pytest
import torch

from offload_decode.common.errors import ConfigError, UnsupportedModel
from offload_decode.engine.batching import Turn, packing_key, run_turns
from offload_decode.engine.engine import without_corpus
from offload_decode.hf import packed_batch, user_cache
from offload_decode.hf.compat import with_cache
from offload_decode.hf.packed_batch import PackedCache, PackedLayer, Segment
from offload_decode.hf.shape import observed_shape
from offload_decode.hf.verify import packs
from offload_decode.models.loading import wrap
from tests.families import SERVED, config_of, slow_but
from tests.tiny import tiny_model

FEW = ["llama", "gemma2", "gemma3n", "gpt-oss", "llama4", "phi3-longrope", "deepseek_v3", "gpt2"]
EXPANDED = {"dots3_note"}  # its windows hold latents, which it expands itself


@pytest.mark.parametrize("family", slow_but(FEW, SERVED))
def test_packed_passes_are_checked_for_all_but_recurrent_models(family):
    config = config_of(family)
    assert packs(config) == (family not in EXPANDED and not observed_shape(config).state_layers)


@pytest.fixture
def talks():
    root = without_corpus(wrap(tiny_model("gpt-oss")))
    return [root.fork() for _ in range(3)]


def cache_of(talks, *tokens):
    return PackedCache([Segment(talk.cache, own) for talk, own in zip(talks, tokens, strict=True)])


def run(talks, cache, tokens, **more):
    ids = torch.arange(3, 3 + tokens)[None]
    with torch.inference_mode():
        return talks[0].loaded.model(input_ids=ids, **with_cache(talks[0].loaded.model, cache), **more).logits


def lengths(talks):
    return [{layer.generated.length for layer in talk.cache.generated_layers} for talk in talks]


def test_a_model_that_mixes_its_conversations_is_not_packed(tmp_path, monkeypatch):
    attend = packed_batch._attend_generated
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # nothing is remembered
    monkeypatch.setattr(user_cache, "_known", {})
    first = []  # the layers of the first conversation

    def mixed(layer, *more):
        first.append(layer)
        return attend(first[0] if layer.index == first[0].index else layer, *more)

    with monkeypatch.context() as patched:
        patched.setattr(packed_batch, "_attend_generated", mixed)
        assert not packs(config_of("llama"))
    monkeypatch.setattr(user_cache, "_known", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    assert packs(config_of("llama"))


def test_a_model_that_is_not_checked_runs_one_by_one(talks, monkeypatch):
    expected = [talk.fork().extend([5, 6]) for talk in talks]
    monkeypatch.setattr(type(talks[0].loaded), "packs", False)
    monkeypatch.setattr(PackedLayer, "update", None)
    assert packing_key(talks[0]) is None
    for found, own in zip(run_turns([Turn(talk, [5, 6]) for talk in talks]), expected, strict=True):
        torch.testing.assert_close(found, own)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"attention_mask": torch.ones(1, 6)}, "neither a mask nor positions"),
        ({"position_ids": torch.arange(6)[None]}, "neither a mask nor positions"),
        ({"use_cache": False}, "use_cache"),
        ({"output_attentions": True}, "output_attentions"),
    ],
)
def test_unsupported_arguments_of_a_packed_pass_are_refused(talks, given, says):
    with pytest.raises(ConfigError, match=says):
        run(talks, cache_of(talks, 1, 2, 3), 6, **given)
    assert lengths(talks) == [{0}] * 3


def test_a_packed_cache_is_for_one_pass_over_its_own_tokens(talks):
    with pytest.raises(ConfigError, match="one pass"):
        run(talks, cache_of(talks, 1, 2, 3), 7)
    cache = cache_of(talks, 1, 2, 3)
    run(talks, cache, 6)
    with pytest.raises(ConfigError, match="one pass"):
        run(talks, cache, 6)
    assert lengths(talks) == [{1}, {2}, {3}]
    with pytest.raises(ConfigError, match="in a packed pass twice"):
        run(talks, cache_of([talks[0], talks[0]], 1, 1), 2)


def test_rows_that_are_padded_and_another_model_are_refused(talks):
    mask = torch.tensor([[False, True, True], [True, True, True]])
    padded = talks[0].fork()
    given = {"attention_mask": mask, "position_ids": (mask.long().cumsum(-1) - 1).clamp(min=0)}
    with torch.inference_mode():
        padded.loaded.model(
            torch.tensor([[0, 5, 6], [5, 6, 7]]), **with_cache(padded.loaded.model, padded.cache), **given
        )
    assert packing_key(padded) is None
    with pytest.raises(ConfigError, match="padded"):
        run(talks, cache_of([talks[0], padded], 1, 1), 2)
    other = without_corpus(wrap(tiny_model("gpt-oss", seed=1)))
    with pytest.raises(ConfigError, match="another model"):
        run(talks, cache_of([talks[0], other], 1, 1), 2)
    assert packing_key(other) != packing_key(talks[0])


def test_an_interrupted_pass_is_taken_back_by_the_next_one(talks, monkeypatch):
    expected = [talk.fork().extend([5, 6]) for talk in talks]
    attend, calls = PackedLayer.attend, []

    def interrupted(self, *arguments):
        calls.append(self.index)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return attend(self, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(PackedLayer, "attend", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(talks, cache_of(talks, 1, 2, 3), 6)
    assert lengths(talks) != [{0}] * 3
    found = run_turns([Turn(talk, [5, 6]) for talk in talks])
    assert lengths(talks) == [{2}] * 3
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


def test_a_model_that_attends_by_itself_is_noticed(talks, monkeypatch):
    monkeypatch.setattr(PackedLayer, "attend", lambda self, query, *_: (talks[0].cache, query))
    monkeypatch.setattr(
        "offload_decode.hf.attention.reduce",
        lambda merge, states: packed_batch.AttentionState(states[1], states[1][..., 0]),
    )
    with pytest.raises(UnsupportedModel, match="attended without its stored prefixes"):
        run(talks, cache_of(talks, 1, 2, 3), 6)


def test_no_mask_is_built_over_the_whole_pass(talks, monkeypatch):
    def built(*_, **__):
        raise AssertionError("no mask is needed")

    monkeypatch.setattr("offload_decode.hf.attention.sdpa_mask", built)
    run(talks, cache_of(talks, 1, 2, 3), 6)
