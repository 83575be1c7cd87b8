import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from offload_decode.server import loaded_models
from offload_decode.server.loaded_models import Releases
from offload_decode.server.requests import Loading
from tests.server.test_catalog import until


def test_a_store_is_released_when_nothing_uses_it():
    answered, closed = {"book", "other"}, []
    own = Releases(answered.__contains__, closed.append)
    inside, leave = threading.Event(), threading.Event()

    def release() -> None:
        with own.released("book"):
            inside.set()
            leave.wait(60)

    with own.asking("book"):
        thread = threading.Thread(target=release)
        thread.start()
        answered.discard("book")
        time.sleep(0.1)
        assert not inside.is_set()
    assert inside.wait(60)
    assert closed == ["book"]
    with pytest.raises(Loading), own.asking("book"):
        pass
    with own.asking("other"):
        pass
    leave.set()
    thread.join()
    with own.asking("book"):
        pass


def test_nothing_is_kept_of_names_that_were_asked_for():
    own = Releases(set().__contains__, [].append)
    for number in range(9):
        with own.asking(f"name {number}"):
            assert len(own._beginning) == 1
    assert not own._beginning


def test_who_asks_is_not_kept_waiting_for_long_answers_at_first(monkeypatch):
    monkeypatch.setattr(loaded_models, "PATIENCE_S", 0.2)
    answered, done = {"book"}, threading.Event()
    own = Releases(answered.__contains__, [].append)

    def release() -> None:
        with own.released("book"):
            done.set()

    thread = threading.Thread(target=release)
    thread.start()
    with own.asking("book"):  # nobody is refused while there is hope for a quiet moment
        pass

    def refused() -> bool:
        try:
            with own.asking("book"):
                return False
        except Loading:
            return True

    until(refused)
    assert not done.is_set()
    answered.clear()
    thread.join()
    assert done.is_set()
    assert not refused()


def test_a_store_is_released_to_one_at_a_time():
    own = Releases(set().__contains__, [].append)
    inside: list[int] = []
    most: list[int] = []

    def release(number: int) -> None:
        with own.released("book"):
            inside.append(number)
            most.append(len(inside))
            time.sleep(0.01)
            inside.remove(number)

    with ThreadPoolExecutor(5) as pool:
        list(pool.map(release, range(5)))
    assert most == [1] * 5
