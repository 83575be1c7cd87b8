"""Evaluations print tables, write results and pictures, and refuse at once what they cannot measure."""

import json
import sys
from pathlib import Path

import pytest

from offload_decode.common.errors import ConfigError
from offload_decode.evals import sparsity
from offload_decode.evals.haystack import python_topics
from offload_decode.evals.runs import QuestionRecord, read
from offload_decode.evals.sparsity import LayerAttention, Question, left_out
from offload_decode.models import loading
from offload_decode.selectors.registry import names
from offload_decode.selectors.topk import TopK
from tests.cli.conftest import TEXT, done, json_of, refused, run
from tests.evals.made_up import write_run

FIDELITY = ("--tokens", "3", "--budgets", "5,10%")


@pytest.mark.usefixtures("short")
def test_needles_are_asked_for_at_every_length_and_depth(home, out):
    sizes = ("--lengths", "300,400", "--depths", "0,50%", "--budgets", "7", "-q")
    ran = done("eval", "needle", "--model", home / "model", *sizes, "--out", out)
    named = [line.split("  ")[0] for line in ran.out.splitlines()]
    assert sum(name.startswith("worst: needle at") for name in named) == 4
    assert sum(name == "needle at 50 %" for name in named) == 4
    found = read(out)
    assert {(line["length"], line["depth"]) for line in found.of("question")} == {
        (length, depth) for length in (300, 400) for depth in (0, 0.5)
    }
    assert found.header.configuration["contenders"] == ["dense", "topk:budget=7"]
    assert found.header.configuration["text_sha256"] == python_topics().sha256


@pytest.mark.parametrize(
    ("command", "options", "sentence"),
    [
        ("needle", ("--lengths", "2K,many"), "'many' is no number of tokens: write one like 2048, 32K or 1M"),
        ("needle", ("--lengths", "0"), "'0' is no number of tokens"),
        ("needle", ("--depths", "0,101"), "'101' is no depth"),
        ("needle", ("--depths", "half"), "'half' is no depth"),
        ("needle", ("--depths", "nan"), "'nan' is no depth"),
        ("needle", ("-s", "magic"), "unknown selector 'magic'"),
        ("needle", ("-o", "recall=1"), "has no option 'recall'"),
        ("needle", ("-o", "index=magic"), "no index kind 'magic'"),
        ("fidelity", ("--budgets", "abc"), "budget 'abc' is neither a count like 1024 nor a share like 2%"),
        ("fidelity", ("--budgets", "64,"), "budget '' is neither"),
        ("fidelity", ("--budgets", "0"), "leaves nothing to measure"),
        ("fidelity", ("-o", "budget=6"), "give it as --budgets"),
        ("fidelity", ("-s", "topk:budget=6"), "give it as --budgets"),
        ("fidelity", ("-s", "magic"), "unknown selector 'magic'"),
        ("fidelity", ("-s", "topk:colour=green"), "has no option 'colour'"),
        ("fidelity", ("-s", "topk:green"), "option 'green' is not of the form key=value"),
        ("fidelity", ("-s", "topk:index=faiss-ivf"), "there is no 'faiss-ivf' index"),
        ("fidelity", ("-s", "topk", "-s", "topk"), "selector 'topk' is given twice"),
        ("fidelity", ("--question", " "), "the question is empty"),
    ],
)
def test_wrong_use_is_refused_before_a_model_is_loaded(
    command, options, sentence, store, tmp_path, monkeypatch
):
    monkeypatch.setattr(loading, "load", lambda *_: pytest.fail("a model was loaded"))
    given = [store] if command == "fidelity" else []
    assert sentence in refused(2, "eval", command, *given, "--out", tmp_path / "out", *options)
    assert not (tmp_path / "out").exists()


def test_an_invalid_budget_is_refused_before_the_first_prefill(home, tmp_path):
    arguments = ("--model", home / "model", "--budgets", "few", "--out", tmp_path / "out")
    assert "budget 'few' is none of these" in refused(2, "eval", "needle", *arguments)
    assert not (tmp_path / "out").exists()


def test_a_missing_text_is_refused(tmp_path):
    said = refused(1, "eval", "needle", "--text", tmp_path / "none.txt", "--out", tmp_path)
    assert "there is no corpus at" in said


