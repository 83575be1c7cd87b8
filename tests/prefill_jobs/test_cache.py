"""What was fetched stays within its bound: what was used longest ago leaves, and never what is in use."""

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from offload_decode.common.errors import DoesNotFit
from offload_decode.prefill_jobs.buckets.cache import Cache, Fill, name_of


def of(size: int, made: list[int] | None = None) -> Fill:
    """Makes a file of that size."""

    def fill(path: Path, admit: Callable[[int], None]) -> None:
        admit(size)
        path.write_bytes(bytes(size))
        if made is not None:
            made.append(size)

    return fill


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache", 10)


def held(cache: Cache) -> int:
    """Bytes that lie there."""
    return sum(path.stat().st_size for path in cache.folder.glob("*/content"))


def use(cache: Cache, key: str, size: int, at: float, made: list[int] | None = None) -> Path:
    """Use it at a moment."""
    with cache.holding(key, of(size, made)) as path:
        assert path.stat().st_size == size
    os.utime(path.parent / "lock", (at, at))
    return path


def test_cached_entries_are_not_fetched_again(cache: Cache) -> None:
    made: list[int] = []
    for at in range(3):
        path = use(cache, "a", 4, at, made)
    assert made == [4]
    with cache.holding("a", of(4)):
        assert (path.parent / "lock").stat().st_mtime > 3  # it is used now


def test_the_least_recently_used_entry_leaves(cache: Cache) -> None:
    first, second = use(cache, "a", 4, 1), use(cache, "b", 4, 2)
    use(cache, "a", 4, 3)
    third = use(cache, "c", 5, 4)
    assert (first.exists(), second.exists(), third.exists()) == (True, False, True)
    assert held(cache) <= cache.limit


def test_an_entry_that_never_fits_drops_no_other(cache: Cache) -> None:
    use(cache, "a", 4, 1)
    use(cache, "b", 4, 2)
    with pytest.raises(DoesNotFit, match="11 bytes"), cache.holding("c", of(11)):
        pass
    assert held(cache) == 8


def test_entries_in_use_never_leave(cache: Cache) -> None:
    with ExitStack() as stack:
        paths = [stack.enter_context(cache.holding(key, of(4))) for key in "ab"]
        with pytest.raises(DoesNotFit, match="8 bytes are in use"), cache.holding("c", of(4)):
            pass
        assert all(path.exists() for path in paths)
    with cache.holding("c", of(4)) as path:
        assert path.exists()
    with pytest.raises(DoesNotFit, match="with --cache"), cache.holding("d", of(11)):
        pass
    assert held(cache) <= cache.limit


def test_interrupted_entries_count_and_are_fetched_again(cache: Cache) -> None:
    def killed(path: Path, admit: Callable[[int], None]) -> None:
        admit(8)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), cache.holding("a", killed):
        pass
    begun = next(cache.folder.glob("*/bytes")).parent
    (cache.folder / f"{'0' * 32}.gone").mkdir()
    use(cache, "b", 4, 1)
    assert not begun.exists()  # 8 bytes and 4 are too many
    assert not list(cache.folder.glob("*.gone"))
    use(cache, "a", 8, 2)
    assert held(cache) == 8


def test_those_that_use_it_are_waited_for_with_patience(cache: Cache) -> None:
    patient, went = Cache(cache.folder, cache.limit, patience=30), threading.Event()

    def leave_late() -> None:
        with cache.holding("a", of(8)):
            went.wait()

    with ThreadPoolExecutor(1) as pool:
        leaving = pool.submit(leave_late)
        while not cache.names():
            time.sleep(0.01)
        with pytest.raises(DoesNotFit, match="in use"), cache.holding("b", of(8)):
            pass
        threading.Timer(0.3, went.set).start()
        with patient.holding("b", of(8)) as path:
            assert went.is_set()
            assert patient.names() == {path.parent.name} == {name_of("b")}
        leaving.result()
    began = time.monotonic()
    with pytest.raises(DoesNotFit, match="11 bytes"), patient.holding("c", of(11)):
        pass
    assert time.monotonic() - began < 10, "nobody is waited for where it would not help"


def test_several_at_once_share_it(cache: Cache) -> None:
    made: list[int] = []

    def ask(number: int) -> None:
        for step in range(60):
            with cache.holding("abcd"[(number + step) % 4], of(4, made)) as path:
                assert path.stat().st_size == 4

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(ask, range(2)))
    assert held(cache) <= cache.limit
