"""A corpus: text of every kind is read as people see it, and all else is refused or skipped by name."""

import io
import os
import socket
import sys
from pathlib import Path

import pytest

from offload_decode.common.errors import ConfigError, CorpusError
from offload_decode.models.prompt import prompt_for
from offload_decode.prefill_jobs.corpus import TextDocument, encode_corpus, read_corpus
from offload_decode.prefill_jobs.documents import files as document_files
from offload_decode.prefill_jobs.folders import Rules
from tests.tiny import tiny_tokenizer

BINARIES = {
    "paper.pdf": b"%PDF-1.4\n1 0 obj << /Type /Catalog >>\nendobj\n%%EOF\n",
    "picture.png": b"\x89PNG\r\n\x1a\n" + bytes(range(256)),
    "photo.jpg": b"\xff\xd8\xff\xe0" + bytes(range(1, 200)),
    "archive.zip": b"PK\x03\x04\x14",
    "letter.rtf": b"{\\rtf1 hello}",
    "nul.bin": b"\0text\0with\0NULs",
    "controls.txt": b"\x01\x02\x03\x04 text",
    "noise": bytes((37 * i) % 255 + 1 for i in range(3000)),
}


def _write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ("naïve “quotes” 漢字 🙂".encode(), "naïve “quotes” 漢字 🙂"),
        ("\ufeffmarked".encode(), "marked"),
        (b"one\r\ntwo\rthree\n", "one\ntwo\nthree"),
        ("Grüße aus München, schöne Straße".encode("latin-1"), "Grüße aus München, schöne Straße"),
        ("El niño comió piñas".encode("latin-1"), "El niño comió piñas"),
        ("“It’s” – a café".encode("cp1252"), "“It’s” – a café"),
        ("Привет мир, это довольно длинный текст".encode("cp1251"), "Привет мир, это довольно длинный текст"),
        ("wide wörds".encode("utf-16"), "wide wörds"),
        ("wide wörds".encode("utf-32"), "wide wörds"),
        (b"\n\n  indented\n\n", "  indented"),
    ],
)
def test_text_of_any_encoding_is_read(tmp_path: Path, data: bytes, text: str) -> None:
    (tmp_path / "a.txt").write_bytes(data)
    ((document,), skipped) = read_corpus(str(tmp_path / "a.txt"))
    assert (document.name, document.text, skipped) == ("a.txt", text, [])


@pytest.mark.parametrize("name", ["a.md", "a.rst", "a.py", "a.c", "a.csv", "a.json", "Makefile", "a.unknown"])
def test_all_text_files_are_read_verbatim(tmp_path: Path, name: str) -> None:
    _write(tmp_path, {name: b"<b> # = {1,\t2}"})
    assert read_corpus(str(tmp_path / name))[0] == [TextDocument(name, "<b> # = {1,\t2}")]


def test_html_is_read_as_a_browser_shows_it(tmp_path: Path) -> None:
    page = b"""<!doctype html><html><head><title>The  title</title><style>p { color: red }</style>
        <script>var hidden = 1</script></head><body><!-- a comment --><h1>Head</h1>
        <p>Some <b>bold</b> and half-<i>ital</i>ic,<br>next &amp; last.</p><p hidden>not shown</p>
        <pre>a  b\n  c</pre><table><tr><td>1</td><td>2</td></tr></table>
        <template>nor this</template></body></html>"""
    ((document,), _) = read_corpus(str(_write(tmp_path, {"a.HTML": page}) / "a.HTML"))
    assert [line for line in document.text.splitlines() if line] == [
        "The title",
        "Head",
        "Some bold and half-italic,",
        "next & last.",
        "a  b",
        "  c",
        "1\t2",
    ]


@pytest.mark.parametrize("name", BINARIES)
def test_binary_files_are_refused_in_one_sentence(tmp_path: Path, name: str) -> None:
    _write(tmp_path, BINARIES)
    with pytest.raises(CorpusError, match=rf"{name} cannot be read.*convert it to text first$"):
        read_corpus(str(tmp_path / name))


@pytest.mark.parametrize("data", [b"", b" \n\t\n", b"\xef\xbb\xbf", b"<html><script>only()</script></html>"])
def test_a_file_without_text_is_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(CorpusError, match="holds no text"):
        read_corpus(str(_write(tmp_path, {"a.html": data}) / "a.html"))


