"""Several threads, and several answers at a time."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from offload_decode.common.errors import ConfigError
from offload_decode.engine.engine import Engine
from tests.tiny import random_ids, served_model, token_store

N, NEW = 200, 6
QUESTIONS = [f"Who was the {number}th?" for number in range(8)]


@pytest.fixture(scope="module", params=["topk", "h2o", "quest"])
def engine(request, tmp_path_factory):
    served = served_model("gemma2")
    store = token_store(tmp_path_factory.mktemp("threads") / "store", served, random_ids(N))
    return Engine.open(store, served, selector=request.param, options={"budget": "48"})


def test_threads_may_answer_at_a_time(engine):
    """Each answer is a fork; `generate` with a cache of its own may run beside them."""
    expected = [engine.answer(question, NEW).tokens for question in QUESTIONS]

    def by_generate(question):
        inputs = engine.inputs(question)
        out = engine.loaded.model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
        return tuple(out[0, inputs["input_ids"].shape[1] :].tolist())

    def by_answer(question):
        return engine.answer(question, NEW).tokens

    with ThreadPoolExecutor(4) as threads:
        ways = [by_answer, by_generate] * len(QUESTIONS)
        found = [threads.submit(way, question) for way, question in zip(ways, QUESTIONS * 2, strict=False)]
        assert [one.result() for one in found] == [*expected, *expected]


def test_a_second_thread_in_one_conversation_is_refused(engine, monkeypatch):
    inside, go_on = threading.Event(), threading.Event()
    forked = engine.fork()
    begin = forked.prefix.begin

    def slow(*arguments):
        inside.set()
        assert go_on.wait(30)
        return begin(*arguments)

    monkeypatch.setattr(forked.prefix, "begin", slow)
    with ThreadPoolExecutor(1) as other:
        running = other.submit(forked.extend, [5, 6, 7])
        assert inside.wait(30)
        with pytest.raises(ConfigError, match="another thread is extending this engine: give each"):
            forked.extend([8])
        with pytest.raises(ConfigError, match="another thread runs a pass over this cache"):
            forked.loaded.forward(torch.tensor([[8]]), forked.cache)
        go_on.set()
        running.result()
    assert forked.length == N + 3


def test_two_answers_cannot_be_written_into_one_conversation(engine):
    forked = engine.fork()
    first = forked.stream(QUESTIONS[0], NEW)
    next(first)
    forked.extend([5])
    with pytest.raises(ConfigError, match="went on with something else"):
        list(first)
