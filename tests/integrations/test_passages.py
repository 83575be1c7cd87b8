"""Passages of stores and collections are those of their engines, best first."""

import shutil

import pytest

from offload_decode.common.errors import ConfigError
from offload_decode.engine.engine import Engine
from offload_decode.integrations.passages import PassageSearch
from offload_decode.prefill_jobs.append import append
from offload_decode.prefill_jobs.job import prefill
from tests.tiny import saved_model

QUESTION = "When does the keeper of the harbour go home?"
HOW = {"selector": "dense"}


def engine_s(store, most):
    return Engine.open(store, selector="dense").passages(QUESTION, most)


def test_one_store_is_searched_as_its_engine_does(shelf):
    found = PassageSearch(shelf / "book.kv", 3, settings=HOW).search(QUESTION)
    assert [one.passage for one in found] == list(engine_s(shelf / "book.kv", 3))
    assert {one.store for one in found} == {str(shelf / "book.kv")}


def test_passages_of_several_stores_are_ordered_by_their_scores(shelf):
    stores = [shelf / "book.kv", shelf / "notes.kv"]
    found = PassageSearch([*stores, stores[0]], 3, settings=HOW).search(QUESTION)
    each = [(one.score, str(store)) for store in stores for one in engine_s(store, 3)]
    assert [(one.passage.score, one.store) for one in found] == sorted(each, reverse=True)[:3]


def test_of_a_collection_the_documents_with_the_question_s_words_are_searched(shelf):
    search = PassageSearch(shelf / "all.collection", documents=1, settings=HOW)
    assert {one.passage.document for one in search.search(QUESTION)} == {"minutes.txt"}
    assert search.search("xyzzy") == []
    every = PassageSearch(shelf / "all.collection", 50, settings=HOW).search(QUESTION)
    assert len({one.store for one in every}) > 1


def test_what_cannot_be_searched_together_is_refused(shelf, tmp_path):
    with pytest.raises(ConfigError, match="name a store"):
        PassageSearch([])
    with pytest.raises(ConfigError, match="no setting 'k'"):
        PassageSearch(shelf / "book.kv", settings={"k": 3})
    for wrong in ({"k": 0}, {"documents": 0}):
        with pytest.raises(ConfigError, match="at least 1"):
            PassageSearch(shelf / "book.kv", **wrong)
    text, model = tmp_path / "a.txt", str(saved_model(tmp_path / "model", "gemma2"))
    text.write_text("Another model reads this.")
    prefill(str(text), model=model, out=tmp_path / "other.kv")
    with pytest.raises(ConfigError, match="several models"):
        PassageSearch([shelf / "book.kv", tmp_path / "other.kv"])


def test_a_store_that_grew_is_searched_as_it_is_now(shelf, tmp_path):
    store = shutil.copytree(shelf / "book.kv", tmp_path / "book.kv")
    search = PassageSearch(store, settings=HOW)
    assert search.search(QUESTION) == search.search(QUESTION)
    append(store, str(shelf / "texts" / "minutes.txt"))
    assert "minutes.txt" in {one.passage.document for one in search.search(QUESTION)}