def test_a_folder_is_read_by_relative_path_and_reports_skipped_files(tmp_path: Path) -> None:
    texts = {"b.txt": b"b", "a/z.md": b"z", "a/deep/y.py": b"y", "c/x": b"x"}
    hidden = {".secret": b"s", ".git/config": b"s", "a/__pycache__/m.txt": b"s", "node_modules/m.js": b"s"}
    _write(tmp_path, texts | hidden | BINARIES | {"empty.txt": b""})
    (tmp_path / "a" / "broken").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe")
    documents, skipped = read_corpus(str(tmp_path))
    assert [document.name for document in documents] == ["a/deep/y.py", "a/z.md", "b.txt", "c/x"]
    assert [document.text for document in documents] == ["y", "z", "b", "x"]
    assert {one.name for one in skipped} == {*BINARIES, "empty.txt", "a/broken", "pipe"}
    assert all(one.reason for one in skipped)


def test_a_store_inside_its_corpus_does_not_become_part_of_it(tmp_path: Path) -> None:
    stores = {
        "s.kv/zarr.json": b"{}",
        "s.kv/layers/zarr.json": b"{}",
        "t.kv.partial/progress.json": b"{}",
        "u.partial/lock": b"",
        "s.kv.indexes/flat/layer-000-head-000.json": b"{}",
    }
    documents, skipped = read_corpus(str(_write(tmp_path, {"a.txt": b"a"} | stores)))
    assert [document.name for document in documents] == ["a.txt"]
    assert [one.name for one in skipped] == ["s.kv", "s.kv.indexes", "t.kv.partial", "u.partial"]


@pytest.mark.parametrize("name", ["half.partial", "book.indexes", "a.partial.d"])
def test_a_folder_that_is_only_named_like_a_part_of_a_store_is_read(tmp_path: Path, name: str) -> None:
    documents, skipped = read_corpus(str(_write(tmp_path, {f"{name}/a.txt": b"a", "book/b.txt": b"b"})))
    assert f"{name}/a.txt" in [document.name for document in documents]
    assert skipped == []


def test_a_folder_without_readable_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="it has no files"):
        read_corpus(str(tmp_path))
    with pytest.raises(CorpusError, match=f"none of its {len(BINARIES)} files is readable"):
        read_corpus(str(_write(tmp_path, BINARIES)))


def test_a_missing_corpus_is_named(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"no corpus at .*nowhere.*give a file, a folder, or -"):
        read_corpus(str(tmp_path / "nowhere"))


def test_a_file_name_that_is_not_utf8_becomes_text(tmp_path: Path) -> None:
    try:
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.txt")).write_bytes(b"text")
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    ((document,), _) = read_corpus(str(tmp_path))
    assert document.name == "caf\ufffd.txt"


def test_standard_input_is_a_document(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"from a pipe\r\n")))
    assert read_corpus("-") == ([TextDocument("stdin", "from a pipe")], [])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\0\1\2")))
    with pytest.raises(CorpusError, match="standard input cannot be read"):
        read_corpus("-")


PROMPT = prompt_for(tiny_tokenizer())


def test_one_document_is_encoded_behind_the_opening_of_the_prompt() -> None:
    tokenizer = tiny_tokenizer()
    tokens, spans, _ = encode_corpus(tokenizer, PROMPT, [TextDocument("a", "text")])
    assert tokens.dtype == "int32"
    assert tokens[0] == tokenizer.bos_token_id
    assert tokenizer.decode(tokens) == "<s>text"
    assert [(span.name, span.start, span.end) for span in spans] == [("a", 0, len(tokens))]


def test_several_documents_are_headed_by_their_names_and_tile_the_tokens() -> None:
    tokenizer = tiny_tokenizer()
    texts = [TextDocument("a", "first"), TextDocument("b/c", "second\n"), TextDocument("d", "third")]
    tokens, spans, _ = encode_corpus(tokenizer, PROMPT, texts)
    pieces = [tokenizer.decode(tokens[span.start : span.end]) for span in spans]
    assert pieces == ["<s>Document: a\nfirst", "\n\nDocument: b/c\nsecond", "\n\nDocument: d\nthird"]
    assert [span.start for span in spans] + [len(tokens)] == [0] + [span.end for span in spans]


def test_special_tokens_in_a_text_are_letters() -> None:
    tokenizer = tiny_tokenizer()
    tokens, *_ = encode_corpus(tokenizer, PROMPT, [TextDocument("a", "an </s> and <pad>")])
    assert not {tokenizer.eos_token_id, tokenizer.pad_token_id} & set(tokens.tolist())
    assert tokenizer.decode(tokens[1:]) == "an </s> and <pad>"
    # The tokenizer itself goes on as before: questions are encoded with their template's special tokens.
    assert tokenizer.encode("</s>", add_special_tokens=False) == [tokenizer.eos_token_id]


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
    to_folders = dict.fromkeys(("folder", "deep/up", "all"), "it is a link to a folder")
    to_files = dict.fromkeys(("file", "again", "own", "round", "nowhere", "null"), "it is a link to a file")
    assert skipped == to_folders | to_files


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
    monkeypatch.setattr(document_files, "LARGEST", 1 << 21)
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
