"""A check runs among the answers of others, within the limits of its request; what has ended and is not told
yet counts in them too.
"""

import queue
import threading
import time

import pytest

from offload_decode.common.errors import DoesNotFit
from offload_decode.engine.engine import Engine
from offload_decode.engine.second_pass import SecondPass
from offload_decode.server.requests import Delta, Ended, TimedOut, TooLarge, WrongField
from offload_decode.server.sequences import RunningRequest
from offload_decode.server.service import SearchRequest
from tests.server.conftest import Listener, ask
from tests.server.test_catalog import until


@pytest.fixture
def endless(monkeypatch):
    """Checks come to no end, and each pass of them takes a token."""
    monkeypatch.setattr(SecondPass, "left", 5)
    monkeypatch.setattr(SecondPass, "next", lambda own, most: ([97], False))
    monkeypatch.setattr(SecondPass, "take", lambda own, logits: None)


def checking(service, **more):
    """Who hears of a request that is being checked, and the request."""
    listener = ask(service, tokens=2, check=True, **more)
    listener.until(Ended)
    until(lambda: any(one.checking for one in service.scheduler._running))
    (running,) = service.scheduler._running
    return listener, running


@pytest.mark.parametrize("tokens", [1, 20])
def test_an_answer_is_checked_as_that_of_an_engine(service, shelf, tokens):
    engine = Engine.open(shelf / "stores" / "book.kv", options={"budget": "24"})
    expected = engine.answer("Why is it so?", tokens, check=True).checked
    assert expected.tokens == tokens
    for more in ({}, {"cite": True}):
        found = ask(service, question="Why is it so?", tokens=tokens, check=True, **more).all().done.checked
        assert (found.tokens, found.same) == (expected.tokens, expected.same)
        assert found.difference == pytest.approx(expected.difference, abs=1e-4)


def test_who_does_not_ask_for_a_check_gets_none_and_several_answers_are_refused(service):
    assert ask(service, tokens=2).all().done.checked is None
    for more in ({"n": 2}, {"together": ("book", "notes")}):
        with pytest.raises(WrongField, match="check"):
            ask(service, check=True, **more)


def test_a_model_without_a_store_has_nothing_to_check(service):
    done = ask(service, "model", tokens=2, check=True).all().done
    assert (done.checked, done.notes) == (None, ("it was not checked: nothing is stored",))


def test_an_answer_as_long_as_there_is_room_leaves_some_for_its_check(serve):
    service = serve(running_bytes=1 << 18)
    listener = ask(service, tokens=-1, check=True)  # else: too large
    listener.until(Delta)
    (running,) = service.scheduler._running
    assert 2 * running.bytes > service.settings.running_bytes / 2, "memory is what cuts it"
    listener.ticket.cancel()


def test_a_check_is_no_part_of_what_the_answer_cost(service):
    plain = ask(service, tokens=4).all().done
    service.prefix_cache.drop(model="book")
    checked = ask(service, tokens=4, check=True).all().done
    assert checked.checked is not None
    assert checked.stats.by_layer == plain.stats.by_layer


def test_others_are_answered_while_an_answer_is_checked(service, endless):
    checked, running = checking(service)
    assert ask(service, "notes").all().error is None
    assert running in service.scheduler._running
    checked.ticket.cancel()
    until(lambda: not service.scheduler._running)
    with pytest.raises(queue.Empty):
        checked.events.get(timeout=0.3)


def test_a_check_ends_at_the_deadline_and_the_answer_is_given(service, endless):
    listener, running = checking(service, deadline_s=1000)
    running.deadline = running.submitted + 0.001
    heard = listener.all()
    assert heard.error is None
    assert (heard.done.checked, heard.done.notes) == (
        None,
        ("it was not checked: the limit of 0.001 seconds was reached",),
    )


