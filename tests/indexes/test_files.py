"""An index is written beside its place and renamed: writers do not meet, and failures leave nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from indexes import files


def test_two_writers_of_one_index_do_not_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "index"
    names: list[str] = []

    def write(name: str, inner: bool) -> None:
        names.append(name)
        Path(name).write_text("inner" if inner else "outer")
        if not inner:  # another writer begins and ends while this one is at work
            files.save(path, {}, ".native", lambda name: write(name, inner=True))
            assert Path(name).read_text() == "outer"

    files.save(path, {}, ".native", lambda name: write(name, inner=False))
    assert len(set(names)) == 2
    _, native = files.load(path, {})
    assert native is not None
    assert native.read_text() == "outer"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["index.json", "index.native"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, MemoryError])
def test_a_failure_leaves_nothing_but_what_was_there(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "index"
    files.save(path, {"n": 1}, ".native", lambda name: Path(name).touch())
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def fail(name: str) -> None:
        Path(name).write_text("half")
        raise error

    with pytest.raises(OSError if error is RuntimeError else error):
        files.save(path, {"n": 2}, ".native", fail)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
