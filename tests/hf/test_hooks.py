"""The hooks around a decoder: what is right behind them, and what is refused rather than computed wrongly."""

import copy
from functools import partial
from unittest.mock import patch

import pytest
import torch

from offload_decode.common.errors import ConfigError, UnsupportedModel
from offload_decode.engine.engine import Engine
from offload_decode.hf import attention
from offload_decode.hf.compat import CACHE_NAMES, generate_name, with_cache
from offload_decode.models.loading import wrap
from tests.families import PLAIN
from tests.tiny import eager, served_model, text_model, tiny_model, token_store

N, NEW = 30, 5
FAMILIES = ["llama", "gemma2"]  # full attention, and with sliding layers
STORED = range(3, 3 + N)
ASKED, NEXT = [40, 41, 42, 43, 44, 45], [50, 51, 52]
CLOSE = {"atol": 1e-5, "rtol": 0}
GREEDY = {"max_new_tokens": NEW, "do_sample": False}


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hooks")
    return {family: token_store(folder / family, served_model(family), STORED) for family in FAMILIES}


@pytest.fixture(params=FAMILIES)
def engine(request, stores):
    return Engine.open(stores[request.param], served_model(request.param), options={"budget": "100%"})


full = pytest.mark.parametrize("engine", ["llama"], indirect=True)
sliding = pytest.mark.parametrize("engine", ["gemma2"], indirect=True)


def plain(engine, after):
    """Logits of the tokens after the stored ones, by transformers alone."""
    model = eager(text_model(family=engine.loaded.model.config.model_type))
    with torch.inference_mode():
        return model(torch.tensor([[*STORED, *after]])).logits[0, N:]


def mask(*hidden, length):
    """Ones over the prefix and what follows it, but for the columns that are hidden."""
    made = torch.ones(1, N + length, dtype=torch.long)
    made[:, [N + column for column in hidden]] = 0
    return made


def passed(engine, ids, cache, **arguments):
    return engine.loaded.model(ids, **with_cache(engine.loaded.model, cache), **arguments).logits


def run(engine, ids, cache, **arguments):
    with torch.inference_mode():
        return passed(engine, torch.tensor([ids]), cache, **arguments)[0]


@pytest.mark.parametrize(
    ("mask", "says"),
    [
        (torch.ones(1, 4, dtype=torch.bool), "covers 4 tokens, but 34"),
        (torch.arange(N + 4)[None] > 2, "hides stored tokens"),
        (torch.ones(2, N + 4), "2 rows, but there are 1"),
        ({"full_attention": None}, "must be 2-D"),
    ],
)
def test_a_mask_that_does_not_cover_the_prefix_is_refused(engine, mask, says):
    with pytest.raises(ConfigError, match=says):
        run(engine, [4, 5, 6, 7], engine.new_cache(), attention_mask=mask)


def test_only_the_mask_that_is_known_to_show_the_prefix_is_believed_and_once(engine):
    """Its memory may hold something else in the next pass."""
    mask, cache = torch.arange(N + 4)[None] > 2, engine.new_cache()
    cache.shows_prefix = mask.clone()
    with pytest.raises(ConfigError, match="hides stored tokens"):
        run(engine, [4, 5, 6, 7], cache, attention_mask=mask)
    mask, cache = torch.ones(1, N + 4, dtype=torch.bool), engine.new_cache()
    cache.shows_prefix = mask
    run(engine, [4, 5, 6, 7], cache, attention_mask=mask)
    cache.cut(0)
    mask[0, 2] = False
    with pytest.raises(ConfigError, match="hides stored tokens"):
        run(engine, [4, 5, 6, 7], cache, attention_mask=mask)


@pytest.mark.parametrize("where", ["call", "generation_config", "config"])
def test_without_use_cache_nothing_is_appended_twice(engine, where):
    """Every step would run, and append, all tokens again."""
    model = engine.loaded.model
    expected = model.generate(**engine.inputs("Who?"), **GREEDY)
    refused = {**engine.inputs("Who?"), "use_cache": False}
    if where != "call":
        (model.config if where == "config" else model.generation_config).use_cache = False
        assert model.generate(**engine.inputs("Who?"), **GREEDY).tolist() == expected.tolist()
        del refused["use_cache"]
    call = partial(model.generate, **GREEDY) if where != "config" else model
    with pytest.raises(ConfigError, match="use_cache=True"):
        call(**refused)


