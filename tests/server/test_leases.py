"""A store is not replaced under an answer, and nothing is asked of it while it is."""

from __future__ import annotations

import threading

import pytest

from server.errors import Busy
from server.leases import Leases


def test_a_store_is_released_when_its_last_user_has_ended(monkeypatch):
    monkeypatch.setattr("server.leases._PATIENCE_S", 0.05)
    leases = Leases()
    first, second, other = leases.use("book"), leases.use("book"), leases.use("notes")
    inside, leave = threading.Event(), threading.Event()

    def replace():
        with leases.released("book"):
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=replace)
    thread.start()
    first()
    first()  # once more changes nothing
    assert not inside.wait(0.05)
    second()
    assert inside.wait(10)
    with pytest.raises(Busy, match="being replaced"):
        leases.use("book")
    leases.use("notes")()
    other()
    leave.set()
    thread.join()
    leases.use("book")()
