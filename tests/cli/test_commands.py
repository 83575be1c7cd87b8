"""Each command does what its help says, and its JSON can be read by a program."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from offload_decode import Engine, KVStore
from offload_decode.cli.ask import describe
from offload_decode.config import parse_options
from offload_decode.indexes import files
from offload_decode.indexes import registry as index_registry
from offload_decode.selectors import registry
from offload_decode.types import StepStats
from tests.cli.conftest import TEXT, done, flip, json_of, run
from tests.indexes.test_hostile import forge

STORED = len(TEXT)  # bytes of the text: its last newline goes, and a token that opens the prompt comes
QUESTION = "what is the colour of thing 3?"


def test_prefill_reports_what_it_made(home, tmp_path):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    shutil.copy(home / "corpus.txt", corpus)
    (corpus / "picture.png").write_bytes(b"\x89PNG")
    ran = run("prefill", corpus, "--model", home / "model", "--out", tmp_path / "s", "--json")
    report = json.loads(ran.out)
    assert report["n_tokens"] == KVStore.open(tmp_path / "s").manifest.n_tokens == STORED
    assert (report["documents"], report["resumed_from"]) == (1, 0)
    assert report["loading"] > 0
    assert "before that, the model took" in ran.err
    assert report["skipped"] == [{"name": "picture.png", "reason": "it is an image"}]
    assert "skipped 1 file: picture.png (it is an image)" in ran.err
    assert ran.code == 0


def test_prefill_reads_standard_input_and_can_be_silent(home, tmp_path):
    ran = run("prefill", "-", "--model", home / "model", "--out", tmp_path / "s", "-q", stdin=TEXT)
    assert (ran.code, ran.out, ran.err) == (0, "", "")
    same = [path / "SHA256SUMS" for path in (tmp_path / "s", home / "store.kv")]
    names = [KVStore.open(path.parent).documents[0].name for path in same]
    assert names == ["stdin", "corpus.txt"]
    ours, theirs = ([line for line in path.read_text().splitlines() if "keys" in line] for path in same)
    assert ours == theirs


def cut(most):
    """What stderr says of an answer of so many tokens."""
    return f"The answer was cut at {most} tokens: --max-new-tokens N allows more.\n"


def test_ask_prints_the_engines_answer(store):
    expected = Engine.open(store).answer(QUESTION, 6)
    ran = run("ask", store, QUESTION, "--max-new-tokens", "6")
    assert (ran.code, ran.out.strip(), ran.err) == (0, expected.text, cut(6))
    from_stdin = run("ask", store, "-", "--max-new-tokens", "6", stdin=QUESTION + "\n")
    assert from_stdin.out == ran.out


def test_ask_as_json_names_everything_that_shaped_the_answer(store):
    told = json_of("ask", store, QUESTION, "--max-new-tokens", "6", "-o", "budget=10%", "-s", "topk")
    assert (told["question"], told["tokens"], told["finish"]) == (QUESTION, 6, "length")
    assert (told["selector"], told["options"]["budget"], told["options"]["index"]) == ("topk", "10%", "auto")
    assert told["search"] == {"index": "flat"}
    assert told["placement"]["attend"] == "host"
    stats = told["stats"]
    assert stats["selected"] == stats["rows"] * round(told["stored_tokens"] / 10)
    assert stats["bytes_moved"] > 0


def test_ask_cites_what_the_answer_attended_to(store):
    asked = ("ask", store, QUESTION, "--max-new-tokens", "3", "-o", "budget=7")
    (cited,) = json_of(*asked, "--cite")["citations"]
    assert (cited["name"], cited["share"]) == ("corpus.txt", pytest.approx(1.0))
    assert sum(span["share"] for span in cited["spans"]) <= 1
    assert all(span["text"] and 0 <= span["start"] < span["end"] <= STORED for span in cited["spans"])
    assert "citations" not in json_of(*asked)
    ran = run(*asked, "--cite")
    assert ran.out == run(*asked).out
    first, *passages = ran.err.removeprefix(cut(3)).splitlines()
    assert first == "100%  corpus.txt"
    assert len(passages) == len(cited["spans"])


def test_ask_shows_costs_on_stderr_and_leaves_stdout_to_the_answer(store):
    plain = run("ask", store, QUESTION, "--max-new-tokens", "3", "-o", "budget=7")
    ran = run("ask", store, QUESTION, "--max-new-tokens", "3", "-o", "budget=7", "--stats")
    assert ran.out == plain.out
    assert f"attended  7.0 of {STORED:,} stored tokens" in ran.err
    assert {line.split()[0] for line in ran.err.removeprefix(cut(3)).splitlines()} == {
        *("tokens", "attended", "speed", "moved", "index", "attention", "time", "loading")
    }


def test_the_speed_is_the_time_of_each_token():
    engine = SimpleNamespace(
        prefix=SimpleNamespace(length=10),
        selector=SimpleNamespace(report=dict, bound=None),
        loaded=SimpleNamespace(loading=0.5),
    )
    told = describe(StepStats(tokens=4, total_s=0.5), cast(Engine, engine))
    assert "speed     125.0 ms for each token run" in told


def test_sampling_follows_its_seed(store):
    def asked(seed: str) -> str:
        return run("ask", store, QUESTION, "--temperature", "3", "--seed", seed, "--max-new-tokens", "12").out

    assert asked("1") == asked("1")
    assert asked("1") != asked("2")


def test_inspect_accounts_for_every_byte_and_token(store):
    told = json_of("inspect", store)
    assert (
        told["bytes"]
        == sum(told["cost"].values())
        == sum(f.stat().st_size for f in store.rglob("*") if f.is_file())
    )
    assert told["bytes_per_token"] == told["bytes"] / told["manifest"]["n_tokens"]
    assert told["documents"] == [{"name": "corpus.txt", "start": 0, "end": told["manifest"]["n_tokens"]}]
    digest = KVStore.open(store).store_digest
    assert told["digest"] == digest
    shown = run("inspect", store).out
    assert f"digest     {digest[:12]}\n" in shown
    for piece in ("corpus.txt", "model", "float32", "dense, chunk 512", *told["cost"]):
        assert piece in shown


def test_inspect_tells_how_keys_and_values_are_stored_and_what_that_cost(home, tmp_path):
    how = ("--model", home / "model", "--out", tmp_path / "s", "--kv", "int4-values")
    done("prefill", home / "corpus.txt", *how)
    told = json_of("inspect", tmp_path / "s")["manifest"]
    assert told["kv"] == {"keys": "int8-rows", "values": "int4-rows"}
    shown = run("inspect", tmp_path / "s").out
    assert "stored as  keys int8-rows, values int4-rows\n" in shown
    for kind in ("keys", "values"):
        for entry in told["kv_error"][kind]:
            assert 0 < entry["relative_rms"] < 0.2
            assert f"{entry['relative_rms']:.2%}" in shown
    assert "error of encoding" not in run("inspect", home / "store.kv").out


def test_index_is_built_kept_shown_and_searched(copy):
    store = copy("indexed.kv")
    first = json_of("index", store, "--kind", "faiss-ivf", "--k", "10")
    again = json_of("index", store, "--kind", "faiss-ivf", "--k", "10")
    assert (first["built"], first["reused"]) == (first["heads"], 0)
    assert (again["built"], again["reused"]) == (0, first["heads"])
    assert first["recall"] >= first["lowest_recall"] > 0
    (shown,) = json_of("inspect", store)["indexes"]
    assert (shown["kind"], shown["heads"], shown["k"]) == ("faiss-ivf", first["heads"], 10)
    assert 0.9 < first["mass"] <= 1.001
    for name in ("mass", "low", "lost", "most_lost", "best", "least_best"):
        assert shown[name] == first[name]
    assert first["low"] <= first["mass"]
    assert first["lost"] <= first["most_lost"]
    assert first["least_best"] <= first["best"]
    assert f"{first['mass']:.2%}" in run("inspect", store).out
    assert (shown["recall"], shown["bytes"]) == (pytest.approx(first["recall"]), first["bytes"])
    assert "faiss-ivf" in run("inspect", store).out
    assert "faiss-ivf index" in run("verify", store).out
    found = json_of("ask", store, QUESTION, "-o", "index=faiss-ivf", "--max-new-tokens", "2")
    assert found["options"]["index"] == "faiss-ivf"


def test_an_index_of_an_earlier_version_is_built_again(copy):
    store = copy("earlier.kv")
    json_of("index", store, "--kind", "clusters", "--k", "10")
    path = next((store.with_name("earlier.kv.indexes") / "clusters").glob("*.json")).with_suffix("")
    recall = files.metadata(path)["recall"]
    forge(path, recall={name: recall[name] for name in recall.keys() - {"mass", "lost", "best", "low"}})
    assert json_of("index", store, "--kind", "clusters", "--k", "10")["built"] == 1


def test_ask_searches_the_clusters_once_they_are_built(copy):
    store = copy("clustered.kv")
    asked = ("ask", store, QUESTION, "--max-new-tokens", "5")
    assert json_of(*asked)["search"] == {"index": "flat"}
    assert json_of("index", store)["kind"] == "clusters"
    assert json_of(*asked)["search"] == {"index": "clusters"}
    assert json_of(*asked, "-o", "index=flat")["search"] == {"index": "flat"}
    assert not run(*asked, "--json").err


def make_unfinished(store: Path, how: str, kind: str = "clusters") -> None:
    """Spoil an index of a store as a build does that is killed, and as damage does."""
    folder = store.with_name(f"{store.name}.indexes") / kind
    if how == "begun":
        for file in folder.glob("layer-001-*"):
            file.unlink()
        folder.rename(folder.with_name(f"{kind}.partial"))
    elif how == "some heads":
        for file in folder.glob("layer-001-head-000.*"):
            file.unlink()
    elif how == "no metadata":
        (folder / "layer-001-head-000.json").unlink()
    elif how == "metadata":
        (folder / "layer-001-head-000.json").write_text("{")
    elif how == "size":
        os.truncate(folder / "layer-001-head-000.cells", 64)
    elif how == "bytes":
        with open(folder / "layer-001-head-000.cells", "r+b") as file:
            file.write(b"?")


UNFINISHED, DAMAGED = ["begun", "some heads", "no metadata"], ["metadata", "size", "bytes"]


@pytest.mark.parametrize("how", [*UNFINISHED, *DAMAGED])
def test_an_incomplete_index_is_ignored_with_a_note(copy, how):
    store = copy("half.kv")
    done("index", store, "--k", "10")
    whole = run("ask", store, QUESTION, "--max-new-tokens", "5").out
    make_unfinished(store, how)
    ran = run("ask", store, QUESTION, "--max-new-tokens", "5", "--json")
    assert (ran.code, json.loads(ran.out)["search"]) == (0, {"index": "flat"})
    assert json.loads(ran.out)["answer"].strip() == whole.strip()
    assert ran.err.startswith("All keys are searched: ")
    assert ran.err.count("\n") == 1
    assert ("unfinished" in ran.err) == (how in UNFINISHED)
    assert "offload-decode index" in ran.err
    ran = run("chat", store, "--max-new-tokens", "2", stdin=QUESTION + "\n")
    assert (ran.code, ran.err.count("All keys are searched")) == (0, 1)
    asked = run("ask", store, QUESTION, "--max-new-tokens", "2", "-o", "index=clusters")
    assert asked.code == (2 if how in UNFINISHED else 1)
    assert "offload-decode index" in asked.err
    assert run("ask", store, QUESTION, "--max-new-tokens", "2", "-o", "index=flat").err == cut(2)
    done("inspect", store)
    done("inspect", store, "--json")
    if how in UNFINISHED:
        assert "unfinished" in run("inspect", store).out
    done("index", store, "--k", "10")
    again = run("ask", store, QUESTION, "--max-new-tokens", "5", "--json")
    assert (again.err, json.loads(again.out)["search"]) == ("", {"index": "clusters"})
    (folder,) = store.with_name("half.kv.indexes").iterdir()
    assert folder.name == "clusters"


@pytest.mark.parametrize("how", ["begun", "some heads"])
def test_verify_tells_unfinished_from_damaged(copy, how):
    store = copy("half.kv")
    done("index", store, "--k", "10")
    make_unfinished(store, how)
    told = json_of("verify", store)
    assert (told["ok"], told["problems"]) == (True, [])
    assert "unfinished" in told["unfinished"][0]
    assert "clusters" not in " ".join(told["checked"])
    assert "unfinished" in run("verify", store).err


def test_an_index_that_scans_says_so(copy):
    store = copy("scanned.kv")
    ran = run("index", store, "--kind", "faiss-hnsw", "--k", "10")
    assert "every head reached that recall only by a full scan" in ran.err
    report = json_of("index", store, "--kind", "faiss-hnsw", "--k", "10")
    assert report["full_scans"] == report["heads"]
    (shown,) = json_of("inspect", store)["indexes"]
    assert shown["full_scans"] == report["heads"]
    assert "all heads" in run("inspect", store).out
    ask = ["ask", store, QUESTION, "--max-new-tokens", "2", "-o", "index=faiss-hnsw"]
    assert json_of(*ask)["search"] == {"index": "faiss-hnsw (tuned to a full scan)"}
    assert "index     faiss-hnsw (tuned to a full scan)" in run(*ask, "--stats").err


def test_verify_finds_damage(store, copy):
    assert json_of("verify", store)["ok"] is True
    damaged = copy("damaged.kv")
    largest = max((f for f in damaged.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)
    flip(largest, largest.stat().st_size // 2)
    ran = run("verify", damaged, "--json")
    told = json.loads(ran.out)
    assert (ran.code, told["ok"]) == (1, False)
    assert str(largest.relative_to(damaged)) in told["problems"][0]
    assert ran.err == f"error: {told['problems'][0]}\n"


def test_verify_finds_a_damaged_index(copy):
    store = copy("damaged.kv")
    done("index", store, "--kind", "flat")
    metadata = store.with_name("damaged.kv.indexes") / "flat" / "layer-001-head-000.json"
    metadata.write_text(metadata.read_text().replace('"n"', '"m"'))
    ran = run("verify", store)
    assert (ran.code, ran.out) == (1, "")
    assert "layer-001-head-000" in ran.err


@pytest.mark.parametrize(
    ("written", "instead"),
    [('"k"', '"j"'), ('"measured": ', '"measured": "x", "was": '), ('"recall": ', '"recall": 3, "was": ')],
)
def test_verify_finds_a_changed_recall_which_is_not_shown(copy, written, instead):
    store = copy("changed.kv")
    done("index", store, "--kind", "faiss-ivf", "--k", "10")
    for metadata in store.with_name("changed.kv.indexes").rglob("*.json"):
        text = metadata.read_text()
        assert written in text
        metadata.write_text(text.replace(written, instead))
    (shown,) = json_of("inspect", store)["indexes"]
    assert (shown["k"], shown["recall"], shown["lowest_recall"]) == (None, None, None)
    assert "exact" not in run("inspect", store).out
    assert "was changed after it was written" in run("verify", store).err


def test_help_names_every_index_kind_and_each_selector_takes_the_shown_options():
    shown = " ".join(run("index", "--help").out.split())
    assert all(kind in shown for kind in index_registry.kinds())
    for name in registry.names():
        options = registry.get(name).options_type
        assert parse_options(options, {"budget": "2%"}, name).budget == "2%"
