"""The suites ask all their tasks, and refuse what they do not have."""

from __future__ import annotations

from pathlib import Path

import pytest

from offload_decode.evals import tasks
from offload_decode.evals.results import read
from tests.cli.conftest import refused, run
from tests.cli.test_eval_runs import _short

__all__ = ["_short"]


@pytest.mark.parametrize("suite", ["aggregate"])
def test_a_suite_has_tasks_that_are_known(suite: str) -> None:
    module = __import__(f"offload_decode.evals.tasks.{suite}", fromlist=["SUITE"])
    assert set(module.SUITE) <= set(tasks.names())


def test_ruler_asks_what_is_named(home: Path, tmp_path: Path) -> None:
    out = tmp_path / "run.jsonl"
    small = ("--tasks", "niah_single_2", "--lengths", "600", "--limit", "1", "--budgets", "8,2%", "-q")
    ran = run("eval", "ruler", "--model", home / "model", *small, "--out", out)
    assert ran.code == 0, ran.err
    assert read(out).header.configuration["contenders"] == ["dense", "topk:budget=8", "topk:budget=2%"]
    assert "This model answers no better than chance on the task niah_single_2" in ran.out


def test_passkey_asks_at_the_lengths_that_are_given(home: Path, tmp_path: Path) -> None:
    out = tmp_path / "run.jsonl"
    small = ("--lengths", "700", "--limit", "1", "--budgets", "16", "-q")
    ran = run("eval", "passkey", "--model", home / "model", *small, "--out", out)
    assert ran.code == 0, ran.err
    assert read(out).header.configuration["contenders"] == ["dense", "quest:budget=16", "topk:budget=16"]


def test_tasks_of_another_suite_are_refused() -> None:
    assert "there is no task 'vt' here" in refused(2, "eval", "aggregate", "--tasks", "vt")
    assert "--budgets" in refused(2, "eval", "ruler", "-o", "budget=3")