def test_a_second_turn_in_a_loop_of_ones_own_and_of_generate(engine):
    cache = engine.new_cache()
    run(engine, ASKED, cache)
    expected = plain(engine, ASKED + NEXT)[len(ASKED) :]
    torch.testing.assert_close(run(engine, NEXT, copy.deepcopy(cache)), expected, **CLOSE)
    # Outside inference mode, in which the first turn ran.
    found = passed(engine, torch.tensor([NEXT]), copy.deepcopy(cache))[0]
    torch.testing.assert_close(found, expected, **CLOSE)
    whole, forked = mask(length=len(ASKED + NEXT)), {generate_name(): copy.deepcopy(cache)}
    torch.testing.assert_close(run(engine, NEXT, cache, attention_mask=whole), expected, **CLOSE)
    out = engine.loaded.model.generate(torch.tensor([NEXT]), attention_mask=whole, **forked, **GREEDY)
    assert out[0, len(NEXT)] == expected[-1].argmax()


@pytest.mark.parametrize("padded", [False, True])
def test_a_second_turn_that_leaves_the_first_out_is_refused(engine, padded):
    model, cache = engine.loaded.model, engine.new_cache()
    run(engine, ASKED, cache)
    without = mask(*range(len(ASKED)), length=len(ASKED + NEXT)) if padded else mask(length=len(NEXT))
    for call in (model, partial(model.generate, **GREEDY)):
        with pytest.raises(ConfigError):
            call(torch.tensor([NEXT]), attention_mask=without, **{generate_name(): cache})
    assert cache.generated_length == len(ASKED), "nothing was appended"


@pytest.mark.parametrize("ids", [NEXT, list(range(3, 28)), list(range(3, 3 + N))])
def test_generate_with_the_questions_ids_and_no_mask_is_refused(engine, ids):
    """It takes them for the whole sequence, and cuts as many off as are in the cache."""
    with pytest.raises(ConfigError):
        engine.loaded.model.generate(torch.tensor([ids]), **{generate_name(): engine.new_cache()}, **GREEDY)


@pytest.mark.parametrize(
    ("position", "says"),
    [
        ([range(6)], "has position 0, .* it is 30"),
        ([range(N + 1, N + 7)], "has position 31, .* it is 30"),
        ([[*range(N, N + 5), N + 4]], "has position 34, .* it is 35"),
        ([range(N, N + 4)], "must be .1, 6."),
    ],
)
def test_tokens_stand_behind_all_that_came_before(engine, position, says):
    positions = torch.tensor([list(row) for row in position])
    for given in ({}, {"attention_mask": mask(length=6)}):
        with pytest.raises(ConfigError, match=says):
            run(engine, ASKED, engine.new_cache(), position_ids=positions, **given)


@pytest.mark.parametrize("left", [True, False])
def test_padding_is_not_counted_in_positions(engine, left):
    filler = [0, 0]
    ids = [*filler, *ASKED] if left else [*ASKED, *filler]
    hidden = range(2) if left else range(len(ASKED), len(ids))
    seen = mask(*hidden, length=len(ids))
    positions = (seen.cumsum(-1) - 1)[:, N:]
    cache = engine.new_cache()
    found = run(engine, ids, cache, attention_mask=seen, position_ids=positions)
    found = found[2:] if left else found[:-2]
    torch.testing.assert_close(found, plain(engine, ASKED), **CLOSE)

    further = torch.cat([seen, torch.ones(1, len(NEXT), dtype=torch.long)], dim=1)
    positions = (further.cumsum(-1) - 1)[:, -len(NEXT) :]
    with pytest.raises(ConfigError, match="are padding"):
        run(engine, NEXT, cache)
    with pytest.raises(ConfigError, match="differs from that of an earlier pass"):
        run(engine, NEXT, cache, attention_mask=mask(length=len(ids + NEXT)))
    with pytest.raises(ConfigError, match="do not count the padding"):
        run(engine, NEXT, cache, attention_mask=further)
    for ours in (copy.deepcopy(cache), cache):
        found = run(engine, NEXT, ours, attention_mask=further, position_ids=positions)
        torch.testing.assert_close(found, plain(engine, ASKED + NEXT)[len(ASKED) :], **CLOSE)


def test_a_batch_keeps_its_number_of_rows(engine):
    cache, ids = engine.new_cache(), torch.tensor([ASKED] * 3)
    with torch.inference_mode():
        passed(engine, ids, cache)
        for rows in (1, 2, 4):
            with pytest.raises(ConfigError, match="holds 3 sequences, and"):
                passed(engine, ids[:1].expand(rows, -1), cache)
    cache.crop(-len(ASKED))
    torch.testing.assert_close(run(engine, NEXT, cache), plain(engine, NEXT), **CLOSE)


def test_a_copied_cache_goes_its_own_way_and_copies_nothing_that_is_stored(engine):
    cache = engine.new_cache()
    run(engine, ASKED, cache)
    other = copy.deepcopy(cache)
    assert other.layers[0].prefix.host is cache.layers[0].prefix.host
    run(engine, [99, 98], other)
    torch.testing.assert_close(run(engine, NEXT, cache), plain(engine, ASKED + NEXT)[len(ASKED) :], **CLOSE)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        # `to` rounds rotary frequencies too: other positions than those of the stored keys.
        (lambda model: model.to(torch.bfloat16), "changed after its store was opened"),
        (lambda model: model.train(), "training mode"),
    ],
)
def test_a_model_that_is_changed_after_opening_is_refused(engine, change, says):
    change(engine.loaded.model)
    refused(engine, says)


