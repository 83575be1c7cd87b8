"""Selectors that remember a conversation, in the engine: every question starts afresh, and no step leaves a
half of itself behind.
"""

import pytest
import torch

from offload_decode.common.errors import ConfigError
from offload_decode.engine import batching
from offload_decode.engine.engine import Engine
from offload_decode.hf.compat import cache_in
from offload_decode.selectors import quest
from tests.tiny import text_store

TEXT = "The quick brown fox jumps over the lazy dog. " * 4
QUESTIONS = ["Who jumps?", "Over what does it jump, and how often?"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return text_store(tmp_path_factory.mktemp("memory"), TEXT, query_samples=40)


@pytest.fixture(params=["h2o", "tova", "snapkv"])
def engine(request, folder):
    return Engine.open(folder / "store", selector=request.param, options={"budget": "90"})


def remembered(engine):
    """Every layer's memory as plain lists."""
    state = engine.selector.state
    return {
        layer: [torch.as_tensor(part).tolist() for part in (kept if isinstance(kept, tuple) else [kept])]
        for layer, kept in state.items()
    }


def test_questions_are_answered_alike_in_any_order(engine):
    def answers(questions):
        return {question: engine.answer(question, max_new_tokens=8).tokens for question in questions}

    first = answers(QUESTIONS)
    assert answers(QUESTIONS[::-1]) == first
    many = engine.answer_many(QUESTIONS, max_new_tokens=8)
    assert [answer.tokens for answer in many] == list(first.values())
    assert remembered(engine) == {}


def test_a_conversation_starts_afresh_at_each_question(engine, monkeypatch):
    kind, passes = type(engine.selector), []
    choose = kind.choose

    def recorded(selector, layer, queries, k):
        passes.append((layer, layer in selector.state))
        return choose(selector, layer, queries, k)

    monkeypatch.setattr(kind, "choose", recorded)
    layers = engine.loaded.shape.full_layers
    for question in QUESTIONS:
        passes.clear()
        "".join(engine.stream(question, max_new_tokens=4))
        afresh = [(layer, False) for layer in layers]
        assert passes == afresh + 3 * [(layer, True) for layer in layers]


def test_a_fork_goes_its_own_way(engine):
    engine.ask(QUESTIONS[0])
    before, other = remembered(engine), engine.fork()
    expected = engine.fork().extend([9])
    other.ask(QUESTIONS[1])
    assert remembered(engine) == before
    assert remembered(other) != before
    torch.testing.assert_close(engine.extend([9]), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("fails_at", [0, 1, 2])
@pytest.mark.parametrize("run", ["extend", "ask"])
def test_an_interrupted_step_leaves_the_memory_as_it_was(engine, monkeypatch, fails_at, run):
    engine.ask(QUESTIONS[0])
    before, one = remembered(engine), engine.fork().extend([5])
    expected = engine.fork().extend([8, 9])
    begin, calls = engine.prefix.begin, []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) > fails_at:
            raise KeyboardInterrupt
        return begin(*arguments)

    monkeypatch.setattr(engine.prefix, "begin", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.extend([8, 9]) if run == "extend" else engine.ask(QUESTIONS[1])
    monkeypatch.undo()
    assert remembered(engine) == before
    assert torch.equal(engine.fork().extend([5]), one)
    torch.testing.assert_close(engine.extend([8, 9]), expected, atol=1e-6, rtol=0)


def test_a_budget_of_everything_is_dense_and_a_small_one_is_not(folder, engine):
    question = QUESTIONS[1]
    dense = Engine.open(folder / "store", selector="dense").ask(question)
    whole = Engine.open(folder / "store", selector=engine.selector.name, options={"budget": "100%"})
    torch.testing.assert_close(whole.ask(question), dense, atol=1e-5, rtol=0)
    assert (engine.ask(question) - dense).abs().max() > 1e-3


def test_a_long_answer_outlives_the_stored_tokens(folder, engine):
    small = Engine.open(folder / "store", selector=engine.selector.name, options={"budget": "5"})
    assert len(small.answer(QUESTIONS[1], max_new_tokens=12).tokens) == 12


def test_beams_and_batches_are_refused(engine):
    with pytest.raises(ConfigError, match="one conversation"):
        engine.loaded.model.generate(**engine.inputs(QUESTIONS[0]), max_new_tokens=3, num_beams=2)


def test_what_was_dropped_is_not_cropped_back(engine):
    first = engine.extend([5, 6, 7])
    before = remembered(engine)
    engine.extend([8, 9])
    with pytest.raises(ConfigError, match="fork the engine"):
        engine.crop(engine.length - 1)
    engine.crop(engine.length)  # nothing is taken back
    engine.crop(engine.prefix.length)
    assert torch.equal(engine.extend([5, 6, 7]), first)
    assert remembered(engine) == before


@pytest.mark.parametrize("name", ["h2o", "tova"])
def test_the_keys_that_choosing_fetches_are_counted(folder, name):
    """Each kept token's key and value move once in every layer and KV head."""
    engine = Engine.open(folder / "store", selector=name, options={"budget": "20"})
    engine.extend([5])
    stats, shape = engine.prefix.take_stats(), engine.loaded.shape
    kept = len(shape.full_layers) * shape.kv_heads * 20
    assert stats.bytes_moved == kept * 2 * shape.head_dim * 4


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("random", {"budget": "30"}),
        ("streaming", {"budget": "mass=0.5"}),
        ("keydiff", {"budget": "mass=0.5"}),
        ("quoka", {"budget": "30"}),
        ("quest", {"budget": "30", "dense_layers": ""}),
        ("topk", {"budget": "mass=0.8"}),
    ],
)
def test_many_questions_are_answered_as_each_alone(folder, name, options):
    engine = Engine.open(folder / "store", selector=name, options=options)
    alone = [engine.answer(question, max_new_tokens=8).tokens for question in QUESTIONS]
    assert [answer.tokens for answer in engine.answer_many(QUESTIONS, max_new_tokens=8)] == alone


def test_a_cache_of_ones_own_is_not_cropped(engine):
    inputs = engine.inputs(QUESTIONS[0])
    engine.loaded.model(**inputs)
    with pytest.raises(ConfigError, match="new cache"):
        cache_in(inputs).crop(-1)


def test_a_conversation_that_may_be_paged_is_asked_one_by_one(folder, monkeypatch):
    monkeypatch.setattr(quest, "WHOLE_GENERATED", 20)
    options = {"budget": "6", "dense_layers": "", "page_size": 4}
    engine = Engine.open(folder / "store", selector="quest", options=options)
    engine.extend([5, 6, 7] * 10)
    alone = [engine.answer(question, max_new_tokens=12).tokens for question in QUESTIONS]
    assert [answer.tokens for answer in engine.answer_many(QUESTIONS, max_new_tokens=12)] == alone
    monkeypatch.setattr(batching, "answer_batch", lambda *_: pytest.fail("they went as a batch"))
    engine.answer_many(QUESTIONS, max_new_tokens=2)
