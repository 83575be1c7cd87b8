"""Picking tokens: greedy as the engine, OpenAI's penalties and biases, seeds, log-probabilities."""

import math

import pytest
import torch

from offload_decode.common.errors import ConfigError
from offload_decode.engine.engine import Engine
from offload_decode.server.requests import Generation, WrongField
from offload_decode.server.sampling import Picker, check_generation, scored
from tests.tiny import served_model, token_store

N, NEW = 20, 10


@pytest.fixture(scope="module")
def loaded():
    return served_model()


@pytest.fixture(scope="module")
def engine(loaded, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sampling") / "store"
    return Engine.open(token_store(folder, loaded, range(3, 3 + N)), loaded)


def picker(loaded, index=0, **wanted):
    return Picker(loaded, (), frozenset(), Generation(**wanted), NEW, index)


def drawn(loaded, many=12, **wanted):
    """Tokens from the same flat logits."""
    picking = picker(loaded, **wanted)
    logits = torch.linspace(0, 1, 259)
    found = []
    for _ in range(many):
        found.append(picking.pick(logits).token)
        picking.append(found[-1])
    return found


@pytest.mark.parametrize(
    "settings",
    [{}, {"repetition_penalty": 3.0}, {"no_repeat_ngram_size": 1}, {"min_new_tokens": 5}],
    ids=lambda settings: "+".join(settings) or "plain",
)
def test_greedy_is_the_engine_token_for_token(engine, settings, monkeypatch):
    first = engine.answer("Why", NEW).tokens
    monkeypatch.setattr(engine.loaded.model.generation_config, "eos_token_id", first[2])
    for name, value in settings.items():
        monkeypatch.setattr(engine.loaded.model.generation_config, name, value)
    expected = engine.answer("Why", NEW)
    talk = engine.fork()
    logits = talk.ask("Why")
    picking = Picker(engine.loaded, talk.tokens, talk.end_tokens, Generation(), NEW)
    tokens = []
    while len(tokens) < NEW and (token := picking.pick(logits).token) not in talk.end_tokens:
        tokens.append(token)
        assert not picking.append(token)
        logits = talk.extend([token])
    assert tuple(tokens) == expected.tokens
    assert (len(expected.tokens) < NEW) == (expected.finish == "stop")


def test_ends_that_are_ignored_are_not_held_back_either(engine, monkeypatch):
    monkeypatch.setattr(engine.loaded.model.generation_config, "min_new_tokens", 5)
    logits = torch.zeros(259)
    logits[7] = 1
    for ignored in (False, True):
        wanted = Generation(ignore_end=ignored)
        picked = Picker(engine.loaded, (), frozenset([7]), wanted, NEW).pick(logits).token
        assert (picked == 7) == ignored


def test_stop_strings_of_the_generation_config_end_the_answer(loaded, monkeypatch):
    monkeypatch.setattr(loaded.model.generation_config, "stop_strings", ["ab"])
    a, b = loaded.tokenizer.encode("ab", add_special_tokens=False)
    picking = picker(loaded)
    assert [picking.append(token) for token in (b, a, b)] == [False, False, True]


def test_penalties_are_those_that_openai_defines(loaded):
    logits = torch.randn(259, generator=torch.Generator().manual_seed(0))
    picking = picker(loaded, frequency_penalty=0.5, presence_penalty=0.25, logit_bias={9: 1.5, 4: -2})
    came = [4, 9, 4, 4, 200]
    for token in came:
        picking.append(token)
    expected = logits.clone()
    expected[9] += 1.5
    expected[4] -= 2
    for token in set(came):
        expected[token] -= came.count(token) * 0.5 + 0.25
    before = logits.clone()
    seen = []
    picking._sampler = lambda given: seen.append(given[0]) or torch.tensor([0])
    picking.pick(logits)
    torch.testing.assert_close(seen[0], expected)
    assert torch.equal(logits, before), "the logits stay as they are"


def test_a_seed_repeats_an_answer_and_each_of_n_has_its_own_random_stream(loaded):
    wanted = {"temperature": 1.0, "seed": 5}
    single = drawn(loaded, **wanted)
    assert drawn(loaded, **wanted, index=0) == single
    streams = [drawn(loaded, **wanted, index=index) for index in range(4)]
    assert len({tuple(stream) for stream in streams}) == 4
    assert streams == [drawn(loaded, **wanted, index=index) for index in range(4)]
    assert drawn(loaded, temperature=1.0, seed=-5) == drawn(loaded, temperature=1.0, seed=2**64 - 5)
    assert drawn(loaded, temperature=1.0) != drawn(loaded, temperature=1.0), "without a seed, afresh"


def test_log_probabilities_are_the_models_own(loaded):
    logits = torch.randn(259, generator=torch.Generator().manual_seed(1))
    expected = logits.log_softmax(-1)
    asked = {"top_logprobs": 3, "temperature": 0.5, "logit_bias": {8: 100}, "frequency_penalty": 1.0}
    found = picker(loaded, **asked).pick(logits)
    assert found.token == 8
    assert found.logprob == pytest.approx(float(expected[8]))
    best = expected.topk(3)
    assert [token for token, _ in found.top] == best.indices.tolist()
    assert [value for _, value in found.top] == pytest.approx(best.values.tolist())
    assert picker(loaded).pick(logits).logprob is None
    alone = picker(loaded, top_logprobs=0).pick(logits)
    assert alone.logprob == pytest.approx(float(expected.max()))
    assert alone.top == ()


@pytest.mark.parametrize("many", [0, 1, 16, 37])
def test_prompts_are_scored_row_by_row(many):
    logits = torch.randn(many, 50, generator=torch.Generator().manual_seed(2)) * 5
    tokens = [(7 * row) % 50 for row in range(many)]
    expected = logits.log_softmax(-1)
    found = scored(logits, tokens, top=60)
    assert [each.token for each in found] == tokens
    for row, each in enumerate(found):
        assert each.logprob == pytest.approx(float(expected[row, each.token]), abs=1e-5)
        assert [value for _, value in each.top] == sorted((value for _, value in each.top), reverse=True)
        assert math.fsum(math.exp(value) for _, value in each.top) == pytest.approx(1)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"temperature": wrong} for wrong in (-0.1, math.inf, math.nan)),
        *({"top_p": wrong} for wrong in (0, 1.1, math.nan)),
    ],
)
def test_defaults_of_a_server_that_cannot_be_are_refused_before_a_prompt_runs(loaded, wrong):
    (name,) = wrong
    with pytest.raises(ConfigError, match=name):
        check_generation(loaded, Generation(**wrong))


@pytest.mark.parametrize("wrong", [-1, 259])
def test_a_bias_of_a_token_that_is_not_there_is_refused(loaded, wrong):
    check_generation(loaded, Generation(logit_bias={258: 1}))
    with pytest.raises(WrongField, match="logit_bias names token") as refused:
        check_generation(loaded, Generation(logit_bias={wrong: 1}))
    assert refused.value.param == "logit_bias"
