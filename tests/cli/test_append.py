"""`append` as a user meets it: what it says, and what it refuses in a sentence."""

import json
import re
from pathlib import Path

import pytest

from tests.cli.conftest import TEXT, done, flip, json_of, refused, run
from tests.prefill_jobs.killing import tree
from tests.tiny import saved_model, tiny_tokenizer


@pytest.fixture
def news(tmp_path: Path) -> Path:
    file = tmp_path / "news.txt"
    file.write_text("Fact 12: the colour of thing 12 is number 144.\n")
    return file


def test_a_document_is_appended_and_the_indexes_extended(copy, news):
    store = copy("s.kv")
    done("index", store, "--k", "10")
    ran = run("append", store, news)
    assert (ran.code, ran.out) == (0, ""), ran
    lines = ran.err.splitlines()
    assert "tokens more, in 1 document, in " in lines[0]
    assert "now " in lines[0]
    assert "2 documents" in lines[0]
    assert lines[1].startswith("of the earlier store ")
    assert "(6 extended)" in lines[2]
    assert re.search(r"; recall@10 (0\.9|1\.0)\d+ on average, (0\.9|1\.0)\d+ for the worst head", lines[2])
    assert lines[-1] == f'ask it something: offload-decode ask {store} "…"'
    done("verify", store)
    done("ask", store, "What is the colour?", "--max-new-tokens", "2")
    tokens = json_of("inspect", store)["manifest"]["n_tokens"]
    assert run("append", store, news).err.splitlines() == [
        "in the store already: news.txt",
        f"{store}: kept as it is, with {tokens:,} tokens: nothing is new",
    ]


def test_as_json_from_standard_input_and_in_silence(copy):
    store = copy("s.kv")
    ran = run("append", store, "-", "--json", "-q", stdin="More text.")
    assert (ran.code, ran.err) == (0, "")
    report = json.loads(ran.out)
    assert (report["added"], report["known"], report["kept"]) == (["stdin"], [], False)
    assert report["documents"] == 2
    assert report["store"] == str(store)


def test_a_folder_with_rules(copy, tmp_path):
    store, folder = copy("s.kv"), tmp_path / "more"
    folder.mkdir()
    (folder / "corpus.txt").write_text(TEXT)
    (folder / "a.md").write_text("# A\n")
    (folder / "b.txt").write_text("B.\n")
    ran = done("append", store, folder, "--exclude", "*.md")
    assert "skipped 1 file: a.md" in ran.err
    assert "in the store already: corpus.txt" in ran.err
    names = [one["name"] for one in json_of("inspect", store)["documents"]]
    assert names == ["corpus.txt", "b.txt"]
    (folder / "b.txt").write_text("Not B.\n")
    told = refused(1, "append", store, folder)
    assert "b.txt is in " in told
    assert "leave it out (--exclude)" in told


def test_wrong_use_of_append_is_refused(home, copy, news, tmp_path):
    store, empty, model = copy("s.kv"), tmp_path / "empty", tmp_path / "model"
    before = tree(store)
    empty.mkdir()
    (tmp_path / "blank.txt").write_text(" \n")
    saved_model(model, seed=3)
    assert "other weights" in refused(1, "append", store, news, "--model", model)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    saved_model(model)
    tokenizer.save_pretrained(model)
    assert "another tokenizer" in refused(1, "append", store, news, "--model", model)
    assert "nothing to read" in refused(1, "append", store, empty)
    assert "no text" in refused(1, "append", store, tmp_path / "blank.txt")
    assert "empty corpus" in refused(2, "append", store, "")
    assert "is a KV store" in refused(1, "append", store, home / "store.kv")
    assert "There is no store" in refused(1, "append", tmp_path / "none.kv", news)
    assert "not a KV store" in refused(1, "append", empty, news)
    assert "pull it first" in refused(2, "append", "s3://bucket/s.kv", news)
    assert "apply to folders" in refused(2, "append", store, news, "--exclude", "*.md")
    assert tree(store) == before
    assert not store.with_name("s.kv.partial").exists()
    flip(store / "layers/000/keys/c.0.0.0", 5)
    assert "is damaged: layers/000/keys/c.0.0.0 (changed)" in refused(1, "append", store, news)


def test_appending_to_an_unfinished_prefill_is_refused(home, tmp_path, news):
    partial = tmp_path / "s.kv.partial"
    partial.mkdir()
    (partial / "lock").touch()
    assert "has not finished" in refused(1, "append", tmp_path / "s.kv", news)
