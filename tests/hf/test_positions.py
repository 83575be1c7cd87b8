"""Positions that depend on the length of a text: what is stored and asked is rotated as in one pass over all
of it, and what would stand beyond the last position is refused.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from offload_decode.common.errors import ConfigError, StoreMismatch, UnsupportedModel
from offload_decode.engine.engine import Engine
from offload_decode.hf.compat import generate_name, with_cache
from offload_decode.hf.positions import CONTEXT, Lengths, Positions, describe_positions, lengths_of
from offload_decode.models.loading import LoadedModel, wrap
from offload_decode.store.reader import KVStore
from tests.families import VOCAB
from tests.tiny import tiny_model, token_store

PREFIX, QUESTION = 45, 9
ORIGINAL = 64
CLOSE = {"atol": 1e-4, "rtol": 0}
LONG = {"rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": ORIGINAL}
LONG |= {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.5, 4.0, 8.0, 16.0]}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
PLAIN = {"rope_type": "default", "rope_theta": 10_000.0}
MODELS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "longrope": ("phi3", 4 * ORIGINAL, LONG),
    "dynamic": ("llama", ORIGINAL, DYNAMIC),
    "by layer type": ("gemma3", ORIGINAL, {"full_attention": DYNAMIC, "sliding_attention": PLAIN}),
}


def model_of(name: str) -> Any:
    family, most, rope = MODELS[name]
    more = {"head_dim": 8, "original_max_position_embeddings": ORIGINAL} if name == "longrope" else {}
    return tiny_model(family, max_position_embeddings=most, rope_parameters=rope, **more)


@pytest.fixture(params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def text(tokens: int) -> torch.Tensor:
    return torch.randint(3, VOCAB, (1, tokens), generator=torch.Generator().manual_seed(1))


def stored(served: LoadedModel, path: Path, context: int | None) -> Engine:
    token_store(path, served, text(PREFIX)[0], 16, context=context)
    return Engine.open(path, served, options={"budget": str(PREFIX)})


@pytest.fixture
def opened(tmp_path: Path) -> Callable[..., Engine]:
    return lambda name, context: stored(wrap(model_of(name)), tmp_path / "store", context)


def pass_over(engine: Engine, ids: torch.Tensor, **given: Any) -> torch.Tensor:
    """Logits `[1, T, V]` behind the stored tokens."""
    with torch.inference_mode():
        return engine.loaded.model(ids, **with_cache(engine.loaded.model, engine.new_cache()), **given).logits


def in_one_pass(name: str, ids: torch.Tensor, length: int) -> torch.Tensor:
    """Logits of `ids [1, T]` as the beginning of a text of `length` tokens, by a model that saw no other."""
    whole = torch.cat([ids, text(length)[:, : length - ids.shape[1]]], dim=1)
    with torch.inference_mode():
        return model_of(name)(whole).logits[:, : ids.shape[1]]


@pytest.mark.parametrize("length", [PREFIX + QUESTION, ORIGINAL, ORIGINAL + 1, 2 * ORIGINAL])
def test_every_token_is_rotated_as_in_one_pass_over_all_of_the_text(name, length, opened) -> None:
    engine, asked = opened(name, length - PREFIX), text(PREFIX + QUESTION)
    ours = pass_over(engine, asked[:, PREFIX:])
    torch.testing.assert_close(ours, in_one_pass(name, asked, length)[:, PREFIX:], **CLOSE)
    # A second turn, token by token, stands in the same text.
    turn = engine.fork()
    for start in range(PREFIX, PREFIX + QUESTION):
        logits = turn.extend(asked[0, start : start + 1])
    torch.testing.assert_close(logits, in_one_pass(name, asked, length)[0, -1], **CLOSE)


@pytest.mark.parametrize("tokens", [PREFIX, 2 * ORIGINAL])
def test_by_default_a_text_is_rotated_as_transformers_does_with_a_usual_answer(
    name: str, tokens: int, tmp_path: Path
) -> None:
    served, asked = wrap(model_of(name)), text(tokens + QUESTION)
    token_store(tmp_path / "store", served, asked[0, :tokens], 16)
    engine = Engine.open(tmp_path / "store", served, options={"budget": str(tokens)})
    length = tokens + QUESTION if tokens < ORIGINAL else tokens + CONTEXT
    expected = in_one_pass(name, asked, length)[0, -1]
    torch.testing.assert_close(engine.extend(asked[0, tokens:]), expected, **CLOSE)


def test_the_control_of_another_length_differs(name: str) -> None:
    asked = text(PREFIX + QUESTION)
    short, long = (in_one_pass(name, asked, length) for length in (ORIGINAL, 2 * ORIGINAL))
    assert (short - long).abs().max() > 0.01


def test_stores_of_two_lengths_share_a_model(name: str, tmp_path: Path) -> None:
    served = wrap(model_of(name))
    engines = {
        length: stored(served, tmp_path / str(length), length - PREFIX)
        for length in (2 * ORIGINAL, ORIGINAL, 3 * ORIGINAL)
    }
    asked = text(PREFIX + QUESTION)
    expected = {length: in_one_pass(name, asked, length)[0, -1] for length in engines}

    def ask(length: int) -> None:
        logits = engines[length].fork().extend(asked[0, PREFIX:])
        torch.testing.assert_close(logits, expected[length], **CLOSE)

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(ask, [*engines] * 4))
    # Without a store it rotates as transformers does.
    with torch.inference_mode():
        plain = served.model(asked).logits
    torch.testing.assert_close(plain, in_one_pass(name, asked, PREFIX + QUESTION), **CLOSE)


def test_a_store_is_the_same_for_all_contexts_that_rotate_alike(name: str, tmp_path: Path) -> None:
    served = wrap(model_of(name))
    stored(served, tmp_path / "store", 1)
    manifest = KVStore.open(tmp_path / "store").manifest
    assert manifest.rope["rotated_for"] == ORIGINAL
    for context, alike in ((ORIGINAL - PREFIX, True), (ORIGINAL - PREFIX + 1, False)):
        noted = served.lengths.chosen(PREFIX, context).noted
        assert (noted["rotated_for"] == ORIGINAL) is alike


def test_tokens_beyond_the_length_are_refused_or_end_an_answer(name: str, opened: Any) -> None:
    engine, asked = opened(name, ORIGINAL - PREFIX), text(4 * ORIGINAL)[0]
    with pytest.raises(ConfigError, match=r"would be 65, and this store serves at most 64.*larger --context"):
        engine.fork().extend(asked[: ORIGINAL - PREFIX + 1])
    turn = engine.fork()
    answer = list(turn.generate(turn.extend(asked[:QUESTION]), 100))
    # The last token is not run.
    assert len(answer) == ORIGINAL - PREFIX - QUESTION + 1
    with pytest.raises(ConfigError, match="larger --context"):
        turn.extend([5])


def test_padding_takes_no_position(opened: Any) -> None:
    asked, padding = text(PREFIX + QUESTION), ORIGINAL
    mask = torch.ones(1, PREFIX + padding + QUESTION, dtype=torch.bool)
    mask[:, PREFIX : PREFIX + padding] = False
    ids = torch.cat([torch.zeros(1, padding, dtype=torch.long), asked[:, PREFIX:]], dim=1)
    positions = (mask[:, PREFIX:].cumsum(-1) - 1 + PREFIX).clamp(min=0)
    found = pass_over(opened("dynamic", QUESTION), ids, attention_mask=mask, position_ids=positions)
    expected = in_one_pass("dynamic", asked, PREFIX + QUESTION)[0, -1]
    torch.testing.assert_close(found[0, -1], expected, **CLOSE)


def test_a_long_store_of_two_sets_of_frequencies_grows_without_end(opened: Any) -> None:
    engine, asked = opened("longrope", ORIGINAL), text(3 * ORIGINAL)
    logits = engine.fork().extend(asked[0, PREFIX:])
    torch.testing.assert_close(logits, in_one_pass("longrope", asked, 3 * ORIGINAL)[0, -1], **CLOSE)


def test_generate_that_drops_the_cache_is_refused(opened: Any) -> None:
    """Phi-3's own does, where the question is longer than the original length and the prefix is not."""
    engine, asked = opened("longrope", 4 * ORIGINAL), text(PREFIX + ORIGINAL + 1)
    given = {"attention_mask": torch.ones_like(asked), generate_name(): engine.new_cache()}
    with pytest.raises(UnsupportedModel, match="drops the stored prefix"):
        engine.loaded.model.generate(asked[:, PREFIX:], **given, max_new_tokens=2)
    logits = engine.fork().extend(asked[0, PREFIX:])
    torch.testing.assert_close(logits, in_one_pass("longrope", asked, 2 * ORIGINAL)[0, -1], **CLOSE)


