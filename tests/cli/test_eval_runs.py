"""Commands that ask questions: one file that is gone on with, and mistakes told before a model loads."""

from __future__ import annotations

import json

import pytest

from offload_decode.evals import answering
from offload_decode.evals.runs import read
from offload_decode.evals.side_by_side import WayAnswer
from tests.cli.conftest import refused, run

ASK = ("--tasks", "plain-fact", "--lengths", "200", "--limit", "1", "-q")


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    real = answering.reply

    def short(engine: object, way: str, question: str, most: int, begun: str = "") -> WayAnswer:
        return real(engine, way, question, 2, begun)  # type: ignore[arg-type]

    monkeypatch.setattr(answering, "reply", short)


def test_options_given_twice_make_a_grid(home, tmp_path):
    out = tmp_path / "made" / "run.jsonl"
    grid = ("-o", "budget=8", "-o", "budget=16", "-o", "tail=off", "-o", "tail=sample")
    ran = run("eval", "ablation", "--model", home / "model", *ASK, *grid, "--out", out)
    assert ran.code == 0, ran.err
    assert read(out).header.configuration["contenders"] == [
        "dense",
        "topk:budget=8,tail=off",
        "topk:budget=8,tail=sample",
        "topk:budget=16,tail=off",
        "topk:budget=16,tail=sample",
    ]
    again = run("eval", "ablation", "--model", home / "model", *ASK, *grid, "--out", out)
    assert (again.code, again.out) == (0, ran.out)


def test_another_run_does_not_write_over_results(home, tmp_path):
    out = tmp_path / "run.jsonl"
    assert run("eval", "ablation", "--model", home / "model", *ASK, "--out", out).code == 0
    before = out.read_bytes()
    message = refused(2, "eval", "ablation", "--model", home / "model", *ASK, "--seeds", "3", "--out", out)
    assert "differs in seeds: choose another --out" in message
    assert out.read_bytes() == before


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--tasks", "nedle"), "there is no task 'nedle' here; choose from"),
        (("-o", "budgt=3"), "budgt"),
        (("-s", "none"), "unknown selector 'none'"),
        (("--seeds", "x"), "'x' are no seeds"),
        (("--lengths", "x"), "'x' is no number of tokens"),
        (("--prefill", "none"), "unknown prefill method 'none'"),
    ],
)
def test_mistakes_are_told_in_a_sentence(home, options, said):
    assert said in refused(2, "eval", "ablation", "--model", "no-such-model", *options)


def test_json_has_the_records(home, tmp_path):
    out = tmp_path / "run.jsonl"
    ran = run("eval", "ablation", "--model", home / "model", *ASK, "--json", "--out", out)
    assert len(json.loads(ran.out)["records"]) == len(read(out).records)
