"""The suites ask all their tasks, and refuse what they do not have."""

from __future__ import annotations

import json

import pytest

from offload_decode.evals import tasks
from offload_decode.evals.runs import read
from tests.cli.conftest import refused, run
from tests.cli.test_eval_runs import _short

__all__ = ["_short"]


@pytest.mark.parametrize("suite", ["ruler", "aggregate"])
def test_a_suite_has_tasks_that_are_known(suite):
    module = __import__(f"offload_decode.evals.tasks.{suite}", fromlist=["SUITE"])
    assert set(module.SUITE) <= set(tasks.names())


def test_ruler_asks_what_is_named(home, tmp_path):
    out = tmp_path / "run.jsonl"
    small = ("--tasks", "niah_single_2", "--lengths", "600", "--limit", "1", "--budgets", "8,2%", "-q")
    ran = run("eval", "ruler", "--model", home / "model", *small, "--out", out)
    assert ran.code == 0, ran.err
    assert read(out).header.configuration["contenders"] == ["dense", "topk:budget=8", "topk:budget=2%"]
    assert "could not be told from chance" in ran.out  # one question is too few


def test_tasks_that_do_not_fit_are_left_out_unless_they_are_named(home, tmp_path):
    out = tmp_path / "run.jsonl"
    small = ("--lengths", "400", "--limit", "1", "--budgets", "8", "--out", out)
    ran = run("eval", "ruler", "--model", home / "model", *small)
    assert ran.code == 0, ran.err
    assert "qa_2 is left out: 400 tokens do not hold the facts" in ran.err
    asked = read(out).header.configuration["tasks"]
    assert "niah_single_2" in asked
    assert "qa_2" not in asked
    named = ("eval", "ruler", "--model", home / "model", *small[:-1], tmp_path / "none", "--tasks", "vt,qa_2")
    assert "400 tokens do not hold the facts" in refused(2, *named)


def test_passkey_asks_at_the_lengths_that_are_given(home, tmp_path):
    out = tmp_path / "run.jsonl"
    small = ("--lengths", "700", "--limit", "1", "--budgets", "16", "-q")
    ran = run("eval", "passkey", "--model", home / "model", *small, "--out", out)
    assert ran.code == 0, ran.err
    assert read(out).header.configuration["contenders"] == ["dense", "quest:budget=16", "topk:budget=16"]


def test_tasks_of_another_suite_are_refused():
    assert "there is no task 'vt' here" in refused(2, "eval", "aggregate", "--tasks", "vt")
    assert "--budgets" in refused(2, "eval", "ruler", "-o", "budget=3")


def test_what_would_be_lost_when_all_is_measured_is_refused_before(tmp_path):
    (tmp_path / "file").touch()
    asked = ("eval", "ruler", "--tasks", "vt", "--out", tmp_path / "run.jsonl")
    assert "is too large" in refused(2, *asked, "--seeds", f"0,{2**70}")
    assert "is no folder" in refused(2, *asked, "--stores", tmp_path / "file")
    assert not (tmp_path / "run.jsonl").exists()


def test_questions_come_from_a_file_of_the_users(home, tmp_path):
    paragraph = {
        "context": "The harbour master of Velm is called Ansa Tiro. She came in May.",
        "qas": [
            {
                "question": "Who is harbour master of Velm?",
                "answers": [{"text": "Ansa Tiro", "answer_start": 34}],
            }
        ],
    }
    others = [{"context": f"In the year {year} nothing happened.", "qas": []} for year in range(1200, 1260)]
    squad = {"data": [{"title": "Velm", "paragraphs": [paragraph, *others]}]}
    (tmp_path / "squad.json").write_text(json.dumps(squad))
    small = ("--tasks", "qa_1", "--lengths", "500", "--limit", "1", "--budgets", "8", "-q")
    asked = ("eval", "ruler", "--model", home / "model", *small, "--qa", tmp_path / "squad.json")
    ran = run(*asked, "--out", tmp_path / "run.jsonl")
    assert ran.code == 0, ran.err
    assert read(tmp_path / "run.jsonl").of("question")[0]["expected"] == ["Ansa Tiro"]
    assert "two files are for qa_1" in refused(2, *asked, "--qa", tmp_path / "squad.json")
    elsewhere = [*map(str, asked)]
    elsewhere[elsewhere.index("qa_1")] = "vt"
    assert "a file of --qa is for qa_1" in refused(2, *elsewhere, "--out", str(tmp_path / "other.jsonl"))
