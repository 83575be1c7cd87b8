"""The passages that a question attends to: beside other requests as alone, and what is refused."""

import pytest

from offload_decode.common.errors import ConfigError, ContextEnds
from offload_decode.engine.engine import Engine
from offload_decode.server.requests import TooLarge
from offload_decode.server.service import SearchRequest
from tests.server.conftest import Listener, ask

QUESTIONS = ("What is the colour of thing 3?", "Which number is that of thing 11, and which is that of 7?")


def search(service, question, model="book", most=4):
    listener = Listener()
    service.search(SearchRequest("id", model, question=question, most=most), listener)
    return listener


def test_passages_are_those_of_the_engine_whatever_else_runs(service, shelf):
    engine = Engine.open(shelf / "stores" / "book.kv", options={"budget": "24"})
    others = [ask(service, "notes", tokens=20), ask(service, tokens=20)]
    heard = [search(service, question) for question in QUESTIONS * 2]
    for question, one in zip(QUESTIONS * 2, heard, strict=True):
        found, told = engine.passages(question, 4), one.all()
        assert found
        assert told.done is not None, told.error
        assert told.text == ""
        assert [(p.start, p.end, p.document) for p in told.done.passages] == [
            (p.start, p.end, p.document) for p in found
        ]
        scores = [p.score for p in told.done.passages]
        assert scores == pytest.approx([p.score for p in found], abs=1e-4)
    assert all(one.all().done for one in others)


def test_a_question_that_was_asked_before_is_run_again(service):
    ask(service, question=QUESTIONS[0]).all()
    first, second = (search(service, QUESTIONS[0]).all().done.passages for _ in range(2))
    assert first
    assert first == second


def test_what_cannot_be_searched_is_refused(serve):
    service = serve(max_prompt=64)
    bare = next(entry.name for entry in service.catalog.entries() if entry.path is None)
    with pytest.raises(ConfigError, match="no corpus to search"):
        search(service, "Who?", bare)
    with pytest.raises(TooLarge, match="characters"):
        search(service, "x" * 2000)
    with pytest.raises(TooLarge, match="tokens"):
        search(service, "x" * 500)


def test_a_question_beyond_the_context_is_refused(service, monkeypatch):
    target = service.loaded_models.get(service.catalog.entry("book"))
    monkeypatch.setattr(type(target.start), "context", target.start.length + 5)
    with pytest.raises(ContextEnds):
        search(service, QUESTIONS[0])