def test_a_store_that_states_no_length_is_refused(tmp_path: Path) -> None:
    served = wrap(model_of("dynamic"))
    stored(served, tmp_path / "store", 1)
    opened = KVStore.open(tmp_path / "store")
    for rope in ({}, {"rotated_for": "64"}, {"rotated_for": PREFIX - 1}, {"rotated_for": 60}):
        opened.manifest = replace(opened.manifest, rope=rope)
        with pytest.raises(StoreMismatch, match="prefill again"):
            Engine.open(opened, served)


def test_a_model_is_known_whatever_it_saw_before() -> None:
    """transformers keeps the frequencies of the longest text in the module."""
    model = model_of("dynamic")
    before = wrap(model)
    with torch.inference_mode():
        model(text(3 * ORIGINAL))
    again = wrap(model)
    assert (again.weights_hash, again.config_hash) == (before.weights_hash, before.config_hash)


def test_what_the_scaling_starts_from_makes_another_model() -> None:
    """Of any other model `max_position_embeddings` changes nothing."""
    for rope, same in ((DYNAMIC, False), (PLAIN, True)):
        hashes = {
            wrap(tiny_model(max_position_embeddings=most, rope_parameters=dict(rope))).config_hash
            for most in (64, 128)
        }
        assert (len(hashes) == 1) is same


