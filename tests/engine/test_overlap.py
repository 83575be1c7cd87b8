"""A query goes to the host before its layer attends to generated tokens, and is searched for after that."""

import threading
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from offload_decode.attention.queries import HostCopy, Queries
from offload_decode.engine import step as prefix
from offload_decode.engine.engine import Engine
from offload_decode.hf import attention
from offload_decode.models.loading import wrap
from tests.tiny import tiny_model, token_store


@pytest.fixture
def engine(tmp_path):
    served = wrap(tiny_model("llama", num_hidden_layers=2))
    return Engine.open(token_store(tmp_path / "store", served, range(3, 63)), served, options={"budget": 7})


@pytest.fixture
def events(monkeypatch):
    """What the seam does, in order, with copies as a device would make them."""
    log = []

    @dataclass(frozen=True)
    class Copy:
        parts: tuple[Tensor]

        def wait(self):
            log.append("searched")
            return self.parts

    def sent(queries):
        log.append("sent")
        return replace(queries, copy=Copy((queries.vectors.clone(),)))

    attend_dense = attention.attend_dense

    def generated(*arguments):
        log.append("generated")
        return attend_dense(*arguments)

    monkeypatch.setattr(Queries, "sent", sent)
    monkeypatch.setattr(attention, "attend_dense", generated)
    return log


def test_a_query_is_sent_before_generated_tokens_and_searched_for_after_it(engine, events):
    engine.extend([5])
    assert events == ["sent", "generated", "searched"] * 2


@pytest.mark.parametrize("tokens", [[5], [5, 6, 7, 8]])
@pytest.mark.parametrize("parts", [False, True])
def test_a_query_that_was_sent_finds_the_very_same(engine, request, monkeypatch, tokens, parts):
    if parts:
        monkeypatch.setattr(prefix, "SELECTED_IDS", 20)
    expected = engine.fork().extend(tokens)
    events = request.getfixturevalue("events")
    assert torch.equal(engine.extend(tokens), expected)
    # A long question is searched for part by part, each in its own rows of the one copy.
    assert events.count("sent") == 2
    assert (events.count("searched") > 2) == (parts and len(tokens) > 1)


def test_a_search_that_fails_says_so_and_leaves_nothing_running(engine, monkeypatch):
    expected, threads = engine.fork().extend([5]), threading.active_count()

    def failing(*_):
        raise MemoryError("no room for the search")

    monkeypatch.setattr(engine.selector, "choose", failing)
    with pytest.raises(MemoryError, match="no room for the search"):
        engine.extend([5])
    monkeypatch.undo()
    assert threading.active_count() == threads
    assert torch.equal(engine.extend([5]), expected)


def test_on_a_host_there_is_nothing_to_send():
    queries = Queries(torch.randn(2, 4, 8), 0.3)
    assert queries.sent() is queries
    assert queries.on_host() is queries.vectors


@pytest.mark.gpu
def test_a_copy_does_not_wait_for_what_the_device_is_given_later():
    queries = Queries(torch.randn(2, 4, 8, device="cuda"), 0.3, group=2, tokens=2)
    torch.cuda.synchronize()
    sent = queries.sent()
    assert isinstance(sent.copy, HostCopy)
    torch.cuda._sleep(1 << 30)
    rows = sent.on_host()
    assert not torch.cuda.current_stream().query()
    assert rows.is_pinned()
    assert torch.equal(rows, queries.vectors.cpu())
    assert torch.equal(sent.part(1, 3).on_host(), queries.vectors[:, 1:3].cpu())
