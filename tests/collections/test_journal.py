"""The list of a collection's documents: the last line of a name counts, and nothing else is believed."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from offload_decode.collections import journal as module
from offload_decode.collections.journal import LONGEST, Entry, Journal, check_metadata, read
from offload_decode.common.errors import ConfigError, DoesNotFit, StoreDamaged


def entry(name: str, tokens: int = 1, **metadata: Any) -> Entry:
    return Entry(name, "0" * 64, f"stores/ab/ab{'0' * 30}.kv", tokens, metadata)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "documents.jsonl").touch()
    return tmp_path / "documents.jsonl"


def test_the_last_line_of_a_name_counts(path):
    journal = Journal(path)
    for one in (entry("a"), entry("b"), entry("a", 2, year=1999)):
        journal.put(one)
    journal.drop(["b"])
    assert read(path) == ({"a": entry("a", 2, year=1999)}, 4)
    assert journal.entries == read(path)[0]


@pytest.mark.parametrize("cut", [1, 10, 100])
def test_a_torn_line_does_not_count_and_is_cut_off(path, cut):
    journal = Journal(path)
    journal.put(entry("a"))
    before = path.read_bytes()
    journal.put(entry("b"))
    os.truncate(path, len(path.read_bytes()) - cut)
    assert set(read(path)[0]) == {"a"}
    again = Journal(path)
    assert path.read_bytes() == before
    again.put(entry("c"))
    assert set(read(path)[0]) == {"a", "c"}


def test_what_no_longer_counts_is_written_no_more(path):
    journal = Journal(path)
    journal.put(entry("b"))
    for tokens in range(1, 120):
        journal.put(entry("a", tokens))
    journal.compact()
    assert read(path) == ({"b": entry("b"), "a": entry("a", 119)}, 2)
    assert list(path.parent.iterdir()) == [path]


WRONG: list[dict[str, Any]] = [
    {"store": "../elsewhere.kv"},
    {"store": "/etc"},
    {"store": f"stores/ab/cd{'0' * 30}.kv"},
    {"store": f"stores/ab/ab{'0' * 30}.kv/../../.."},
    {"sha256": "0" * 63},
    {"tokens": 0},
    {"tokens": True},
    {"tokens": 1.5},
    {"name": ""},
    {"name": 3},
    {"name": "\ud800"},
    {"name": "x" * 5000},
    {"metadata": {"nested": {}}},
    {"metadata": []},
    {"metadata": {str(number): 1 for number in range(101)}},
    {"more": 1},
    {"gone": True},
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: json.dumps(wrong)[:40])
def test_a_line_that_is_none_is_refused_by_its_number(path, wrong):
    lines = [entry("a")._asdict(), entry("b")._asdict() | wrong]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(StoreDamaged, match=r"Line 2 of .* is not that of a document"):
        read(path)


def test_a_field_that_is_not_known_is_named(path):
    path.write_text(json.dumps(entry("a")._asdict() | {"more": 1}) + "\n")
    with pytest.raises(StoreDamaged, match="it has a field 'more' that this release does not know"):
        read(path)


@pytest.mark.parametrize("line", [b"[]", b"{", b'{"name": NaN}', b"\xff", b"3", b"[" * 10_000])
def test_what_is_no_object_is_refused(path, line):
    path.write_bytes(line + b"\n")
    with pytest.raises(StoreDamaged):
        read(path)


def test_lines_are_bounded(path):
    with pytest.raises(ConfigError, match="say less of it"):
        Journal(path).put(entry("a", text="x" * LONGEST))
    path.write_bytes(b"x" * (LONGEST + 2))
    with pytest.raises(StoreDamaged, match="a line of more than"):
        read(path)


def test_only_a_plain_file_is_read(path):
    os.rename(path, path.with_name("other"))
    path.symlink_to(path.with_name("other"))
    with pytest.raises(StoreDamaged, match="it is a link"):
        read(path)


def test_a_line_that_a_full_disk_cut_off_does_not_stay(path, monkeypatch):
    journal = Journal(path)
    journal.put(entry("a"))

    def full(files: list[Path]) -> None:
        with open(path, "ab") as file:
            file.truncate(path.stat().st_size - 20)
        raise OSError(28, os.strerror(28))

    with monkeypatch.context() as patch:
        patch.setattr("offload_decode.common.files.sync_files", full)
        with pytest.raises(OSError, match="No space"):
            journal.put(entry("b"))
    journal.put(entry("c"))
    assert set(read(path)[0]) == {"a", "c"}


def test_half_a_character_is_refused():
    with pytest.raises(ValueError, match="half a character"):
        check_metadata({"author": "\ud800"})


def test_it_never_grows_beyond_what_can_be_read(path, monkeypatch):
    for number in range(10):
        journal = Journal(path)
        journal.put(entry("a", number + 1))
        journal.put(entry(f"b{number}"))
    full = path.stat().st_size
    monkeypatch.setattr(module, "LONGEST", 300)
    monkeypatch.setattr(module, "LARGEST", full + 299)
    journal.make_room()  # nine lines of "a" no longer count
    assert path.stat().st_size < full
    journal.make_room()
    monkeypatch.setattr(module, "LARGEST", path.stat().st_size + 1)
    with pytest.raises(DoesNotFit, match="is full, with 11 documents"):
        journal.make_room()
    journal.drop([f"b{number}" for number in range(10)])
    assert read(path)[0] == {"a": entry("a", 10)}
