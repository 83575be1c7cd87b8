"""What of a folder becomes a corpus: links, stores, patterns, odd files; all that is skipped is named."""

from __future__ import annotations

import io
import os
import socket
import sys
from pathlib import Path

import pytest

from offload_decode.common.errors import ConfigError, CorpusError
from offload_decode.prefill_jobs import decoding
from offload_decode.prefill_jobs.corpus import read_corpus
from offload_decode.prefill_jobs.folders import Rules
from tests.prefill_jobs.test_corpus import _write

FOLLOW = Rules(follow_links=True)


def read(folder: Path, rules: Rules = Rules()) -> tuple[list[str], dict[str, str]]:  # noqa: B008
    documents, skipped = read_corpus(str(folder), rules)
    assert [one.name for one in documents] == sorted(one.name for one in documents)
    return [one.name for one in documents], {one.name: one.reason for one in skipped}


@pytest.fixture
def linked(tmp_path: Path) -> Path:
    """A corpus with links out of it, to its own files, to itself, in circles, and to nothing."""
    corpus = _write(tmp_path / "corpus", {"a.txt": b"a", "deep/b.txt": b"b"})
    outside = _write(tmp_path / "outside", {"secret.txt": b"s", "more/c.txt": b"c"})
    for name, target in {
        "file": outside / "secret.txt",
        "folder": outside / "more",
        "again": outside / "more" / "c.txt",
        "own": corpus / "a.txt",
        "deep/up": corpus,
        "round": corpus / "round",
        "nowhere": corpus / "nothing",
        "null": Path("/dev/zero"),
        "all": outside,
    }.items():
        (corpus / name).symlink_to(target)
    (outside / "back").symlink_to(corpus, target_is_directory=True)
    return corpus


def test_links_are_skipped_and_named(linked: Path) -> None:
    documents, skipped = read(linked)
    assert documents == ["a.txt", "deep/b.txt"]
    links = {"file", "folder", "again", "own", "deep/up", "round", "nowhere", "null", "all"}
    assert skipped.keys() == links
    assert all(reason.startswith("it is a link") for reason in skipped.values())


def test_links_that_are_followed_give_every_file_once(linked: Path) -> None:
    documents, skipped = read(linked, FOLLOW)
    texts = [one.text for one in read_corpus(str(linked), FOLLOW)[0]]
    assert sorted(texts) == ["a", "b", "c", "s"]
    assert {"a.txt", "deep/b.txt"} < set(documents), "what lies in the folder keeps its own name"
    assert skipped["round"] == skipped["nowhere"] == "it is a link that leads nowhere"
    assert skipped["null"] == "it is not a regular file"
    assert {skipped[name] for name in ("own", "deep/up")} == {"it is read already, under another name"}


def test_a_corpus_may_itself_be_reached_by_a_link(tmp_path: Path) -> None:
    _write(tmp_path / "real", {"a.txt": b"a"})
    (tmp_path / "link").symlink_to(tmp_path / "real", target_is_directory=True)
    (tmp_path / "alone").symlink_to(tmp_path / "real" / "a.txt")
    assert read(tmp_path / "link")[0] == ["a.txt"]
    assert read(tmp_path / "alone")[0] == ["alone"]


@pytest.mark.parametrize("corpus", ["s.kv", "s.kv/layers", "s.kv/layers/zarr.json", "s.kv.indexes", "link"])
def test_a_store_is_no_corpus(tmp_path: Path, corpus: str) -> None:
    files = {"s.kv/zarr.json": b"{}", "s.kv/SHA256SUMS.sha256": b"", "s.kv/layers/zarr.json": b"{}"}
    _write(tmp_path, files | {"s.kv.indexes/flat/a.json": b"{}", "s.kv/notes.txt": b"text"})
    (tmp_path / "link").symlink_to(tmp_path / "s.kv", target_is_directory=True)
    with pytest.raises(CorpusError, match="is a KV store or belongs to one: give the text"):
        read_corpus(str(tmp_path / corpus))


def test_a_folder_of_stores_holds_nothing_to_read(tmp_path: Path) -> None:
    _write(tmp_path, {"s.kv/zarr.json": b"{}", "t.kv/zarr.json": b"{}"})
    with pytest.raises(CorpusError, match=r"nothing to read in .* \(s\.kv: it is a KV store"):
        read_corpus(str(tmp_path))


TREE = dict.fromkeys(
    ("a.md", "b.rst", "docs/c.md", "docs/d.txt", "docs/deep/e.md", "build/f.md", "drafts/g.md"), b"text"
)


