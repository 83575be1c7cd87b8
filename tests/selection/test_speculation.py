"""Searching ahead with the previous token's query: what is taken over, what is corrected, and when."""

from __future__ import annotations

import threading
from typing import ClassVar

import numpy as np
import pytest
import torch

from indexes.base import Hits
from offload_decode.attention.queries import Queries
from offload_decode.engine import step as prefix
from offload_decode.engine.engine import Engine
from offload_decode.errors import ConfigError
from offload_decode.kv.host import HostKV
from offload_decode.models.loading import wrap
from offload_decode.selection.speculation import Speculation
from offload_decode.selectors.registry import create
from offload_decode.testing.selector_contract import LAYER, SelectorContract
from offload_decode.testing.stores import stored
from offload_decode.types import Document
from prefill_jobs.job import prefill_tokens
from tests.tiny import tiny_model

N, K = 60, 7


class TestSpeculatingTopK(SelectorContract):
    name = "topk"
    options: ClassVar[dict[str, object]] = {"speculate": "true"}

    @pytest.fixture(scope="class", params=[(37, 1, 1), (50, 4, 2), (130, 8, 2, "int8")], ids=str)
    @classmethod
    def store(cls, request, tmp_path_factory):
        return stored(tmp_path_factory.mktemp("store"), *request.param)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return stored(tmp_path_factory.mktemp("store"), N, 4, 2)


def topk(store, **options):
    host = HostKV(store, torch.device("cpu"))
    return create("topk", {"budget": K, **options}, host, store.manifest.shape)


def step(*directions, near=None, by=0.0):
    """Queries of one token `[2, 2, 16]`, each KV head's drawn by a seed; or `near` others, off `by` that."""
    rows = torch.stack(
        [torch.randn(2, 16, generator=torch.Generator().manual_seed(one)) for one in directions]
    )
    return Queries(rows if near is None else near.rows + by * rows, scaling=0.3, group=2)


def test_a_head_takes_over_what_the_query_before_found_until_it_turns_away(store):
    held, exact = topk(store, speculate="true"), topk(store)
    first, second = step(1, 2), step(3, 4)
    mixed = Queries(torch.stack([first.rows[0] * 2, second.rows[1]]), scaling=0.3, group=2)

    def found(queries):
        return exact.select(LAYER, queries).ids

    assert torch.equal(held.select(LAYER, first).ids, found(first))
    fork, again = held.fork(), Queries(first.rows.clone(), scaling=0.3, group=2)
    chosen = held.select(LAYER, mixed)  # head 0 asks on in one direction, head 1 in another
    assert torch.equal(chosen.ids, found(mixed))
    assert chosen.scores is None
    assert held.selector.speculation.counts == {"heads": 2, "corrected": 1}
    first.rows.neg_()  # the model's memory, which it may use again
    assert torch.equal(fork.select(LAYER, again).ids, found(again))
    assert held.selector.speculation.counts == {"heads": 4, "corrected": 1}

    following = step(5, 6, near=mixed, by=0.1)
    chosen = held.select(LAYER, following)
    assert torch.equal(chosen.ids, found(mixed))
    assert not torch.equal(chosen.ids, found(following))
    chosen = held.select(LAYER, step(7, 8))
    assert torch.equal(chosen.ids, found(step(7, 8)))
    torch.testing.assert_close(chosen.scores, exact.select(LAYER, step(7, 8)).scores)
    assert held.selector.speculation.counts == {"heads": 8, "corrected": 3}


def test_the_similarity_is_the_mean_cosine_of_a_group(store):
    first = step(1, 2)
    second = step(3, 4, near=first, by=0.8)
    cosine = torch.nn.functional.cosine_similarity(first.rows, second.rows, dim=-1).mean(-1)
    low, high = cosine.sort().values.tolist()
    for threshold, corrected in ((low - 1e-3, 0), ((low + high) / 2, 1), (high + 1e-3, 2)):
        held = topk(store, speculate="true", similarity=threshold)
        held.select(LAYER, first)
        held.select(LAYER, second)
        assert held.selector.speculation.counts["corrected"] == corrected


@pytest.mark.parametrize("other", ["question", "batch", "new question"])
def test_only_a_token_after_a_token_takes_over(store, other):
    """A question of several tokens, several sequences: all are searched for, and nothing is left."""
    held, exact = topk(store, speculate="true", similarity=-1), topk(store)
    first, last = step(1, 2), step(3, 4)
    held.select(LAYER, first)
    if other == "new question":
        held.selector.reset()
    else:
        rows = torch.cat([step(5, 6).rows, step(7, 8).rows], dim=1)
        between = Queries(rows, scaling=0.3, group=2, tokens=2 if other == "question" else 1)
        assert torch.equal(held.select(LAYER, between).ids, exact.select(LAYER, between).ids)
    assert torch.equal(held.select(LAYER, last).ids, exact.select(LAYER, last).ids)
    assert not held.selector.speculation.counts


def test_a_fork_goes_its_own_way(store):
    held = topk(store, speculate="true", similarity=-1)
    first, second, third = step(1, 2), step(3, 4), step(5, 6)
    held.select(LAYER, first)
    fork, fresh = held.fork(), held.fork()
    fresh.selector.reset()
    before = held.select(LAYER, second).ids
    assert torch.equal(fork.select(LAYER, third).ids, before)  # both take over what the first query found
    assert not torch.equal(fork.select(LAYER, first).ids, held.select(LAYER, first).ids)
    assert not torch.equal(fresh.select(LAYER, third).ids, before)


