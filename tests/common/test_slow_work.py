"""Slow work says how far it is, and work that is quick says nothing."""

import logging
import time

import pytest

from offload_decode.common import slow_work
from offload_decode.common.slow_work import SlowWork, at_work
from offload_decode.models.fingerprints import weights_hash
from tests.tiny import text_model


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> list[float]:
    """The time, for tests to set."""
    caplog.set_level(logging.INFO, slow_work.__name__)
    now = [0.0]
    monkeypatch.setattr(slow_work.time, "monotonic", lambda: now[0])
    return now


def test_lines_are_due_after_two_seconds_and_then_every_five(
    clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    work = SlowWork("hashing", 8_000_000_000)
    for clock[0] in (1.0, 2.0, 3.0, 6.0, 7.0, 8.0):
        work.add(1_000_000_000)
    assert caplog.messages == [
        "hashing: 2.0 of 8.0 GB, about 6 s left",
        "hashing: 5.0 of 8.0 GB, about 4 s left",
    ]


def test_nothing_is_said_of_what_is_over(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    work = SlowWork("hashing", 10)
    clock[0] = 60.0
    work.add(10)
    assert caplog.messages == []


def test_hashing_weights_counts_every_byte(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(slow_work, "FIRST_S", 0.0)
    monkeypatch.setattr(slow_work, "EVERY_S", 0.0)
    caplog.set_level(logging.INFO, slow_work.__name__)
    model = text_model()
    weights_hash(model)
    assert all(text.startswith("hashing the weights, once on this machine: ") for text in caplog.messages)
    places = {weight.data_ptr() for weight in model.state_dict().values()}
    assert len(caplog.messages) == len(places) - 1, "the last one is not said"


def test_work_without_a_count_says_how_long_it_has_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, slow_work.__name__)
    with at_work("reading"):
        pass
    assert caplog.messages == [], "it was quick"
    monkeypatch.setattr(slow_work, "FIRST_S", 0.01)
    with at_work("reading"):
        while not caplog.messages:
            time.sleep(0.01)
    assert caplog.messages == ["reading: 0 s so far"]
