"""`renew` as a user meets it: what it says, and what it refuses in a sentence."""

import json
from pathlib import Path

import pytest

from offload_decode.prefill_jobs.renew import renew
from tests.cli.conftest import TEXT, done, json_of, refused, run
from tests.prefill_jobs.killing import tree


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """What the store was made from, to be edited."""
    file = tmp_path / "corpus.txt"
    file.write_text(TEXT)
    return file


def test_an_edit_is_taken_and_the_indexes_built_again(home, copy, corpus, tmp_path):
    store = copy("s.kv")
    done("index", store, "--k", "10")
    ran = run("renew", store, corpus)
    tokens = json_of("inspect", store)["manifest"]["n_tokens"]
    assert ran.err.splitlines() == [f"{store}: kept as it is, with {tokens:,} tokens: nothing has changed"]
    corpus.write_text(TEXT.replace("121", "one hundred"))
    before = tree(store)
    asked = done("renew", store, corpus, "--dry-run").err.splitlines()
    assert asked[0] == "changed: corpus.txt"
    assert " tokens stay, " in asked[1]
    assert (len(asked), tree(store)) == (2, before)
    ran = done("renew", store, corpus)
    lines = ran.err.splitlines()
    assert lines[:2] == asked
    assert lines[2].startswith(f"{store}: renewed, in ")
    assert "(6 built)" in lines[-2]
    assert lines[-1] == f'ask it something: offload-decode ask {store} "…"'
    made = json_of("inspect", store)
    stated = [f"{name}={value}" for name, value in made["manifest"]["prefill"].items() if name == "chunk"]
    done("prefill", corpus, "--model", home / "model", "--out", tmp_path / "whole.kv", "-o", *stated)
    assert tree(store) == tree(tmp_path / "whole.kv")
    done("verify", store)
    done("ask", store, "What is the colour?", "--max-new-tokens", "2")


def test_as_json(copy, corpus):
    store = copy("s.kv")
    corpus.write_text(TEXT + "More text.\n")
    report = json.loads(run("renew", store, corpus, "--json", "-q").out)
    told = report["changed"], report["kept"], report["store"]
    assert told == (["corpus.txt"], False, str(store))
    assert report["n_tokens"] == report["kept_tokens"] + report["run_tokens"]
    assert json.loads(run("renew", store, corpus, "--json", "--dry-run", "-q").out)["kept"]


def stopped(store: Path, corpus: Path) -> int:
    """Begin a renewal, and stop after a chunk; the tokens that it ran."""
    seen = list[int]()

    def stop(stage: str, tokens: int, total: int) -> None:
        seen.extend([tokens] if stage == "prefill" else [])
        if len(seen) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        renew(store, str(corpus), device="cpu", progress=stop)
    return seen[1] - seen[0]


def test_what_was_begun_for_an_earlier_edit_is_told_and_not_in_the_way(copy, corpus):
    store = copy("s.kv")
    corpus.write_text("Now: " + TEXT)
    tokens = stopped(store, corpus)
    note = f"an interrupted run was for another text: the {tokens:,} tokens it ran were discarded"
    corpus.write_text("Then: " + TEXT)
    assert note in done("renew", store, corpus).err.splitlines()
    corpus.write_text("Now: " + TEXT)
    tokens = stopped(store, corpus)
    corpus.write_text("Then: " + TEXT)
    report = json_of("renew", store, corpus)
    assert (report["kept"], report["discarded"]) == (True, tokens)
    assert json_of("renew", store, corpus)["discarded"] == 0
    assert not store.with_name(f"{store.name}.partial").exists()


def test_what_is_not_the_corpus_is_refused(copy, tmp_path):
    store, folder = copy("s.kv"), tmp_path / "more"
    folder.mkdir()
    for name in "abc":
        (folder / f"{name}.txt").write_text(f"{name} is a letter. " * 5)
    assert "would lose 1 of its 1 documents" in refused(2, "renew", store, folder)
    done("renew", store, folder, "--drop")
    before = tree(store)
    told = refused(2, "renew", store, folder / "a.txt")
    assert "would lose 2 of its 3 documents" in told
    assert "give all of the corpus, or --drop" in told
    assert "There is no store" in refused(1, "renew", tmp_path / "none.kv", folder)
    assert tree(store) == before
    assert "gone: b.txt, c.txt" in done("renew", store, folder / "a.txt", "--drop").err
