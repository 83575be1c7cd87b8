"""The engine: answers, conversations, batches, and what it refuses."""

from dataclasses import FrozenInstanceError, replace
from unittest.mock import patch

import numpy as np
import pytest
import torch

from offload_decode.common.errors import ConfigError, ModelError, StoreMismatch, UnsupportedModel
from offload_decode.engine import step as prefix
from offload_decode.engine.conversation import Sampler
from offload_decode.engine.engine import Engine
from offload_decode.hf.compat import pick_device, with_cache
from offload_decode.models.loading import load, wrap
from tests.tiny import let_models_write, saved_model, text_model, text_store, tiny_model, tiny_tokenizer

TEXT = "The quick brown fox jumps over the lazy dog. " * 4
QUESTIONS = ["Who jumps?", "Over what does it jump, and how often?", "Why"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("engine")
    saved_model(folder / "tuned", "gemma2", 1), saved_model(folder / "other", "qwen3")
    return text_store(folder, TEXT, "gemma2", chunk=32)


@pytest.fixture
def engine(folder):
    return Engine.open(folder / "store", options={"budget": "20"})


def test_an_answer_equals_generate_over_the_same_cache(engine):
    inputs = engine.inputs(QUESTIONS[0])
    asked = inputs["input_ids"].shape[1]
    out = engine.loaded.model.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert list(engine.answer(QUESTIONS[0], max_new_tokens=12).tokens) == out[0, asked:].tolist()


def test_a_full_budget_equals_the_dense_selector_and_a_small_one_does_not(folder):
    def logits(selector, **options):
        return Engine.open(folder / "store", selector=selector, options=options).extend(list(range(10, 20)))

    dense = logits("dense")
    torch.testing.assert_close(logits("topk", budget="100%"), dense, atol=1e-5, rtol=0)
    torch.testing.assert_close(logits("topk", budget="1", dense_layers="1"), dense, atol=1e-5, rtol=0)
    assert (logits("topk", budget="1") - dense).abs().max() > 1e-3
    linear = Engine.open(folder / "store", options={"budget": "100%", "schedule": "linear"})
    torch.testing.assert_close(linear.extend(list(range(10, 20))), dense, atol=1e-5, rtol=0)
    stats = linear.prefix.take_stats()
    assert stats.selected == stats.rows * linear.prefix.length


def test_a_question_leaves_the_engine_untouched(engine):
    first = engine.answer(QUESTIONS[0])
    engine.answer(QUESTIONS[1])
    assert engine.length == engine.prefix.length
    assert engine.answer(QUESTIONS[0]).tokens == first.tokens


def test_streamed_pieces_make_the_answer(engine):
    answer = engine.answer(QUESTIONS[1], max_new_tokens=40)
    pieces = list(engine.stream(QUESTIONS[1], max_new_tokens=40))
    assert "".join(pieces).strip() == answer.text
    assert engine.length > engine.prefix.length  # a stream is a conversation that goes on


@pytest.mark.parametrize("before", [0, 4])
def test_a_batch_answers_as_one_by_one_from_where_the_conversation_is(engine, before):
    list(engine.stream(QUESTIONS[0], max_new_tokens=before) if before else ())
    alone = [engine.answer(question, max_new_tokens=10).tokens for question in QUESTIONS]
    for size in (1, 2, 8):
        together = engine.answer_many(QUESTIONS, max_new_tokens=10, batch_size=size)
        assert [answer.tokens for answer in together] == alone


@pytest.mark.parametrize("written", ["Blue.\nQuestion: Why?", "Blue.\n\n\nQuestion: Why?"])
def test_an_answer_ends_where_a_model_without_a_template_asks_the_next_question(engine, monkeypatch, written):
    let_models_write(monkeypatch, written)
    answer, length = engine.answer(QUESTIONS[0], max_new_tokens=len(written)), engine.length
    assert (answer.text, answer.finish) == ("Blue.", "stop")
    assert [one.text for one in engine.answer_many(QUESTIONS[:2], max_new_tokens=len(written))] == [
        "Blue."
    ] * 2
    assert "".join(engine.stream(QUESTIONS[0], max_new_tokens=len(written))).strip() == "Blue."
    # What is not part of the answer is not part of the conversation either.
    asked = engine.question_tokens(QUESTIONS[0])
    assert engine.decode(engine.tokens + engine.pending).endswith("Answer:" + engine.decode(answer.tokens))
    assert (
        length + len(asked) <= engine.length + len(engine.pending) <= length + len(asked) + len("Blue.\n\n")
    )


def test_an_answer_that_only_looks_like_the_next_question_is_whole(engine, monkeypatch):
    written = "Blue.\nQuestions are\nQuest"
    let_models_write(monkeypatch, written)
    answer = engine.answer(QUESTIONS[0], max_new_tokens=len(written))
    assert (answer.text, answer.finish) == (written, "length")
    assert engine.answer_many([QUESTIONS[0]], max_new_tokens=len(written))[0].text == written


def test_an_end_token_ends_an_answer_and_is_not_part_of_it(engine):
    tokens = engine.answer(QUESTIONS[0], max_new_tokens=10).tokens
    stop = tokens[4]
    engine.loaded.model.generation_config.eos_token_id = [stop]
    ended = engine.answer(QUESTIONS[0], max_new_tokens=10)
    assert ended.tokens == tokens[: tokens.index(stop)]
    assert ended.finish == "stop"
    assert engine.answer_many(QUESTIONS[:1], max_new_tokens=10)[0].tokens == ended.tokens


def test_a_checkpoint_names_its_ends_in_many_places(engine):
    loaded = engine.loaded
    loaded.model.generation_config.eos_token_id, loaded.model.config.eos_token_id = [101], 102
    known = replace(loaded, stated_ends=(103, 104))
    assert known.ends == {101, 102, 103, 104, loaded.tokenizer.eos_token_id}
    assert replace(loaded, tokenizer=None).ends == {101, 102}


def test_a_batch_runs_a_question_no_further_than_its_end(engine):
    alone = [engine.answer(question, max_new_tokens=10).tokens for question in QUESTIONS]
    stop = next(token for token in alone[1][:5] if token not in alone[0])
    engine.loaded.model.generation_config.eos_token_id = [stop]
    alone = [engine.answer(question, max_new_tokens=10).tokens for question in QUESTIONS]
    together = engine.answer_many(QUESTIONS, max_new_tokens=10)
    assert [answer.tokens for answer in together] == alone
    assert len({len(tokens) for tokens in alone}) > 1, "they end at different steps"
    longest = max(len(engine.question_tokens(question)) for question in QUESTIONS)
    steps = sum(min(len(tokens), 9) for tokens in alone)  # the tenth token is never run
    assert together[0].stats.tokens == longest * len(QUESTIONS) + steps


def test_the_statistics_count_what_was_selected(engine):
    stats = engine.answer(QUESTIONS[0], max_new_tokens=5).stats
    shape = engine.loaded.shape
    asked = engine.inputs(QUESTIONS[0])["input_ids"].shape[1]
    rows = (asked + 4) * shape.query_heads  # the last generated token is never run
    assert stats.tokens == asked + 4
    assert stats.rows == rows * len(shape.full_layers)
    assert stats.by_layer == dict.fromkeys(shape.full_layers, rows * 20)
    assert 0 < stats.bytes_moved <= stats.selected * shape.head_dim * 4


def test_sampling_is_seeded_and_narrow_nuclei_are_greedy(engine):
    def sampled(**settings):
        return engine.answer(QUESTIONS[0], max_new_tokens=15, sampler=Sampler(**settings)).tokens

    assert sampled(temperature=1.0, seed=1) == sampled(temperature=1.0, seed=1)
    assert sampled(temperature=1.0, seed=1) != sampled(temperature=1.0, seed=2)
    assert sampled(temperature=1.0, top_p=1e-9) == sampled()
    assert sampled(temperature=1e-300) == sampled(temperature=5e-324) == sampled()


def test_crop_reaches_back_to_the_stored_tokens_and_no_further(engine):
    stored = engine.prefix.length
    engine.extend([5, 6, 7])
    engine.crop(stored + 1)
    assert engine.length == stored + 1
    for length in (stored - 1, stored + 2):
        with pytest.raises(ConfigError, match="cannot crop"):
            engine.crop(length)


def test_an_interrupted_step_leaves_no_half_of_it(engine):
    """An interrupt between two layers: their generated tokens must not differ in length afterwards."""
    first = engine.extend([5, 6, 7])
    list(engine.generate(first, 2))  # leaves a pending token
    length, pending = engine.length, list(engine.pending)
    expected = engine.fork().extend([8, 9])
    interrupted = patch.object(engine.prefix, "begin", side_effect=KeyboardInterrupt)
    with interrupted, pytest.raises(KeyboardInterrupt):
        engine.extend([8, 9])
    assert (engine.length, engine.pending) == (length, pending)
    torch.testing.assert_close(engine.extend([8, 9]), expected, atol=1e-6, rtol=0)


def test_a_fork_takes_the_pending_token_along_and_a_crop_drops_it(engine):
    list(engine.stream(QUESTIONS[0], max_new_tokens=3))  # ended by length: the last token was never run
    assert len(engine.pending) == 1
    forked = engine.fork()
    assert forked.pending == engine.pending
    length = engine.length
    assert forked.extend([7]).argmax() == engine.fork().extend([7]).argmax()
    assert forked.length == length + 2
    engine.crop(length)
    engine.extend([7])
    assert engine.length == length + 1


def test_a_long_question_is_taken_in_parts(engine, monkeypatch):
    expected = engine.fork().extend(list(range(10, 60)))
    monkeypatch.setattr(prefix, "SELECTED_IDS", 100)
    torch.testing.assert_close(engine.extend(list(range(10, 60))), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("other", "says"), [("tuned", "weights"), ("other", "configuration")])
def test_another_model_is_refused(folder, other, says):
    with pytest.raises(StoreMismatch, match=says):
        Engine.open(folder / "store", str(folder / other))


def test_another_tokenizer_or_dtype_is_refused(folder):
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<extra>"])
    with pytest.raises(StoreMismatch, match="tokenizer"):
        Engine.open(folder / "store", wrap(load(str(folder / "model")).model, tokenizer))
    with pytest.raises(StoreMismatch, match="dtype"):
        Engine.open(folder / "store", text_model(0, "gemma2").to(torch.bfloat16))


@pytest.mark.parametrize(
    ("selector", "options"),
    [
        ("nearest", {}),
        ("topk", {"k": "5"}),
        ("topk", {"budget": "lots"}),
        ("topk", {"index": "faiss-ivf"}),  # none was built
        ("dense", {"index": "flat"}),
    ],
)
def test_wrong_options_are_refused(folder, selector, options):
    with pytest.raises(ConfigError):
        Engine.open(folder / "store", selector=selector, options=options)


def test_a_model_without_a_tokenizer_takes_tokens_but_no_questions(folder):
    engine = Engine.open(folder / "store", text_model(0, "gemma2"))
    assert engine.extend([5, 6]).shape == (259,)
    with pytest.raises(ModelError, match="tokenizer"):
        engine.answer("Who?")


def test_models_that_are_not_exact_are_refused_by_name():
    with pytest.raises(UnsupportedModel, match="mamba"):
        wrap(tiny_model("mamba"))
    with pytest.raises(UnsupportedModel, match="later tokens"):
        wrap(tiny_model("gemma3", use_bidirectional_attention=True))


def test_lost_keys_are_noticed(engine):
    """A model that no longer attends to the prefix must not silently answer without it."""
    expected = engine.fork().extend([5])
    engine.loaded.model.set_attn_implementation("eager")
    with pytest.raises(UnsupportedModel, match="without its stored prefix"):
        engine.extend([5])
    with pytest.raises(UnsupportedModel, match="without its stored prefix"):
        engine.loaded.model(torch.tensor([[5]]), **with_cache(engine.loaded.model, engine.new_cache()))
    engine.loaded.model.set_attn_implementation("offload_decode")
    torch.testing.assert_close(engine.extend([5]), expected, atol=0, rtol=0)


@pytest.mark.parametrize("device", ["meta", "mps", "cuda:99", "gpu"])
def test_a_device_that_is_not_served_is_refused(device):
    with pytest.raises(ConfigError, match="device"):
        pick_device(device)


def test_answers_are_frozen(engine):
    with pytest.raises(FrozenInstanceError):
        engine.answer("Who?", max_new_tokens=2).text = ""  # type: ignore[misc]


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        ([[5, 6], [7, 8]], "not one row"),
        (torch.ones(1, 1, 3, dtype=torch.long), "not one row"),
        ([5.0, 6.5], "whole numbers"),
        (torch.tensor([True, False]), "whole numbers"),
        ([[5, 6], [7]], "one row of whole numbers"),
        (["five"], "one row of whole numbers"),
        (torch.tensor(5), "not one row"),
        ([5, 259], "259 is not in the vocabulary"),
        ([-1, 5], "-1 is not in the vocabulary"),
        ([], "no tokens"),
    ],
)
def test_only_a_row_of_known_tokens_is_run(engine, tokens, says):
    expected = engine.fork().extend([5, 6])
    with pytest.raises(ConfigError, match=says):
        engine.extend(tokens)
    assert engine.length == engine.prefix.length
    for row in ([5, 6], torch.tensor([[5, 6]]), np.array([5, 6], np.int32), (5, 6)):
        torch.testing.assert_close(engine.fork().extend(row), expected, atol=0, rtol=0)


@pytest.mark.parametrize(
    ("questions", "size", "new", "says"),
    [
        (QUESTIONS, 0, 5, "batch_size must be 1 or more"),
        (QUESTIONS, -2, 5, "batch_size must be 1 or more"),
        (QUESTIONS, 2, 0, "max_new_tokens must be 1 or more"),
        ("Who?", 8, 5, "takes a list"),
    ],
)
def test_batches_that_answer_nothing_are_refused(engine, questions, size, new, says):
    with pytest.raises(ConfigError, match=says):
        engine.answer_many(questions, new, batch_size=size)
    with pytest.raises(ConfigError, match="max_new_tokens must be 1 or more"):
        engine.answer("Who?", -1)