@sliding
def test_a_window_that_is_changed_after_opening_is_refused(engine):
    engine.loaded.model.config.sliding_window = 3
    refused(engine, "changed after its store was opened")


def refused(engine, says):
    for run_some in (lambda: run(engine, ASKED, engine.new_cache()), lambda: engine.extend(ASKED)):
        with pytest.raises(ConfigError, match=says):
            run_some()


@pytest.mark.parametrize("wrong", [-1, 259])
def test_ids_out_of_the_vocabulary_are_refused(engine, wrong):
    with pytest.raises(ConfigError, match=f"id {wrong} is not in the vocabulary"):
        run(engine, [5, wrong], engine.new_cache())


def test_a_cache_behind_a_prefix_has_seen_tokens(engine):
    """Models that treat a first pass in another way ask its cache."""
    assert engine.new_cache().is_initialized


@pytest.mark.parametrize(
    ("named", "says"),
    [
        ({}, "takes input_ids"),
        ({"input_ids": torch.tensor(ASKED)}, "takes input_ids"),
        ({"input_ids": torch.tensor([[ASKED]])}, "takes input_ids"),
        ({"input_ids": torch.zeros(0, 6, dtype=torch.long)}, "takes input_ids"),
        ({"input_ids": torch.tensor([[1.0, 2.0]])}, "whole numbers"),
        ({"inputs_embeds": torch.zeros(6, 32)}, "takes input_ids"),
        ({"attention_mask": [[1] * (N + 6)]}, "must be 2-D"),
        ({"position_ids": torch.arange(N, N + 6).repeat(3, 1)}, "position_ids must be"),
    ],
)
def test_what_has_not_the_shape_of_a_pass_is_refused(engine, named, says):
    if "attention_mask" in named or "position_ids" in named:
        named = {"input_ids": torch.tensor([ASKED]), **named}
    with pytest.raises(ConfigError, match=says):
        engine.loaded.model(**with_cache(engine.loaded.model, engine.new_cache()), **named)


@pytest.mark.parametrize("width", [len(ASKED), N + len(ASKED)])
def test_a_prepared_mask_serves_full_layers_and_not_sliding_ones_too(engine, width):
    seen = torch.ones(len(ASKED), width, dtype=torch.bool).tril(width - len(ASKED))[None, None]
    if engine.loaded.model.config.model_type == "gemma2":
        with pytest.raises(ConfigError, match="sliding-window layers"):
            run(engine, ASKED, engine.new_cache(), attention_mask=seen)
        return
    found = run(engine, ASKED, engine.new_cache(), attention_mask=seen)
    torch.testing.assert_close(found, plain(engine, ASKED), **CLOSE)


@pytest.mark.parametrize(
    ("mask", "says"),
    [
        (torch.zeros(1, 1, 6, 6), "must be bool"),
        (torch.ones(3, 1, 6, N + 6, dtype=torch.bool), "must be .1, 1, 6"),
        (torch.ones(1, 1, 4, N + 6, dtype=torch.bool), "must be .1, 1, 6"),
        (torch.ones(1, 1, 6, 7, dtype=torch.bool), "covers 7 tokens, but 36"),
        (torch.ones(1, 1, 6, N + 6, dtype=torch.bool).triu(1), "hides stored tokens"),
    ],
)
@full
def test_a_prepared_mask_that_does_not_fit_is_refused(engine, mask, says):
    with pytest.raises(ConfigError, match=says):
        run(engine, ASKED, engine.new_cache(), attention_mask=mask)


def test_prompt_lookup_is_refused(engine):
    given = {generate_name(): engine.new_cache(), "prompt_lookup_num_tokens": 2, "max_new_tokens": 20}
    with pytest.raises(ConfigError):  # by its own sentence, or up to transformers 5.8 by that of the mask
        engine.loaded.model.generate(torch.arange(3, 3 + N + 4)[None], **given)


def test_another_model_does_not_run_behind_the_prefix(engine):
    """It would append to the cache and attend without the prefix."""
    other = text_model(family=engine.loaded.model.config.model_type)
    with pytest.raises(UnsupportedModel, match=r"run engine\.loaded\.model"):
        other(torch.tensor([ASKED]), **with_cache(other, engine.new_cache()))
    wrap(other)
    with pytest.raises(ConfigError, match="belongs to another model"):
        other(torch.tensor([ASKED]), **with_cache(other, copy.deepcopy(engine.new_cache())))


