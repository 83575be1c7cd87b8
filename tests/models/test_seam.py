"""The seam to transformers: what it refuses rather than compute wrongly."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from offload_decode.engine.engine import Engine
from offload_decode.errors import ConfigError
from offload_decode.models.loading import wrap
from offload_decode.types import Document
from prefill_jobs.job import prefill_tokens
from tests.tiny import tiny_model

N = 30


@pytest.fixture
def engine(tmp_path):
    served = wrap(tiny_model("gemma2"))
    prefill_tokens(served, np.arange(3, 3 + N, dtype=np.int32), [Document("all", 0, N)], tmp_path / "store")
    return Engine.open(tmp_path / "store", served)


@pytest.mark.parametrize(
    ("mask", "says"),
    [
        (torch.ones(1, 4, dtype=torch.bool), "covers 4 tokens, but 34"),
        (torch.arange(N + 4)[None] > 2, "hides stored tokens"),
    ],
)
def test_a_mask_that_does_not_cover_the_prefix_is_refused(engine, mask, says):
    with pytest.raises(ConfigError, match=says):
        engine.loaded.model(torch.arange(4)[None], attention_mask=mask, past_key_values=engine.new_cache())


def test_a_mask_is_believed_as_far_as_it_says_and_no_further(engine):
    mask = torch.arange(N + 4)[None] > 2
    mask.offload_covered = N - 1
    with pytest.raises(ConfigError, match="hides stored tokens"):
        engine.loaded.model(torch.arange(4)[None], attention_mask=mask, past_key_values=engine.new_cache())


def test_a_prepared_mask_must_be_bool(engine):
    mask = torch.zeros(1, 1, 4, 4)
    with pytest.raises(ConfigError, match="must be bool"):
        engine.loaded.model(torch.arange(4)[None], attention_mask=mask, past_key_values=engine.new_cache())


def test_prompt_lookup_is_refused(engine):
    ids = torch.arange(3, 3 + N + 4)[None]
    with pytest.raises(ConfigError):  # by its own sentence, or up to transformers 5.8 by that of the mask
        engine.loaded.model.generate(ids, past_key_values=engine.new_cache(), prompt_lookup_num_tokens=2)


def test_cropping_a_cache_removes_from_the_end_only(engine):
    cache = engine.new_cache()
    engine.loaded.model(torch.arange(3, 9)[None], past_key_values=cache)
    cache.crop(-2)
    assert cache.get_seq_length() == N + 4
    for wrong in (-5, 12):
        with pytest.raises(ConfigError, match="cannot crop"):
            cache.crop(wrong)


def test_without_a_cache_of_ours_attention_is_plain(engine):
    ids = torch.arange(3, 40)[None]
    plain = tiny_model("gemma2")
    plain.set_attn_implementation("eager")
    with torch.inference_mode():
        torch.testing.assert_close(engine.loaded.model(ids).logits, plain(ids).logits, atol=1e-5, rtol=0)
