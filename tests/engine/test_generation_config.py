"""What a `generation_config` asks for is done alike by the engine, by its batches and by `generate`."""

from itertools import pairwise

import pytest

from offload_decode.engine.engine import Engine
from tests.tiny import served_model, token_store

N, NEW = 30, 14
QUESTIONS = ["Who jumps, and who jumps?", "Why", "Over what does it jump, and how often?"]
SETTINGS = [
    {"repetition_penalty": 3.0},
    {"no_repeat_ngram_size": 1},
    {"encoder_repetition_penalty": 4.0},
    {"encoder_no_repeat_ngram_size": 1},
    {"suppress_tokens": "the first answer"},
    {"begin_suppress_tokens": "the first answer"},
    {"bad_words_ids": "pairs of the first answer"},
    {"sequence_bias": "against the first answer"},
    {"min_new_tokens": 9, "eos_token_id": "the first answer"},
    {"min_length": 25, "eos_token_id": "the first answer"},
    {"exponential_decay_length_penalty": (3, 1.7), "eos_token_id": [100, 101, 102]},
    {"forced_eos_token_id": 7},
    {"guidance_scale": 2.5},
    {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2, "suppress_tokens": [40, 41]},
]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("generation") / "store"
    return token_store(folder, served_model("gemma2"), range(3, 3 + N))


@pytest.fixture
def engine(store):
    return Engine.open(store, served_model("gemma2"))


def generated(engine, question, **settings):
    """Token ids by transformers' own loop, without the end token."""
    inputs = engine.inputs(question)
    how = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, **settings}
    how["eos_token_id"] = sorted(engine.end_tokens)  # those of the tokenizer and its template too
    out = engine.loaded.model.generate(**inputs, **how)
    tokens = out[0, inputs["input_ids"].shape[1] :].tolist()
    return tuple(tokens[:-1] if tokens[-1] in engine.end_tokens else tokens)


def configured(engine, settings):
    first = engine.answer(QUESTIONS[0], NEW).tokens
    known = sorted(set(first))
    meant = {"the first answer": known, "pairs of the first answer": [list(pair) for pair in pairwise(first)]}
    meant["against the first answer"] = [[[token], -100.0] for token in known]
    told = {name: meant[value] if type(value) is str else value for name, value in settings.items()}
    engine.loaded.model.generation_config.update(**told)
    return first


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: "+".join(settings))
def test_the_engine_its_batches_and_generate_agree(engine, settings):
    plain = configured(engine, settings)
    expected = [generated(engine, question) for question in QUESTIONS]
    assert [engine.answer(question, NEW).tokens for question in QUESTIONS] == expected
    for size in (2, 3):
        together = engine.answer_many(QUESTIONS, NEW, batch_size=size)
        assert [answer.tokens for answer in together] == expected
    assert plain != expected[0], "the settings change the answer"


def test_an_answer_ends_with_a_stop_string(engine):
    whole = engine.answer(QUESTIONS[0], NEW).tokens
    letter = next(letter for letter in map(engine.decode, ([token] for token in whole)) if letter.isascii())
    engine.loaded.model.generation_config.stop_strings = [letter]
    expected = [generated(engine, question, tokenizer=engine.tokenizer) for question in QUESTIONS]
    alone = [engine.answer(question, NEW) for question in QUESTIONS]
    assert [answer.tokens for answer in alone] == expected
    together = engine.answer_many(QUESTIONS, NEW)
    assert [(one.tokens, one.finish) for one in together] == [(one.tokens, one.finish) for one in alone]
    assert len(expected[0]) < NEW
    assert alone[0].text.endswith(letter)
    assert alone[0].finish == "stop"


def test_a_conversation_is_counted_whole_and_the_stored_tokens_are_not(engine):
    """With n-grams of one token no token of the conversation comes again; stored ones may."""
    engine.loaded.model.generation_config.no_repeat_ngram_size = 1
    said = []
    for question in QUESTIONS:
        asked = engine.question_tokens(question)
        answer = list(engine.generate(engine.ask(question), NEW))
        assert len(set(answer)) == len(answer)
        assert not set(answer) & {*said, *asked}
        said += asked + answer
        assert engine.tokens + engine.pending == said
        at_once = engine.answer_many(QUESTIONS[:2], 5)
        assert [one.tokens for one in at_once] == [engine.answer(one, 5).tokens for one in QUESTIONS[:2]]
    allowed = set(range(3, 3 + N))  # what is stored
    engine.crop(N)
    everything = engine.loaded.model.config.vocab_size
    engine.loaded.model.generation_config.suppress_tokens = sorted(set(range(everything)) - allowed)
    assert set(engine.generate(engine.extend([200]), NEW)) <= allowed


def test_how_a_token_is_picked_is_said_by_the_sampler_alone(engine):
    greedy = engine.answer(QUESTIONS[0], NEW).tokens
    config = engine.loaded.model.generation_config
    config.do_sample, config.temperature, config.top_k, config.num_beams = True, 9.0, 3, 4
    assert engine.answer(QUESTIONS[0], NEW).tokens == greedy