def test_a_layer_that_leaves_the_cache_out_is_noticed(engine, monkeypatch):
    layer = engine.loaded.model.base_model.layers[1]
    forward = layer.forward

    def left_out(*given, **named):
        return forward(*given, **{name: own for name, own in named.items() if name not in CACHE_NAMES})

    monkeypatch.setattr(layer, "forward", left_out)
    with pytest.raises(UnsupportedModel, match="layer 1 attended without its stored prefix"):
        run(engine, ASKED, engine.new_cache())


def test_gradients_are_refused_and_not_wrong(engine):
    with pytest.raises(ConfigError, match="no gradients"):
        passed(engine, torch.tensor([ASKED]), engine.new_cache()).sum().backward()


@pytest.mark.parametrize("family", PLAIN)
def test_without_a_cache_of_ours_gradients_are_right_or_refused(family):
    ours, theirs = wrap(tiny_model(family)).model, eager(tiny_model(family))
    losses = [model(torch.tensor([ASKED])).logits.sin().mean() for model in (ours, theirs)]
    losses[1].backward()
    if family == "gpt-oss":
        with pytest.raises(ConfigError, match="attention sinks"):
            losses[0].backward()
        return
    losses[0].backward()
    for found, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, **CLOSE)


@pytest.mark.parametrize("where", ["call", "generate", "config"])
def test_attention_weights_are_refused_and_not_empty(engine, where):
    model, more = engine.loaded.model, {} if where == "config" else {"output_attentions": True}
    if where == "config":
        # As a config.json has it: set by hand, transformers refuses it.
        model.config._output_attentions = True
        assert engine.answer("Who?", max_new_tokens=1).tokens
    call = partial(model.generate, return_dict_in_generate=True, **GREEDY) if where == "generate" else model
    with pytest.raises(ConfigError, match="output_attentions"):
        call(**engine.inputs("Who?"), **more)


def test_a_pass_that_failed_is_taken_back(engine):
    cache = engine.new_cache()
    run(engine, ASKED, cache)
    layer = engine.loaded.model.base_model.layers[2]
    with patch.object(layer, "forward", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        run(engine, [9, 9, 9], cache)
    torch.testing.assert_close(run(engine, NEXT, cache), plain(engine, ASKED + NEXT)[len(ASKED) :], **CLOSE)


def test_cropping_a_cache_removes_from_the_end_only(engine):
    cache = engine.new_cache()
    run(engine, ASKED, cache)
    cache.crop(-2)
    assert cache.get_seq_length() == N + 4
    for wrong in (-5, 12):
        with pytest.raises(ConfigError, match="cannot crop"):
            cache.crop(wrong)


@pytest.mark.parametrize("family", PLAIN)
@pytest.mark.parametrize("left", [True, False])
def test_without_a_cache_of_ours_attention_is_plain(family, left):
    rows = [list(range(5, 5 + length)) for length in (12, 1, 9)]
    pads = [[0] * (12 - len(row)) for row in rows]
    ids = torch.tensor([pad + row if left else row + pad for pad, row in zip(pads, rows, strict=True)])
    seen = (ids > 0).long()
    ours, theirs = wrap(tiny_model(family)).model, eager(tiny_model(family))
    with torch.inference_mode():
        for cached in (True, False):
            found, expected = (
                model(ids, attention_mask=seen, use_cache=cached).logits[seen.bool()]
                for model in (ours, theirs)
            )
            torch.testing.assert_close(found, expected, **CLOSE)
    if left:
        found, expected = (model.generate(ids, attention_mask=seen, **GREEDY) for model in (ours, theirs))
        assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("window", [1, 0, -4])
def test_a_window_without_earlier_tokens_is_refused(window):
    with pytest.raises(UnsupportedModel, match=f"sliding window of {window}"):
        wrap(tiny_model("mistral-sliding", sliding_window=window))


def test_a_text_is_seen_by_its_places_and_padding_by_a_mask(engine, monkeypatch):
    """A mask has an entry for each pair of tokens, which a long chunk has no room for."""
    given, attend_dense = [], attention.attend_dense

    def seen(query, key, value, scaling, mask, softcap, places):
        given.append((mask is None, places is not None))
        return attend_dense(query, key, value, scaling, mask, softcap, places)

    monkeypatch.setattr(attention, "attend_dense", seen)
    engine.extend(ASKED)
    assert set(given) == {(True, True)}
    given.clear()
    engine.answer_many(["a", "bcd"], 1)
    assert set(given) == {(False, False)}


def test_keys_of_no_layer_are_seen_by_the_rows_behind_them():
    query, key, value = torch.randn(3, 1, 2, 5, 4)
    one_entry = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    out, _ = attention.prefix_attention(torch.nn.Module(), query, key, value, one_entry, 0.5)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.5)
    torch.testing.assert_close(out, expected.transpose(1, 2))
