"""`eval perplexity` and `eval sparsity` print their tables and go on with what is there."""

from pathlib import Path

import pytest

from offload_decode.evals import sparsity
from offload_decode.evals.runs import QuestionRecord, read
from offload_decode.evals.sparsity import LayerAttention, Question, left_out
from offload_decode.models import loading
from tests.cli.conftest import TEXT, done, json_of, refused, run

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
    assert lines[5].startswith(
        "At 100 tokens this model predicts the text no better than counts of its tokens"
    )
    assert "demo model" not in ran.err
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