def test_the_context_that_is_expected_keeps_short_texts_in_their_length() -> None:
    phi = Lengths(switches=(4096,))
    assert phi.chosen(3000) == Positions(4096, 4096)
    assert phi.chosen(3584) == Positions(4096, 4096)
    assert phi.chosen(3585) == Positions(4097, None)
    assert phi.chosen(100_000) == Positions(4097, None)
    ntk = Lengths(grows=4096)
    assert ntk.chosen(3000) == Positions(4096, 4096)
    assert ntk.chosen(10_000) == Positions(10_512, 10_512)
    assert Lengths().chosen(10**9, 10**9) == Positions()


@pytest.mark.parametrize(("family", "field"), [("gpt2", "n_positions"), ("opt", "max_position_embeddings")])
def test_learned_positions_end_with_their_table(family: str, field: str) -> None:
    model = tiny_model(family, **{field: 50})
    lengths = lengths_of(model.config, model)
    assert lengths == Lengths(table=50)
    assert lengths.chosen(49) == Positions(most=50)
    for tokens, context in ((50, None), (45, 6)):
        with pytest.raises(ConfigError, match=r"50 learned positions.*split the corpus"):
            lengths.chosen(tokens, context)
    with pytest.raises(ConfigError, match="no more positions"):
        lengths.of_store({}, 45).check(51)


def test_a_store_of_learned_positions_serves_as_many_as_there_are(tmp_path: Path) -> None:
    served = wrap(tiny_model("gpt2", n_positions=ORIGINAL))
    with pytest.raises(ConfigError, match="64 learned positions"):
        stored(served, tmp_path / "store", ORIGINAL - PREFIX + 1)
    assert not list(tmp_path.iterdir())
    engine = stored(served, tmp_path / "store", None)
    asked = text(ORIGINAL)[0]
    with pytest.raises(ConfigError, match="no more positions"):
        engine.fork().extend(asked[: ORIGINAL - PREFIX + 1])
    answered = engine.fork()
    logits = answered.extend(asked[:QUESTION])
    assert len(list(answered.generate(logits, 100))) == ORIGINAL - PREFIX - QUESTION + 1


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "longrope"},
        {"rope_type": "longrope", "original_max_position_embeddings": "64", "rotated_for": 64},
        {"rope_type": "longrope", "original_max_position_embeddings": 10**5000, "rotated_for": 64},
        {"rope_type": "dynamic", "rotated_for": 10**5000},
        {"rope_type": "dynamic", "rotated_for": True},
        {"full_attention": {"rope_type": "dynamic"}},
    ],
)
def test_a_manifest_with_odd_parameters_is_a_sentence(rope: dict[str, Any]) -> None:
    with pytest.raises((StoreMismatch, UnsupportedModel)):
        describe_positions(rope, PREFIX)
    assert describe_positions({"rope_type": ["longrope"]}, PREFIX) == describe_positions({}, PREFIX) == ""
