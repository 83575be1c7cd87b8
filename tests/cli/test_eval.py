"""`eval needle` writes its result and its picture, and refuses what it cannot measure before it begins."""

from __future__ import annotations

import json
import sys

import pytest

from offload_decode.evals import needle_grid
from offload_decode.evals.haystack import python_topics
from offload_decode.evals.tasks.ruler import Needle
from offload_decode.models import loading
from tests.cli.conftest import TEXT, refused, run
from tests.evals.made_up import write_run

pytest.importorskip("matplotlib")
SIZES = ("--lengths", "100,128", "--depths", "0,50%")


@pytest.fixture(autouse=True)
def _short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needle_grid, "MAX_NEW_TOKENS", 2)


def test_a_table_a_picture_and_a_result(home, tmp_path):
    out = tmp_path / "made" / "here"
    ran = run("eval", "needle", "--model", home / "model", *SIZES, "--budget", "7", "--out", out)
    assert ran.code == 0, ran.err
    heading, *rows = ran.out.splitlines()
    assert heading.split("  ")[-3:] == ["0 %", "50 %", "mean"]
    assert [row.split("  ")[0] for row in rows] == [
        f"{length} tokens, {way}" for length in (100, 128) for way in ("dense", "topk", "control")
    ]
    assert ran.err.splitlines()[-1] == f"{out / 'needle.json'}, {out / 'needle.png'}"
    assert (out / "needle.png").read_bytes().startswith(b"\x89PNG")
    result = json.loads((out / "needle.json").read_text())
    assert len(result["cells"]) == 4
    assert result["configuration"]["options"] == {"budget": "7"}
    assert result["configuration"]["text_sha256"] == python_topics().sha256
    assert {path.name for path in out.iterdir()} == {"needle.json", "needle.png"}


def test_json_is_what_the_file_holds(home, tmp_path):
    (tmp_path / "text.md").write_text(TEXT)
    where = ("--text", tmp_path / "text.md", "--out", tmp_path)
    ran = run("eval", "needle", "--model", home / "model", *SIZES, *where, "--json", "-q")
    assert (ran.code, ran.err) == (0, "")
    assert json.loads(ran.out) == json.loads((tmp_path / "needle.json").read_text())
    assert json.loads(ran.out)["configuration"]["text"] == "text.md"


def test_the_selectors_index_is_built(home, tmp_path):
    pytest.importorskip("faiss")
    options = ("-o", "index=faiss-ivf", "-o", "budget=9", "--lengths", "100", "--depths", "50")
    ran = run("eval", "needle", "--model", home / "model", *options, "--out", tmp_path)
    assert ran.code == 0, ran.err
    result = json.loads((tmp_path / "needle.json").read_text())
    assert result["configuration"]["options"] == {"budget": "9", "index": "faiss-ivf"}


def test_an_answered_control_and_a_repeated_text_are_said(home, tmp_path, monkeypatch):
    monkeypatch.setattr(Needle, "score", lambda *_: 1.0)
    (tmp_path / "text.txt").write_text("Too short. ")
    where = ("--text", tmp_path / "text.txt", "--out", tmp_path)
    ran = run("eval", "needle", "--model", home / "model", *SIZES, *where)
    assert ran.code == 0
    assert "the control was answered in 100% of the cells" in ran.err
    assert "the text is shorter than 100, 128 tokens and was repeated there" in ran.err


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--lengths", "2K,many"), "'many' is no number of tokens: write one like 2048, 32K or 1M"),
        (("--lengths", "0"), "'0' is no number of tokens"),
        (("--depths", "0,101"), "'101' is no depth"),
        (("--depths", "half"), "'half' is no depth"),
        (("--depths", "nan"), "'nan' is no depth"),
        (("--budget", "5", "-o", "budget=6"), "the budget is given twice"),
        (("-s", "magic"), "unknown selector 'magic'"),
        (("-o", "recall=1"), "has no option 'recall'"),
        (("-o", "index=magic"), "no index kind 'magic'"),
    ],
)
def test_wrong_use_is_refused_before_a_model_is_loaded(options, sentence, tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "load", lambda *_: pytest.fail("a model was loaded"))
    assert sentence in refused(2, "eval", "needle", "--out", tmp_path / "out", *options)
    assert not (tmp_path / "out").exists()


def test_a_budget_that_is_none_is_refused_before_the_first_prefill(home, tmp_path):
    arguments = ("--model", home / "model", "--budget", "few", "--out", tmp_path / "out")
    assert "budget 'few' is none of these" in refused(2, "eval", "needle", *arguments)
    assert not (tmp_path / "out").exists()


def test_a_missing_text_is_refused(tmp_path):
    said = refused(1, "eval", "needle", "--text", tmp_path / "none.txt", "--out", tmp_path)
    assert "there is no corpus at" in said


def test_an_earlier_result_is_kept(tmp_path):
    (tmp_path / "needle.json").write_text("mine")
    assert "choose another --out" in refused(2, "eval", "needle", "--out", tmp_path)
    assert (tmp_path / "needle.json").read_text() == "mine"


@pytest.mark.parametrize(
    ("missing", "command"),
    [
        ("scipy.stats", "ruler"),
        ("statsmodels.stats.proportion", "perplexity"),
        ("scipy.stats", "needle"),
        ("matplotlib", "needle"),
        ("matplotlib", "fidelity"),
        ("jinja2", "report"),
    ],
)
def test_a_missing_library_is_named_before_the_work(store, tmp_path, monkeypatch, missing, command):
    monkeypatch.setitem(sys.modules, missing, None)
    runs = [write_run(tmp_path / "run.jsonl", 0.9, questions=1)]
    given = {"report": runs, "fidelity": [store]}.get(command, [])
    said = refused(2, "eval", command, *given, "--out", tmp_path / "out")
    assert f"this needs {missing.partition('.')[0]}," in said
    assert "pip install 'offload-decode[eval]'" in said
    assert not (tmp_path / "out").exists()
