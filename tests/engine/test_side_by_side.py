"""Conversations with several stores that are searched in one compiled call are each as on their own."""

import numpy as np
import pytest
import torch

from offload_decode.common.rows import threads
from offload_decode.engine.batching import Turn, run_turns
from offload_decode.engine.conversation import Conversation
from offload_decode.engine.engine import Engine
from offload_decode.engine.step import StoredPrefix
from offload_decode.prefill_jobs.indexing import build_indexes
from offload_decode.selectors import one_pass
from offload_decode.selectors.one_pass import OnePass
from tests.tiny import random_ids, served_model, token_store

STORED = 1400, 2100, 900
COUNTED = "selected", "rows", "bytes_moved", "by_layer", "attended"


@pytest.fixture(autouse=True)
def _two_threads(monkeypatch):
    """Rows that are read twice, by two tasks, count twice."""
    monkeypatch.setattr(threads, "THREADS", 2)


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """Opens one of three stores of a model, with clusters; all share its weights."""
    folder, loaded = tmp_path_factory.mktemp("beside"), served_model("llama", num_hidden_layers=2)
    stores = [token_store(folder / str(own), loaded, random_ids(own, own)) for own in STORED]
    for path in stores:
        build_indexes(path, "clusters", k=16, recall=0.5)

    def opened(which, **options):
        return Engine.open(stores[which], loaded, options={"budget": "20"} | options)

    return opened


@pytest.fixture
def calls(monkeypatch):
    """How many stores each compiled call was of."""
    counted, called = [], one_pass._called
    monkeypatch.setattr(one_pass, "_called", lambda given: counted.append(len(given)) or called(given))
    return counted


def step(talks, tokens=(7,)):
    """Logits after a pass of all, and what it cost each."""
    for talk in talks:
        talk.prefix.take_stats()
    logits = run_turns([Turn(talk, list(tokens)) for talk in talks])
    return logits, [talk.prefix.take_stats() for talk in talks]


@pytest.mark.parametrize("tokens", [(7,), (7, 8, 9)])
def test_a_layer_of_all_stores_is_one_call_and_each_is_as_alone(opened, calls, tokens):
    talks = [opened(which).fork() for which in (0, 1, 2)]
    alone = [talk.fork() for talk in talks]
    for _ in range(3):
        expected = [step([own], tokens) for own in alone]
        calls.clear()
        logits, costs = step(talks, tokens)
        assert calls == [3] * len(talks[0].loaded.shape.full_layers)
        for one, cost, ((other,), (own,)) in zip(logits, costs, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
            for name in COUNTED:
                assert getattr(cost, name) == getattr(own, name), name
            assert cost.search_s > 0


def test_other_budgets_and_softcaps_make_calls_of_their_own(opened, calls):
    talks = [opened(0).fork(), opened(1).fork(), opened(2, budget="30").fork(), opened(1, tail="off").fork()]
    expected = [step([talk.fork()])[0][0] for talk in talks]
    calls.clear()
    logits, _ = step(talks)
    layers = len(talks[0].loaded.shape.full_layers)
    assert sorted(calls) == [1] * 2 * layers + [2] * layers
    for one, other in zip(logits, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_whom_a_call_does_not_serve_is_searched_the_long_way_alone(opened, calls, monkeypatch):
    talks = [opened(which).fork() for which in (0, 1, 2)]
    expected = [step([talk.fork()])[0][0] for talk in talks]
    broken, attend = talks[1].prefix.host, one_pass._called
    keys = broken.layer_keys(0).compiled

    def called(given):
        return [] if any(own.keys is keys for own, _ in given) else attend(given)

    selected, select = [], StoredPrefix._attend_selected
    monkeypatch.setattr(one_pass, "_called", called)
    monkeypatch.setattr(
        StoredPrefix, "_attend_selected", lambda own, *given: selected.append(own.host) or select(own, *given)
    )
    logits, _ = step(talks)
    assert selected == [broken]  # in the one layer of these keys
    for one, other in zip(logits, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_each_is_watched_by_its_own(opened):
    talks, found = [opened(which).fork() for which in (0, 1, 2)], []
    for together in (False, True):
        forks = [talk.fork() for talk in talks]
        watches = []
        for fork in forks:
            watched = fork.watched()
            watches.append((watched, watched.__enter__()))
        if together:
            step(forks)
        else:
            for fork in forks:
                step([fork])
        found.append([watch.mass for _, watch in watches])
        for watched, _ in watches:
            watched.__exit__(None, None, None)
    for alone, beside in zip(*found, strict=True):
        np.testing.assert_allclose(alone, beside, atol=1e-5)


def test_others_in_the_same_pass_are_attended_to_as_before(opened, calls):
    """Dense attention makes no such call; those that do stand beside each other all the same."""
    dense = Conversation(
        opened(0).loaded,
        opened(0).store,
        StoredPrefix.over(opened(0).prefix.host, opened(0).loaded.shape, "dense", {}),
    )
    talks = [opened(1).fork(), dense, opened(2).fork()]
    expected = [step([talk.fork()])[0][0] for talk in talks]
    calls.clear()
    logits, _ = step(talks)
    assert set(calls) == {2}
    for one, other in zip(logits, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_forks_share_what_a_layer_has_ready(opened):
    talk = opened(0).fork()
    step([talk])
    assert isinstance(talk.prefix.one_pass, OnePass)
    assert talk.prefix.fork().one_pass._ready is talk.prefix.one_pass._ready
    assert talk.prefix.one_pass._ready
