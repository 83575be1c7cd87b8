"""A remembered fingerprint is that of the files as they are, and a cache that fails costs only time."""

import errno
import os
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from offload_decode.common.errors import OffloadDecodeWarning
from offload_decode.hf import user_cache as module
from offload_decode.hf.user_cache import cached_fingerprint
from offload_decode.indexes import verified
from offload_decode.indexes.verified import KEPT


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def asked(tmp_path):
    """`asked()` is the fingerprint of `asked.file`; `asked.compute` counts how often it was computed."""
    file = tmp_path / "weights"
    file.write_bytes(b"one")
    compute = Mock(side_effect=lambda: file.read_bytes().hex())
    ask = Mock(side_effect=lambda how="as is": cached_fingerprint([file], how, compute))
    ask.file, ask.compute = file, compute
    return ask


@pytest.fixture
def settled(monkeypatch):
    monkeypatch.setattr(verified, "_SETTLED_S", -1e9)


def test_it_is_computed_once_for_the_same_files(asked, settled):
    assert asked() == asked() == b"one".hex()
    assert asked.compute.call_count == 1
    asked("in another dtype")
    assert asked.compute.call_count == 2


def test_a_file_that_changed_in_place_is_computed_anew_even_with_its_old_time(asked, settled):
    asked()
    seen = asked.file.stat()
    time.sleep(0.02)
    asked.file.write_bytes(b"two")
    os.utime(asked.file, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    assert asked.file.stat().st_size == seen.st_size
    assert asked() == b"two".hex()


def test_a_file_of_just_now_is_not_remembered(asked):
    assert asked() == asked()
    assert asked.compute.call_count == 2


def test_what_is_kept_is_bounded(asked, settled):
    for number in range(KEPT + 5):
        asked(str(number))
    assert len(list(module._folder().iterdir())) == KEPT
    asked(str(KEPT + 4))
    assert asked.compute.call_count == KEPT + 5, "the newest are kept"


def test_a_cache_that_cannot_be_written_or_read_is_done_without(asked, settled, cache):
    cache.write_text("a file where a folder should be")
    assert asked() == asked() == b"one".hex()
    assert asked.compute.call_count == 2


def test_a_long_fingerprint_that_cannot_be_kept_is_told(asked, settled, cache, monkeypatch):
    monkeypatch.setattr(module, "_LONG_S", 0.0)
    cache.write_text("a file where a folder should be")
    with pytest.warns(OffloadDecodeWarning, match="cannot be kept in .*: free some space there"):
        asked()


def test_a_full_disk_leaves_no_empty_file(monkeypatch):
    def full(path, text, encoding):
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    assert module.save_text("key", "ab").errno == errno.ENOSPC
    assert not list(module._folder().iterdir())


@pytest.mark.parametrize("text", ["", "not a fingerprint", "ab" * 1000, "\0", "ab\n"])
def test_what_is_no_fingerprint_is_not_taken_for_one(asked, settled, text):
    asked()
    (place,) = module._folder().iterdir()
    place.write_text(text)
    assert asked() == b"one".hex()
    assert asked.compute.call_count == 2


def test_files_that_are_gone_are_not_remembered(tmp_path, cache):
    assert cached_fingerprint([tmp_path / "nowhere"], "as is", lambda: "ab") == "ab"
    assert not cache.exists()


def test_what_is_asked_for_again_and_again_stays():
    module.save_text("often", "ab")
    for number in range(KEPT + 10):
        module.save_text(f"once {number}", "cd")
        assert module.load_text("often") == "ab"
    assert module.load_text("once 0") is None
    assert len(list(module._folder().iterdir())) == KEPT