def test_the_search_ahead_runs_behind_the_step():
    """The step returns while it runs, and the next one waits for it; only heads that took over need one."""
    running, go_on, calls = threading.Event(), threading.Event(), []

    def search(layer, heads, rows, k):
        calls.append((list(heads), threading.current_thread() is threading.main_thread()))
        if not calls[-1][1]:
            running.set()
            assert go_on.wait(10)
        ids = np.broadcast_to(np.arange(k) + 10 * len(calls), (*rows.shape[:2], k)).copy()
        return Hits(ids, np.zeros(ids.shape, np.float32))

    ahead, rows = Speculation(search, 0.9), np.eye(2, dtype=np.float32)[:, None]
    ahead.step(0, rows, 3)
    ahead.step(0, np.stack([rows[0], -rows[1]]), 3)
    assert running.wait(10)
    assert calls == [([0, 1], True), ([1], True), ([0], False)]
    go_on.set()
    ids, scores = ahead.step(0, np.stack([rows[0], -rows[1]]), 3)
    assert ids[:, 0, 0].tolist() == [30, 20]
    assert scores is None


def test_what_fails_ahead_fails_in_the_open():
    """The step after searches again; if that fails too, it says so, and the conversation can go on."""
    failing = [True]

    def search(layer, heads, rows, k):
        if failing[0] and calls:
            raise MemoryError("no room")
        calls.append(heads)
        return Hits(np.zeros((*rows.shape[:2], k), np.int64), np.zeros((*rows.shape[:2], k), np.float32))

    calls = []
    ahead, rows = Speculation(search, 0.9), np.ones((1, 1, 4), np.float32)
    ahead.step(0, rows, 1)
    ahead.step(0, rows, 1)  # takes over, and what it begins fails
    twin = ahead.fork()
    with pytest.raises(MemoryError, match="no room"):
        ahead.step(0, rows, 1)
    failing[0] = False
    ids, scores = twin.step(0, rows, 1)
    assert ids.shape == (1, 1, 1)
    assert scores is not None


def test_what_cannot_be_is_refused(store):
    for wrong in (-1.5, 2):
        with pytest.raises(ConfigError, match="between -1 and 1"):
            topk(store, speculate="true", similarity=wrong)
    with pytest.raises(ConfigError, match="without mass="):
        topk(store, speculate="true", budget="mass=0.9")


@pytest.fixture
def engine(tmp_path):
    served = wrap(tiny_model("llama"))
    tokens = np.arange(3, 3 + N, dtype=np.int32)
    prefill_tokens(served, tokens, [Document("all", 0, N)], tmp_path / "store")

    def opened(**options):
        return Engine.open(tmp_path / "store", served, options={"budget": K, **options})

    return opened


def extend(engine, tokens):
    """Logits after each of `tokens`, one by one."""
    return torch.stack([engine.extend([token]) for token in tokens])


def test_a_conversation_of_the_engine(engine):
    tokens = [5, 9, 9, 9, 4]
    exact = extend(engine(), tokens)
    corrected = extend(engine(speculate="true", similarity=1), tokens)
    torch.testing.assert_close(corrected[:2], exact[:2], atol=1e-5, rtol=0)
    speculating = engine(speculate="true", similarity=-1)
    assert (extend(speculating, tokens) - exact).abs().max() > 1e-3
    speculating.crop(N)
    torch.testing.assert_close(extend(speculating, tokens[:1]), exact[:1], atol=1e-5, rtol=0)
    speculating.extend([5, 6])
    with pytest.raises(ConfigError, match="fork the engine"):
        speculating.crop(N + 1)


def test_a_budget_of_everything_is_dense_at_every_step(engine):
    tokens = [5, 9, 9, 4]
    everything = extend(engine(budget="100%", speculate="true", similarity=-1), tokens)
    torch.testing.assert_close(everything, extend(engine(budget="100%"), tokens), atol=1e-5, rtol=0)


def test_a_question_in_parts_is_searched_for_as_a_whole(engine, monkeypatch):
    """Of 2 KV heads with 2 query heads each: parts of 5 rows and one of a single row, before a step."""
    monkeypatch.setattr(prefix, "SELECTED_IDS", 5 * K * 2)
    opened, exact = engine(speculate="true", similarity=-1), engine()
    for one in (opened, exact):
        one.extend([5, 6, 7, 8, 9, 10, 11, 12])
    torch.testing.assert_close(opened.extend([4]), exact.extend([4]), atol=1e-5, rtol=0)
    assert not opened.selector.speculation.counts


@pytest.mark.parametrize("fails_at", [0, 1])
def test_an_interrupted_step_is_taken_back(engine, monkeypatch, fails_at):
    opened = engine(speculate="true", similarity=0.2)
    extend(opened, [5, 9])
    expected = extend(opened.fork(), [9, 4])
    attend, calls = opened.prefix.host.attend, []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) > fails_at:
            raise KeyboardInterrupt
        return attend(*arguments)

    monkeypatch.setattr(opened.prefix.host, "attend", interrupted)
    with pytest.raises(KeyboardInterrupt):
        opened.extend([4])
    monkeypatch.undo()
    torch.testing.assert_close(extend(opened, [9, 4]), expected, atol=1e-6, rtol=0)
