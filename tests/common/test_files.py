"""What is committed is flushed, whatever the memory for threads."""

import os
from pathlib import Path
from typing import Any

import pytest

from offload_decode.common import files as durable


def flushed(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The inodes that reach the disk where these files are asked to."""
    found: set[int] = set()
    monkeypatch.setattr(os, "fsync", lambda descriptor: found.add(os.fstat(descriptor).st_ino))
    durable.sync_files(files)
    return found


def test_halves_of_surrogate_pairs_are_replaced_and_pairs_are_joined() -> None:
    mended = durable.without_surrogates("a\ud800b\udc00\ud83d\ude42é")
    assert mended == "a\ufffdb\ufffd\N{SLIGHTLY SMILING FACE}é"


@pytest.mark.parametrize("threads", [True, False])
def test_every_file_is_flushed_with_or_without_threads(
    threads: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: Any, **__: Any) -> Any:
        raise RuntimeError("can't start new thread")

    files = [tmp_path / str(number) for number in range(9)]
    for file in files:
        file.write_bytes(b"x")
    if not threads:
        monkeypatch.setattr("threading.Thread.start", none)
    assert flushed(files, monkeypatch) == {file.stat().st_ino for file in files}
    with durable.synced(False):
        assert flushed(files, monkeypatch) == set()
