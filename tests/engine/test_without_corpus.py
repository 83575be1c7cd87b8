"""A conversation without a corpus equals transformers' own generation."""

from functools import cache

import pytest
import torch

from offload_decode.common.errors import ConfigError
from offload_decode.engine.batching import Turn, packing_key, run_turns
from offload_decode.engine.engine import without_corpus
from offload_decode.models.loading import wrap
from tests.families import SERVED, VOCAB, slow_but
from tests.tiny import eager, tiny_model

FEW = ["llama", "gpt-oss", "llama4", "deepseek_v3", "qwen3_next", "gpt2"]
NEW = 5

# Longrope has a test of its own.
families = pytest.mark.parametrize("family", slow_but(FEW, [own for own in SERVED if own != "phi3-longrope"]))


@cache
def made(family):
    """A conversation, and the model that it must equal."""
    return without_corpus(wrap(tiny_model(family))), eager(tiny_model(family))


@pytest.fixture
def ids():
    return torch.randint(3, VOCAB, (1, 40), generator=torch.Generator().manual_seed(1))


def plain_logits(plain, ids):
    with torch.inference_mode():
        return plain(ids, use_cache=False).logits[0]


def plain_answer(plain, ids):
    out = plain.generate(ids, max_new_tokens=NEW, do_sample=False, attention_mask=torch.ones_like(ids))
    return out[0, ids.shape[1] :].tolist()


@families
def test_it_equals_generate_over_several_turns(family, ids):
    root, plain = made(family)
    assert root.length == root.prefix.length == 0
    talk = root.fork()
    logits = talk.extend(ids[:, :19])
    torch.testing.assert_close(logits, plain_logits(plain, ids[:, :19])[-1], atol=1e-4, rtol=0)
    answer = list(talk.generate(logits, NEW))
    assert answer == plain_answer(plain, ids[:, :19])
    whole = torch.cat([ids[:, :19], torch.tensor([answer]), ids[:, 19:30]], dim=1)
    logits = talk.extend(ids[:, 19:30])
    torch.testing.assert_close(logits, plain_logits(plain, whole)[-1], atol=1e-4, rtol=0)
    talk.crop(0)
    one = talk.extend(ids[:, :1])
    torch.testing.assert_close(one, plain_logits(plain, ids[:, :1])[-1], atol=1e-4, rtol=0)
    assert root.length == 0


@families
def test_the_logits_of_every_token_of_a_prompt(family, ids):
    root, plain = made(family)
    for talks in ([root.fork()], [root.fork(), root.fork()]):
        found = run_turns([Turn(talk, ids[0, :21].tolist(), every=True) for talk in talks])[0]
        torch.testing.assert_close(found, plain_logits(plain, ids[:, :21]), atol=1e-4, rtol=0)
        for talk in talks:
            assert talk.length == 21


@families
def test_several_of_them_share_a_pass_where_the_model_allows_it(family, ids):
    root, plain = made(family)
    talks = [root.fork() for _ in range(3)]
    for start, lengths in ((0, (1, 12, 3)), (12, (1, 1, 9))):
        asked = (ids[0, start : start + length].tolist() for length in lengths)
        logits = run_turns([*map(Turn, talks, asked)])
        for talk, own in zip(talks, logits, strict=True):
            expected = plain_logits(plain, torch.tensor([talk.tokens]))[-1]
            torch.testing.assert_close(own, expected, atol=1e-4, rtol=0)
    assert (packing_key(root) is not None) == root.loaded.packs


def test_a_model_that_rotates_by_length_is_told_how_long_it_may_become(ids):
    loaded, plain = made("phi3-longrope")[0].loaded, tiny_model("phi3-longrope")
    least = loaded.lengths.switches[0]
    for context, length in ((least, 12), (least + 1, least + 1)):
        talk = without_corpus(loaded, context)
        expected = plain_logits(plain, ids[:, :length])[-1]
        torch.testing.assert_close(talk.extend(ids[:, :length]), expected, atol=1e-4, rtol=0)
    with pytest.raises(ConfigError, match="--context"):
        without_corpus(loaded, least).extend(ids[:, : least + 1])


def test_a_table_of_positions_holds_so_many(ids):
    loaded = made("gpt2")[0].loaded
    with pytest.raises(ConfigError, match="learned positions"):
        without_corpus(loaded, loaded.lengths.table + 1)