@pytest.mark.parametrize(
    ("rules", "left"),
    [
        (Rules(), set(TREE)),
        (Rules(("*.md",)), {name for name in TREE if name.endswith(".md")}),
        (Rules(("/*.md", "*.rst")), {"a.md", "b.rst"}),
        (Rules(("docs/**",)), {"docs/c.md", "docs/d.txt", "docs/deep/e.md"}),
        (Rules(("docs",)), {"docs/c.md", "docs/d.txt", "docs/deep/e.md"}),
        (Rules((), ("build/", "drafts")), set(TREE) - {"build/f.md", "drafts/g.md"}),
        (Rules(("*.md",), ("deep", "a.*")), {"docs/c.md", "build/f.md", "drafts/g.md"}),
    ],
)
def test_patterns_select_files_and_the_rest_is_reported(tmp_path: Path, rules: Rules, left: set[str]) -> None:
    documents, skipped = read(_write(tmp_path, TREE), rules)
    assert set(documents) == left
    for name in TREE.keys() - left:
        assert any(name == one or name.startswith(f"{one}/") for one in skipped)
    assert set(skipped.values()) <= {"--glob does not name it", "--exclude names it"}


def test_patterns_that_match_nothing_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"all of it is left out, a\.md because --glob does not name it"):
        read_corpus(str(_write(tmp_path, TREE)), Rules(("*.org",)))


@pytest.mark.parametrize("pattern", ["!", "a\\"])
def test_invalid_patterns_are_refused(pattern: str) -> None:
    with pytest.raises(ConfigError, match="is no pattern"):
        Rules(globs=(pattern,))
    with pytest.raises(ConfigError, match="is no pattern"):
        Rules(excludes=(pattern,))


def test_gitignore_files_are_honoured_as_git_does(tmp_path: Path) -> None:
    kept = ["a.txt", "keep.log", "sub/b.txt", "sub/top", "sub/deep/c.md", "sub/inner.tmp"]
    gone = ["x.log", "top", "build/out.txt", "sub/y.log", "sub/own.txt", "sub/deep/own.txt"]
    _write(tmp_path, dict.fromkeys([*kept, *gone, "z.tmp"], b"text"))
    (tmp_path / ".gitignore").write_text(
        "# **** of **** the **** root ****\n*.log\n!keep.log\n/top\nbuild/\n*.tmp\n!\n\\\n"
    )
    (tmp_path / "sub" / ".gitignore").write_text("own.txt\n!inner.tmp\n")
    documents, skipped = read(tmp_path)
    assert documents == sorted(kept)
    named = {"x.log", "top", "build", "sub/y.log", "sub/own.txt", "sub/deep/own.txt", "z.tmp"}
    assert skipped == dict.fromkeys(named, "a .gitignore names it")


def test_a_gitignore_that_is_no_file_is_named_and_never_waited_for(tmp_path: Path) -> None:
    _write(tmp_path, {"a.txt": b"a", "sub/b.txt": b"b"})
    os.mkfifo(tmp_path / ".gitignore")
    (tmp_path / "sub" / ".gitignore").symlink_to("/dev/zero")
    documents, skipped = read(tmp_path)
    assert documents == ["a.txt", "sub/b.txt"]
    assert skipped == {".gitignore": "it is not a regular file", "sub/.gitignore": "it is a link"}


@pytest.mark.parametrize("line", ["*a" * 12 + "*b", "**/a/" * 12 + "b"])
def test_a_gitignore_that_would_take_forever_is_named(tmp_path: Path, line: str) -> None:
    _write(tmp_path, {"a" * 60: b"a", ".gitignore": f"{line}\n".encode()})
    assert read(tmp_path) == (["a" * 60], {".gitignore": "its patterns would take too long"})


def odd(folder: Path) -> dict[str, Path]:
    os.mkfifo(folder / "pipe")
    here = os.getcwd()
    os.chdir(folder)  # the names of sockets are short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind("socket")
    finally:
        os.chdir(here)
    return {"pipe": folder / "pipe", "socket": folder / "socket", "zero": Path("/dev/zero")}


def test_pipes_sockets_and_devices_are_refused_without_waiting(tmp_path: Path) -> None:
    for path in odd(tmp_path).values():
        with pytest.raises(CorpusError, match="is not a regular file: give a file, a folder, or -"):
            read_corpus(str(path))
    _write(tmp_path, {"a.txt": b"a"})
    documents, skipped = read(tmp_path)
    assert documents == ["a.txt"]
    assert skipped == dict.fromkeys(("pipe", "socket"), "it is not a regular file")


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path, {"a.txt": b"a"})
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(1 << 40)
    assert read(tmp_path) == (["a.txt"], {"sparse": "it has more than 256 MiB"})
    with pytest.raises(
        CorpusError, match="sparse cannot be read, because it has more than 256 MiB: split it"
    ):
        read_corpus(str(tmp_path / "sparse"))
    monkeypatch.setattr(decoding, "LARGEST", 1 << 21)
    with open("/dev/zero", "rb") as endless:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(endless))
        with pytest.raises(
            CorpusError, match="standard input cannot be read, because it has more than 2 MiB"
        ):
            read_corpus("-")


@pytest.mark.parametrize("corpus", ["a\0b", "x" * 5000])
def test_a_name_that_no_file_can_have(corpus: str) -> None:
    with pytest.raises(CorpusError, match="cannot be read"):
        read_corpus(corpus)