def test_an_earlier_result_is_not_overwritten(store, tmp_path):
    earlier = tmp_path / "fidelity.json"
    earlier.write_text("mine")
    assert "choose another --out" in refused(2, "eval", "fidelity", store, "--out", tmp_path)
    assert earlier.read_text() == "mine"
    assert "is no folder: name one" in refused(2, "eval", "fidelity", store, "--out", earlier)


@pytest.mark.parametrize(
    ("missing", "command"),
    [
        ("scipy.stats", "ruler"),
        ("statsmodels.stats.proportion", "perplexity"),
        ("matplotlib", "report"),
        ("jinja2", "report"),
    ],
)
def test_a_missing_library_is_named_before_the_work(tmp_path, monkeypatch, missing, command):
    monkeypatch.setitem(sys.modules, missing, None)
    runs = [write_run(tmp_path / "run.jsonl", 0.9, questions=1)]
    given = runs if command == "report" else []
    said = refused(2, "eval", command, *given, "--out", tmp_path / "out")
    assert f"this needs {missing.partition('.')[0]}," in said
    assert "pip install 'offload-decode[eval]'" in said
    assert not (tmp_path / "out").exists()


def test_fidelity_writes_a_table_and_a_result(store, tmp_path):
    out = tmp_path / "made" / "here"
    chosen = ("-s", "topk", "-s", "lessismore")
    ran = done("eval", "fidelity", store, *chosen, *FIDELITY, "--question", "Thing 3?", "--out", out)
    heading, *rows = (line.split() for line in ran.out.splitlines())
    assert heading[:4] == ["selector", "budget", "tokens", "moved"]
    measured = ["topk", "lessismore", "random", "streaming"]
    assert [tuple(row[:2]) for row in rows] == [
        ("dense", "100%"),
        *((name, "5") for name in measured),
        *((name, "10%") for name in measured),
    ]
    assert rows[0][5:11] == ["100.0%", "100.0%", "0.0%", "0.0%", "0.0%", "0.0%"]
    assert ran.err.splitlines()[-1].startswith(f"{out / 'fidelity.json'}: see it with")
    result = json.loads((out / "fidelity.json").read_text())
    assert result["configuration"]["questions"] == ["Thing 3?"]
    assert {path.name for path in out.iterdir()} == {"fidelity.json"}


def test_every_selector_is_measured_and_json_is_what_the_file_holds(store, tmp_path):
    few = ("--tokens", "2", "--budgets", "20")
    ran = run("eval", "fidelity", store, *few, "--out", tmp_path, "--json", "-q")
    assert (ran.code, ran.err) == (0, "")
    assert json.loads(ran.out) == json.loads((tmp_path / "fidelity.json").read_text())
    assert {entry["label"] for entry in json.loads(ran.out)["entries"]} == set(names()) - {"own"}


def test_a_selector_can_have_options_of_its_own(store, tmp_path):
    chosen = ("-s", "quest:page_size=4", "-s", "quest:page_size=4,tail=sample:8", "-o", "dense_layers=0")
    chosen += ("-s", "lessismore:select_layers=0,1,tail=off")
    result = json_of("eval", "fidelity", store, *chosen, *FIDELITY, "--out", tmp_path, "-q")
    options = {entry["label"]: entry["options"] for entry in result["entries"]}
    assert options["lessismore:select_layers=0,1,tail=off"] == {"select_layers": "0,1", "tail": "off"}
    assert options["quest:page_size=4,tail=sample:8"] == {"page_size": "4", "tail": "sample:8"}
    assert result["configuration"]["common"] == {"dense_layers": "0"}


def test_one_that_fails_is_named_and_the_others_are_kept(store, tmp_path, monkeypatch):
    def choose(*_: object) -> None:
        raise ConfigError("the index was eaten")

    monkeypatch.setattr(TopK, "choose", choose)
    ran = run("eval", "fidelity", store, "-s", "topk", *FIDELITY, "--out", tmp_path, "-q")
    assert ran.code == 1
    assert ran.err.splitlines() == [
        f"error: topk at budget {budget} was not measured: the index was eaten" for budget in ("5", "10%")
    ]
    assert "streaming" in ran.out
    assert len(json.loads((tmp_path / "fidelity.json").read_text())["failures"]) == 2


