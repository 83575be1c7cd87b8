"""What held for a file is taken as known while nobody changes it, and is looked for again afterwards."""

import os
import time
from pathlib import Path

import numpy as np
import pytest

from offload_decode.common.errors import IndexDamaged
from offload_decode.indexes import files, verified
from offload_decode.indexes.clusters import index
from offload_decode.indexes.clusters.index import ClusteredIndex
from offload_decode.indexes.verified import KEPT, holds


@pytest.fixture(autouse=True)
def settled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of its own, and files that need not be old."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(verified, "_SETTLED_S", -1e9)


class Asked:
    """A file, and how often it was read to see whether it says `whole`."""

    def __init__(self, file: Path):
        self.file, self.times = file, 0
        file.write_text("whole")

    def __call__(self, what: str = "whole") -> bool:
        return holds(self.file, what, self.check)

    def check(self) -> bool:
        self.times += 1
        return self.file.read_text() == "whole"


@pytest.fixture
def asked(tmp_path: Path) -> Asked:
    return Asked(tmp_path / "file")


def test_it_is_read_once(asked: Asked) -> None:
    assert asked()
    assert asked()
    assert asked.times == 1
    assert asked("of another check")
    assert asked.times == 2


def test_a_link_is_the_file_that_it_leads_to(asked: Asked, tmp_path: Path) -> None:
    asked()
    (tmp_path / "link").symlink_to(asked.file)
    assert holds(tmp_path / "link", "whole", asked.check)
    assert asked.times == 1


def test_what_is_done_anew_is_known_from_then_on(asked: Asked) -> None:
    for times in (1, 2):
        assert holds(asked.file, "whole", asked.check, anew=True)
        assert asked.times == times
    assert asked()
    assert asked.times == 2


def test_what_was_wrong_is_read_again(asked: Asked) -> None:
    asked.file.write_text("wrong")
    assert not asked()
    assert not asked()
    assert asked.times == 2


@pytest.mark.parametrize("how", ["written", "replaced", "cut and filled", "renamed over"])
def test_a_file_that_changed_is_read_again_even_with_its_old_size_and_time(asked: Asked, how: str) -> None:
    assert asked()
    seen = asked.file.stat()
    time.sleep(0.02)  # a tick of the file system's clock
    if how == "written":
        with open(asked.file, "r+") as file:
            file.write("w")
    elif how == "replaced":
        asked.file.rename(asked.file.with_name("old"))
        asked.file.write_text("whole")
    elif how == "cut and filled":
        os.truncate(asked.file, 0)
        asked.file.write_text("whole")
    else:
        other = asked.file.with_name("other")
        other.write_text("whole")
        os.utime(other, ns=(seen.st_atime_ns, seen.st_mtime_ns))
        other.rename(asked.file)
    os.utime(asked.file, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    now = asked.file.stat()
    assert (now.st_size, now.st_mtime_ns) == (seen.st_size, seen.st_mtime_ns)
    assert asked()
    assert asked.times == 2


def test_a_file_that_changes_while_it_is_read_is_not_known(asked: Asked) -> None:
    def check() -> bool:
        right = asked.check()
        with open(asked.file, "a") as file:
            file.write("more")
        return right

    assert holds(asked.file, "whole", check)
    assert not asked()


def test_a_file_of_just_now_is_read_again(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verified, "_SETTLED_S", 2.0)
    assert asked()
    assert asked()
    assert asked.times == 2


@pytest.mark.parametrize("cache", ["a file", "binary", "gone"])
def test_a_cache_that_cannot_be_read_or_written_is_done_without(asked: Asked, cache: str) -> None:
    folder = verified.cache_folder()
    if cache == "a file":
        folder.parent.write_text("where a folder should be")
    else:
        assert asked()
        (known,) = (folder / "verified").iterdir()
        known.write_bytes(b"\xff\0") if cache == "binary" else known.unlink()
    assert asked()
    assert asked.times == (1 if cache == "a file" else 2)


def test_what_is_known_is_bounded(asked: Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(KEPT + 3):
        (tmp_path / str(number)).mkdir()
        Asked(tmp_path / str(number) / "file")()
    known = verified.cache_folder() / "verified"
    assert len(list(known.iterdir())) == KEPT
    monkeypatch.setattr(verified, "_MOST", 200)
    for number in range(20):
        assert asked(str(number))
    assert max(file.stat().st_size for file in known.iterdir()) <= 200
    asked("19")
    assert asked.times == 20


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, np.ndarray]:
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((600, 16), np.float32)
    ClusteredIndex.build(keys, rng.standard_normal((64, 16), np.float32), digest="d", k=4).save(
        tmp_path / "i"
    )
    return tmp_path / "i", keys


def damage(file: Path) -> None:
    whole = bytearray(file.read_bytes())
    whole[len(whole) // 2] ^= 1
    file.write_bytes(whole)


def test_an_index_is_read_whole_and_checked_once(
    saved: tuple[Path, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, keys = saved
    done: list[str] = []
    for module, name in ((files, "_file_sha256"), (index, "check")):
        real = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *given, real=real, name=name: (done.append(name), real(*given))[1]
        )
    first, second = (ClusteredIndex.load(path, keys, digest="d") for _ in range(2))
    assert done == ["_file_sha256", "check"]
    query = np.ones((1, 16), np.float32)
    np.testing.assert_array_equal(first.search(query, 5).ids, second.search(query, 5).ids)
    identity = files.identity("clusters", keys, "d")
    files.load(path, identity, ".cells", anew=True)
    assert done[2:] == ["_file_sha256"]

    native = path.with_name("i.cells")
    damage(native)
    for anew in (True, False):
        with pytest.raises(IndexDamaged, match="not those that were written"):
            files.load(path, identity, ".cells", anew)


def test_who_reads_all_relies_on_nothing_that_is_known(
    saved: tuple[Path, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a disk might lose a bit without a write."""
    path, keys = saved
    native = path.with_name("i.cells")
    seen = verified.identity(native)
    monkeypatch.setattr(verified, "identity", lambda _: seen)
    identity = files.identity("clusters", keys, "d")
    files.load(path, identity, ".cells")
    damage(native)
    files.load(path, identity, ".cells")
    with pytest.raises(IndexDamaged, match="not those that were written"):
        files.load(path, identity, ".cells", anew=True)


def test_a_file_from_the_future_is_known_by_its_last_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else every command would read it anew, until then."""
    file, now = tmp_path / "file", time.time()
    file.write_bytes(b"bytes")
    os.utime(file, (now, now + 36_000))
    monkeypatch.setattr(verified, "_SETTLED_S", 2.0)
    for later, known in ((0, False), (10, True)):
        monkeypatch.setattr(verified.time, "time", lambda later=later: now + later)
        seen = verified.identity(file)
        assert seen is not None
        assert verified.settled(seen) == known
