"""Collections at the command line: made, renewed and asked."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from offload_decode import Engine
from offload_decode.collections.collection import Collection
from offload_decode.collections.journal import DOCUMENTS
from tests.cli import conftest
from tests.cli.conftest import Ran, done, flip, json_of, lines_of, refused, run, write_lines


@pytest.fixture
def copied(collection: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(collection, tmp_path / "copy"))


def batch(collection: Path, out: Path, questions: list[dict[str, Any]], *options: str) -> Ran:
    asked = write_lines(out.with_suffix(".questions"), *questions)
    return conftest.batch(asked, out, collection, *options)


def answers(collection: Path, question: str) -> dict[str, str]:
    """What an engine of each store answers."""
    opened = Collection(collection)
    return {entry.name: Engine.open(opened.store(entry)).answer(question, 4).text for entry in opened.entries}


def test_the_same_command_updates_the_collection(home, texts, collection, tmp_path):
    folder, out = shutil.copytree(texts, tmp_path / "own"), shutil.copytree(collection, tmp_path / "out")
    (folder / "alpha.txt").unlink()
    (folder / "beta.txt").write_text("changed")
    (folder / "image.png").write_bytes(b"\x89PNG\0\1")
    command = ("collect", folder, "--model", home / "model", "--out", out)
    ran = run(*command, "--json")
    assert ran.code == 1
    assert "error: image.png: " in ran.err
    told = json.loads(ran.out)
    assert "dropped, because the folder no longer has them: alpha.txt" in ran.err
    assert {name: told[name] for name in ("made", "kept", "gone", "documents")} == {
        "made": 1, "kept": 1, "gone": ["alpha.txt"], "documents": 2
    }  # fmt: skip
    assert [one["name"] for one in told["failed"]] == ["image.png"]
    ran = run(*command, "--exclude", "*.png")
    assert (ran.code, ran.out) == (0, "")
    assert "2 kept; it holds 2 documents" in ran.err


def test_every_document_is_asked_and_named(collection, out):
    expected = answers(collection, "Which word?")
    told = json_of("ask", collection, "Which word?", "--all", "--cite", "--max-new-tokens", "4")["answers"]
    assert {one["document"]: one["answer"] for one in told} == expected
    assert all({cited["name"] for cited in one["citations"]} <= {one["document"]} for one in told)
    assert batch(collection, out, [{"question": "Which word?"}], "--all").code == 0
    assert {line["document"]: line["answer"] for line in lines_of(out)} == expected
    again = batch(collection, out, [{"question": "Which word?"}], "--all")
    assert "0 answers, 3 there already" in again.err


def test_answers_are_printed_behind_the_names(collection):
    ran = run("ask", collection, "Which word?", "--all", "--max-new-tokens", "2")
    begun = [name for name in ("alpha.txt: ", "beta.txt: ", "gamma.txt: ") if name in ran.out]
    assert (ran.code, len(begun)) == (0, 3)


def test_the_documents_that_share_most_words_are_asked(collection, out, tmp_path):
    question = "Is beta the word, or gamma?"
    for options, names in (
        (("--top", "2"), ["beta.txt", "gamma.txt"]),
        ((), ["beta.txt", "gamma.txt", "alpha.txt"]),
    ):
        told = json_of("ask", collection, question, *options, "--max-new-tokens", "2")["answers"]
        assert {one["document"] for one in told[:2]} == set(names[:2])
        assert len(told) == len(names)
    asked = [{"question": "Is it alpha?"}, {"question": "Or gamma?"}]
    assert batch(collection, out, asked, "--top", "1").code == 0
    assert [(line["document"], line["question"]) for line in lines_of(out)] == [
        ("alpha.txt", "Is it alpha?"),
        ("gamma.txt", "Or gamma?"),
    ]
    assert "no document contains a word of the question" in refused(2, "ask", collection, "xyzzy")
    out = tmp_path / "others.jsonl"
    ran = batch(collection, out, [{"question": "xyzzy"}, {"question": "Or gamma?"}], "--top", "1")
    assert (ran.code, [line["document"] for line in lines_of(out)]) == (1, ["gamma.txt"])
    assert "error: no document contains a word of line 1 of the questions" in ran.err
    assert "leave one of them out" in refused(2, "ask", collection, question, "--all", "--top", "1")


def test_a_question_may_name_its_document(collection, out, tmp_path):
    questions = [{"question": "Which?", "document": "beta.txt"}, {"question": "What?"}]
    assert batch(collection, out, questions, "--all").code == 0
    assert [(line["document"], line["question"]) for line in lines_of(out)] == [
        ("alpha.txt", "What?"),
        ("beta.txt", "Which?"),
        ("beta.txt", "What?"),
        ("gamma.txt", "What?"),
    ]
    ran = batch(collection, tmp_path / "no", [{"question": "Which?", "document": "delta.txt"}], "--all")
    assert (ran.code, "asks the document delta.txt, which is not among" in ran.err) == (2, True)


def test_conditions_leave_documents_out(home, texts, copied, out, tmp_path):
    folder = Path(shutil.copytree(texts, tmp_path / "own"))
    metadata = folder / "said [1].jsonl"
    metadata.write_text('{"name": "alpha.txt", "year": 1999}\n{"name": "beta.txt", "year": 2024}\n')
    command = ("collect", folder, "--model", home / "model", "--out", copied, "--metadata", metadata)
    assert "3 kept; it holds 3 documents" in run(*command).err
    assert batch(copied, out, [{"question": "Is it alpha?"}], "--where", "year>=2000", "--top", "3").code == 0
    assert [line["document"] for line in lines_of(out)] == ["beta.txt"]
    ran = run("ask", copied, "Which?", "--all", "--where", "name=*a*", "--where", "year<2000", "--json")
    assert [one["document"] for one in json.loads(ran.out)["answers"]] == ["alpha.txt"]
    assert "matches none of the 3 documents" in refused(2, "ask", copied, "Which?", "--where", "name=x")
    assert "is no condition" in refused(2, "ask", copied, "Which?", "--where", "year")
    metadata.write_text('{"name": "alpha.txt"}\n{"year": 1999}\n')
    assert "line 2 of" in refused(2, *command)


def test_a_document_that_fails_does_not_stop_the_others(copied, out):
    opened = Collection(copied)
    shutil.rmtree(opened.store(opened.entries[1]))
    ran = run("ask", copied, "Which word?", "--all", "--json", "--max-new-tokens", "2")
    assert ran.code == 1
    assert [one["document"] for one in json.loads(ran.out)["answers"]] == ["alpha.txt", "gamma.txt"]
    (failed,) = json.loads(ran.out)["failed"]
    assert failed["document"] == "beta.txt"
    assert failed["error"].startswith("There is no store at")
    assert "error: beta.txt: There is no store at" in ran.err
    ran = batch(copied, out, [{"question": "Which word?"}], "--all")
    assert (ran.code, [line["document"] for line in lines_of(out)]) == (1, ["alpha.txt", "gamma.txt"])


def test_only_the_stores_that_are_asked_are_looked_at(collection, out, monkeypatch):
    looked: list[str] = []
    store = Collection.store
    noted = lambda self, entry: (looked.append(entry.name), store(self, entry))[1]  # noqa: E731
    monkeypatch.setattr(Collection, "store", noted)
    assert batch(collection, out, [{"question": "Is it beta?"}], "--top", "1").code == 0
    assert looked == ["beta.txt"]


def test_wrong_use_is_a_sentence(home, collection, store, tmp_path):
    assert "--where and --cache need a collection" in refused(2, "ask", store, "Which?", "--all")
    questions = write_lines(tmp_path / "q.jsonl", {"question": "Which?"})
    mixed = ("batch", collection, store, "--questions", questions, "--out", tmp_path / "out", "--all")
    assert "ask it alone" in refused(2, *mixed)
    wrong = ("collect", collection, "--model", home / "model", "--out", tmp_path / "out", "--metadata")
    assert "cannot be read" in refused(2, *wrong, tmp_path / "none.jsonl")
    assert "is a collection, and no store" in refused(1, "append", collection, home / "corpus.txt")


def test_a_question_that_names_a_document_finds_it(home, tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in (3, 4, 5):
        (folder / f"note-{number:04}.txt").write_text("The same words everywhere.")
    out = tmp_path / "collection"
    done("collect", folder, "--model", home / "model", "--out", out)
    told = json_of("ask", out, "What says note-0004.txt?", "--top", "1", "--max-new-tokens", "2")
    (answer,) = told["answers"]
    assert answer["document"] == "note-0004.txt"


def test_every_store_is_verified(collection, copied):
    ran = run("verify", collection)
    assert (ran.code, ran.out.strip()) == (0, f"{collection} is whole: 3 documents")
    broken = Collection(copied)
    store = broken.store(broken.entries[1])
    flip(next(path for path in sorted(store.rglob("c.0*")) if path.stat().st_size), -1)
    ran = run("verify", copied, "--json")
    told = json.loads(ran.out)
    assert (ran.code, told["ok"], told["documents"]) == (1, False, 3)
    assert [one["document"] for one in told["problems"]] == ["beta.txt"]


def test_inspect_shows_a_collection(home, texts, copied, tmp_path):
    metadata = tmp_path / "said.jsonl"
    metadata.write_text('{"name": "alpha.txt", "year": 1999}\n{"name": "beta.txt", "year": 1, "by": "A"}\n')
    done("collect", texts, "--model", home / "model", "--out", copied, "--metadata", metadata)
    opened = Collection(copied)
    shutil.rmtree(opened.store(opened.entries[2]))
    told = json_of("inspect", copied)
    assert [one["name"] for one in told["documents"]] == ["alpha.txt", "beta.txt", "gamma.txt"]
    assert told["tokens"] == sum(one["tokens"] for one in told["documents"])
    assert told["bytes"] == sum(path.stat().st_size for path in copied.rglob("*") if path.is_file())
    assert (told["missing"], told["documents"][2]["bytes"]) == (1, None)
    assert told["metadata"] == {"year": 2, "by": 1}
    assert told["model"] == opened.header.model_id
    shown = run("inspect", copied).out
    assert "year (2), by (1)" in shown
    sizes = [one["tokens"] for one in told["documents"]]
    assert f"3 of {min(sizes)} to {max(sizes)} tokens" in shown
    assert "1 store: collect again" in shown


def test_a_store_of_another_model_is_told(copied):
    header = json.loads((copied / "collection.json").read_text())
    (copied / "collection.json").write_text(json.dumps(header | {"weights_hash": "2:" + "0" * 64}))
    ran = run("verify", copied, "--json")
    assert ran.code == 1
    told = json.loads(ran.out)["problems"]
    assert [one["document"] for one in told] == ["alpha.txt", "beta.txt", "gamma.txt"]
    assert {one["problem"] for one in told} == {"it differs from the collection in weights_hash."}


def test_a_list_that_was_cut_or_changed_is_told(copied):
    lines = (copied / DOCUMENTS).read_bytes().splitlines(keepends=True)
    (copied / DOCUMENTS).write_bytes(b"".join(lines[:-1]))
    ran = run("verify", copied)
    assert (ran.code, "differ in 1: collect again" in ran.err) == (1, True)
    (copied / DOCUMENTS).write_bytes(b"".join([lines[0].replace(b".txt", b".tyt", 1), *lines[1:]]))
    ran = run("verify", copied)
    assert (ran.code, "its entry in the list of documents was changed" in ran.err) == (1, True)