SMALL = ("--lengths", "100", "--places", "1", "--chunk", "40", "--budgets", "8", "--windows", "20")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def test_perplexity_prints_a_line_for_each_way(home, text, out):
    asked = ("eval", "perplexity", "--model", home / "model", "--text", text, *SMALL, "--out", out)
    ran = done(*asked)
    heading, *lines = ran.out.splitlines()
    assert heading.split()[:5] == ["way", "stored", "NLL", "perplexity", "more"]
    assert [line.split()[:2] for line in lines[:4]] == [
        ["dense", "100"],
        ["topk:budget=8", "100"],
        ["window:20", "100"],
        ["unigram", "100"],
    ]
    assert lines[4].startswith("behind 100 tokens, ")
    assert len(lines) == 5
    assert "demo model" not in ran.err
    assert "measuring 1 chunk: a prefill of 100 tokens in all\n" in ran.err
    before = out.read_bytes()
    assert run(*asked).out == ran.out
    assert out.read_bytes() == before


def test_sliding_shows_every_position(home, text, out):
    asked = ("eval", "perplexity", "--model", home / "model", "--text", text, *SMALL, "--sliding")
    ran = done(*asked, "--out", out, "-q")
    positions = [line.split()[:3] for line in ran.out.splitlines()[-3:]]
    assert positions == [["1", "to", "40"], ["41", "to", "80"], ["81", "to", "99"]]
    assert ran.err == ""


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--lengths", "1K,2K", "--sliding"), "with --sliding, --lengths is one number"),
        (("--windows", "x"), "'x' is no number of tokens"),
        (("-s", "none"), "unknown selector 'none'"),
        (("--chunk", "1"), "chunk"),
    ],
)
def test_mistakes_are_told_before_a_model_is_loaded(options, said, monkeypatch):
    monkeypatch.setattr(loading, "load", lambda *_: pytest.fail("a model was loaded"))
    ran = run("eval", "perplexity", *options)
    assert ran.code == 2
    assert said in ran.err


def test_a_text_that_is_too_short_is_refused(home, text, tmp_path):
    asked = ("eval", "perplexity", "--model", home / "model", "--text", text, "--lengths", "1M")
    assert "take a longer text" in refused(2, *asked, "--out", tmp_path / "run.jsonl")
    assert not (tmp_path / "run.jsonl").exists()


@pytest.mark.usefixtures("short")
def test_sparsity_prints_tasks_layers_and_predictors(home, out, monkeypatch):
    listen = sparsity.listen

    def few(engine: object, question: str, most: int, begun: str = "") -> list[LayerAttention]:
        return listen(engine, question, 2, begun)  # type: ignore[arg-type]

    monkeypatch.setattr(sparsity, "listen", few)
    ask = ("--tasks", "niah_single_2", "--lengths", "300", "--limit", "1", "--budgets", "64,8")
    ran = done("eval", "sparsity", "--model", home / "model", *ask, "--out", out)
    tasks, layers, predicted = ran.out.split("\n\n")
    assert tasks.splitlines()[1].startswith("niah_single_2")
    assert [line.split()[0] for line in layers.splitlines()] == ["layer", "0", "1", "2"]
    assert predicted.startswith("predicts the tokens needed")
    # A tiny random model is right about nothing, and that is said.
    assert "1 question left out of needed tokens: the dense answer scores 0 there" in predicted
    assert read(out).header.configuration["contenders"] == ["dense", "topk:budget=8", "topk:budget=64"]
    shown = json_of("eval", "sparsity", "--model", home / "model", *ask, "--out", out)
    assert len([record for record in shown["records"] if record["record"] == "sparsity"]) == 6


def test_equal_needs_predict_nothing():
    about = QuestionRecord("unit", 0, "task", 100, 0, None, "Which?", ["this"], 0.0, 100)
    few, many, lost = (
        Question(about, score, needed, False, {}) for score, needed in [(1, 4), (1, 64), (0, None)]
    )
    alike = left_out([few, few, lost])
    assert alike[0] == "every question that tells needs 4 tokens: there is nothing to predict"
    assert alike[1].startswith("1 question left out")
    assert left_out([few, many]) == []