def test_a_check_has_no_more_than_the_grace_period_when_the_server_stops(serve, endless):
    service = serve()
    listener, _ = checking(service)
    service.scheduler.close(grace_s=0.1)
    (note,) = listener.all().done.notes
    assert note.startswith("it was not checked: the server is being stopped")


@pytest.mark.parametrize(
    ("place", "error"),
    [
        ("begin", DoesNotFit("there is no room")),
        ("run", DoesNotFit("there is no room")),
        ("run", MemoryError()),
    ],
)
def test_an_answer_that_cannot_be_checked_is_given_all_the_same(service, monkeypatch, error, place):
    def full(*_, **__):
        raise error

    if place == "run":
        monkeypatch.setattr(SecondPass, "take", full)
    else:
        begin = SecondPass.__init__

        def begun(own, *given):
            begin(own, *given)
            own.conversation.admit = full

        monkeypatch.setattr(SecondPass, "__init__", begun)
    done = ask(service, tokens=2, check=True).all().done
    assert done.usage.completion == 2
    reason = str(error) or "something went wrong; the server's log says what"
    assert (done.checked, done.notes) == (None, (f"it was not checked: {reason}",))


def test_a_check_counts_as_memory(serve, monkeypatch):
    made, begin = [], RunningRequest.__init__
    with monkeypatch.context() as seen:
        seen.setattr(RunningRequest, "__init__", lambda one, *given: made.append(one) or begin(one, *given))
        ask(serve(), tokens=50).all()
    service = serve(running_bytes=made[0].bytes)
    with pytest.raises(TooLarge, match="more memory than there is"):
        ask(service, tokens=50, check=True)
    assert ask(service, tokens=50).all().error is None


def test_an_answer_whose_citations_are_not_found_yet_has_its_place(serve, monkeypatch):
    service, may = serve(max_running=1), threading.Event()
    service.scheduler._citing.submit(may.wait)
    first = ask(service, tokens=2, cite=True)
    until(lambda: service.scheduler._ended)
    second, steps, step = ask(service, tokens=2), [], service.scheduler._step
    monkeypatch.setattr(service.scheduler, "_step", lambda: steps.append(0) or step())
    time.sleep(0.5)
    assert [len(one) for one in (service.scheduler._running, service.scheduler._waiting)] == [0, 1]
    assert len(steps) < 20, "it is not waited for in a loop that keeps a core"
    may.set()
    assert first.all().done.citations is not None
    assert second.all().error is None


@pytest.mark.parametrize("over", ["time", "server"])
def test_citations_are_not_looked_for_when_the_time_is_over(serve, over):
    service, may = serve(), threading.Event()
    service.scheduler._citing.submit(may.wait)
    listener = ask(service, tokens=2, cite=True, deadline_s=1000)
    until(lambda: service.scheduler._ended)
    if over == "time":
        service.scheduler._ended[0].deadline = 0.0
    else:
        service.scheduler._stopped = True
    may.set()
    done = listener.all().done
    assert (done.usage.completion, done.citations) == (2, None)
    reason = "the limit of" if over == "time" else "the server is being stopped"
    assert done.notes[0].startswith(f"what it attended to is not told: {reason}")


def test_a_server_that_stops_waits_for_citations_within_its_grace_period(serve):
    service, may = serve(), threading.Event()
    service.scheduler._citing.submit(may.wait)
    listener = ask(service, tokens=2, cite=True)
    until(lambda: service.scheduler._ended)
    threading.Timer(0.5, may.set).start()
    service.scheduler.close(grace_s=60)
    assert listener.all().done.citations


def test_passages_are_all_that_a_search_is_for(serve):
    service, may = serve(), threading.Event()
    service.scheduler._citing.submit(may.wait)
    listener = Listener()
    service.search(SearchRequest("id", "book", question="Why is it so?", most=4, deadline_s=1000), listener)
    until(lambda: service.scheduler._ended)
    service.scheduler._ended[0].deadline = 0.0
    may.set()
    assert isinstance(listener.all().error, TimedOut)
