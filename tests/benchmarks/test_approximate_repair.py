"""Keys and values behind an edit: reused, run again, and beside the exact ones."""

import pytest
import torch

from benchmarks.approximate_repair import (
    KINDS,
    LARGEST,
    REUSE,
    STALE,
    WAYS,
    edits,
    exact_kv,
    first_again,
    judged,
    largest_exact,
    reused,
    shared,
    ways,
)
from offload_decode.common.errors import ConfigError, UnsupportedModel
from tests.tiny import random_ids, served_model

TEXT = "The road goes on through the wood to the mill. It rained all day, and nobody came by. " * 60
OLD = random_ids(40).tolist()
NEWS = {
    "insert": [*OLD[:15], 7, 8, 9, *OLD[15:]],
    "delete": [*OLD[:15], *OLD[18:]],
    "replace": [*OLD[:15], 7, 8, *OLD[17:]],
}


@pytest.fixture(scope="module")
def loaded():
    model = served_model()
    model.model.set_attn_implementation("sdpa")
    return model


def test_exact_keys_and_values_are_those_of_transformers(loaded):
    cache = loaded.model(torch.tensor([OLD]), use_cache=True).past_key_values
    theirs = torch.stack([torch.cat([layer.keys, layer.values]) for layer in cache.layers])
    torch.testing.assert_close(exact_kv(loaded, OLD), theirs)


def test_what_is_reused_with_nothing_edited_is_exact(loaded):
    exact, made = ways(loaded, OLD, OLD)
    assert set(made) == set(WAYS)
    for kv in made.values():
        torch.testing.assert_close(kv, exact)


@pytest.mark.parametrize("kind", NEWS)
def test_what_is_all_run_again_is_exact(loaded, kind):
    new, kv = NEWS[kind], exact_kv(loaded, OLD)
    reuse, exact, end = reused(loaded, kv, OLD, new), exact_kv(loaded, new), shared(OLD, new)[1]
    torch.testing.assert_close(first_again(loaded, reuse, new, end, 1.0), exact)
    torch.testing.assert_close(largest_exact(reuse, exact, end, 1.0), exact)


@pytest.mark.parametrize("kind", NEWS)
def test_what_is_reused_is_exact_up_to_the_edit_and_in_the_first_layer(loaded, kind):
    new = NEWS[kind]
    exact, made = ways(loaded, OLD, new)
    start, end = shared(OLD, new)
    assert start >= 15
    edited = len(new) - end
    torch.testing.assert_close(made[REUSE][..., :edited, :], exact[..., :edited, :])
    torch.testing.assert_close(made[REUSE][0], exact[0])
    assert not torch.allclose(made[REUSE][1, :, :, edited:], exact[1, :, :, edited:], atol=1e-3)
    assert made[STALE].shape[-2] == len(OLD)


def test_the_tokens_farthest_from_exact_become_so(loaded):
    exact, made = ways(loaded, OLD, NEWS["insert"])
    end = shared(OLD, NEWS["insert"])[1]
    far = (made[REUSE] - exact).abs().amax((0, 1, 2, 4))
    left = (made[LARGEST] - exact).abs().amax((0, 1, 2, 4))
    assert int(((far > 0) & (left == 0)).sum()) >= round(0.25 * end)
    assert (made[LARGEST] - exact).norm() < (made[REUSE] - exact).norm()


@pytest.mark.parametrize("family", ["gemma3", "cohere"])  # windows; keys that are rotated in other pairs
def test_a_model_whose_keys_cannot_be_reused_is_refused(family):
    other = served_model(family)
    other.model.set_attn_implementation("sdpa")
    with pytest.raises(UnsupportedModel, match="take a Llama"):
        ways(other, OLD, NEWS["insert"])


def test_edits_of_all_kinds_change_one_place(loaded):
    found = dict(zip(KINDS, edits(TEXT, 4, 600), strict=True))
    for kind, edit in found.items():
        assert (edit.old == "", edit.new == "") == (kind == "insert", kind == "delete")
        assert edit.old in edit.before
        assert edit.new in edit.after
        start, end = shared(edit.before, edit.after)
        assert start > 0.3 * 600
        assert end > 0.2 * 600
        assert edit.right(f" {edit.new}.")
        assert not edit.right(f" {edit.old or 'the miller'} or {edit.old}.") or kind == "delete"
    assert not found["delete"].right(found["delete"].old)
    assert "geese" in found["refer"].question
    own, right, each = judged(loaded, found["replace"])
    assert set(each) == set(WAYS)
    assert right == found["replace"].right(own)


def test_texts_without_room_or_sentences_are_refused():
    with pytest.raises(ConfigError, match="give more"):
        next(edits("A short text.", 1, 600))
    with pytest.raises(ConfigError, match="no sentence ends"):
        next(edits("word " * 600, 1, 600))
