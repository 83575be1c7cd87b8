"""Tables of aims and of the papers' methods: from results that nobody measured."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks import aims, evaluated, papers
from benchmarks.evaluated import Run
from cli.counts import token_count
from cli.eval.run import contenders_of, tasks_named
from offload_decode.evals import runs, tasks
from offload_decode.evals.contender import DENSE
from offload_decode.evals.stats import Share
from offload_decode.evals.summary import Summary, summarize
from tests.evals.made_up import write_run

EVERY = [
    *aims.runs(["diary.txt", "notes"], "8K,32K", "8K", 100),
    *papers.runs("diary.txt", ["8K", "32K"], 25, "64,256"),
]


def option(run: Run, name: str) -> list[str]:
    given = run.arguments
    return [given[at + 1] for at, part in enumerate(given) if part == name]


@pytest.mark.parametrize("run", EVERY, ids=lambda run: run.name)
def test_every_run_is_one_that_the_command_takes(run: Run) -> None:
    """Its tasks are known and its selectors are not refused."""
    (names,), (lengths,) = option(run, "--tasks"), option(run, "--lengths")
    assert tasks_named(names, tasks.names())
    assert all(token_count(length) >= 8000 for length in lengths.split(","))
    budgets = option(run, "--budgets") or ["64"]
    ways = contenders_of(option(run, "-s"), budgets[0], None)
    assert bool(ways) == (option(run, "-s") != [DENSE])


def test_runs_have_files_of_their_own() -> None:
    assert len({run.name for run in EVERY}) == len(EVERY)


def test_questions_are_shared_among_texts_where_they_hide_in_prose() -> None:
    asked = {run.name: option(run, "--limit") for run in aims.runs(["a", "b", "c"], "8K", "8K", 100)}
    assert asked["needles-a"] == asked["several-c"] == ["34"]
    assert asked["needles"] == ["100"]


def made_up(path: Path, *args: Any, **kwargs: Any) -> Summary:
    return summarize(runs.read(write_run(path, *args, **kwargs)))


def test_an_aim_is_judged_by_all_texts_together(tmp_path: Path) -> None:
    one = made_up(tmp_path / "a", 1.0, tasks=("niah_single_2",), lengths=(8192,), ways=(DENSE,))
    two = made_up(tmp_path / "b", 0.0, tasks=("niah_single_2",), lengths=(8192,), ways=(DENSE,))
    found = aims.scored({"needles-a": one, "needles-b": two})
    worst, mean, row = aims.rows(found)
    assert (worst[0], mean[0]) == ("worst: niah_single_2", "mean of 1")
    assert worst[3] == mean[3] == row[3]
    assert row[:3] == ["niah_single_2", "8,192", "40"]
    assert row[3].startswith("50 (")
    assert row[4:] == ["a 100, b 0", "0", "99", "missed"]


def test_models_stand_side_by_side(tmp_path: Path) -> None:
    def model(name: str, **right: float) -> list[aims.Scored]:
        given = {"tasks": tuple(right), "lengths": (8192,), "ways": (DENSE,), "questions": 10}
        return aims.scored({"several": made_up(tmp_path / name, lambda task, *_: right[task], **given)})

    heads, rows = aims.side_by_side({"one": model("a", vt=1.0, cwe=0.0), "two": model("b", vt=0.0)})
    assert heads == ["task", "tokens", "one", "two", "aim"]
    assert [row[0] for row in rows] == ["worst", "mean", "vt", "cwe"]
    assert rows[0][2].startswith("cwe 0 (")
    assert rows[0][3].startswith("vt 0 (")
    assert rows[1][2].startswith("50 (")
    assert [row[-1] for row in rows] == ["", "", "90", "80"]
    assert rows[3][3] == ""


def test_too_few_questions_miss_no_aim() -> None:
    assert aims.verdict(0.99, Share(0.98, 50, 0.9, 0.999)) == "not told apart"
    assert aims.verdict(0.99, Share(0.9, 100, 0.83, 0.95)) == "missed"
    assert aims.verdict(0.99, Share(1.0, 20, 0.84, 1.0)) == "met"


def test_methods_stand_beside_dense_and_the_sparse_prefill(tmp_path: Path) -> None:
    found = made_up(tmp_path / "a", lambda task, length, way: float(way == DENSE or "256" in way))
    sparse = made_up(tmp_path / "b", 0.5, ways=(DENSE,))
    summaries = {"found-8K": found, "quoka-8K": sparse}
    heads, rows = papers.by_method(summaries, 8192)
    assert heads == ["method", "niah_single_1", "vt", "cwe"]
    assert rows[0][0] == DENSE
    assert rows[-1][0] == f"QuoKA prefill, {DENSE}"
    assert rows[0][1].startswith("100 (")
    heads, rows = papers.enough(summaries)
    assert heads[:4] == ["task", "tokens", "dense", "topk"]
    assert all(row[3].startswith("256 (") for row in rows)


def test_no_budget_is_named_where_dense_itself_fails(tmp_path: Path) -> None:
    _, rows = papers.enough({"found": made_up(tmp_path / "a", 0.5)})
    assert all(cell == "dense is under 90%" for row in rows for cell in row[3:])


def test_a_run_is_a_command_and_a_failure_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        ran.append(command)
        write_run(Path(command[-1]), 1.0)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(evaluated.subprocess, "run", run)
    found = evaluated.run_all([Run("a", ("ruler",), "diary.txt"), Run("b", ("ruler",))], "demo", tmp_path)
    assert set(found) == {"a", "b"}
    assert ran[0][1:-1] == ["eval", "ruler", "--model", "demo", "--text", "diary.txt", "--out"]
    assert "--text" not in ran[1]
    monkeypatch.setattr(
        evaluated.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 2)
    )
    with pytest.raises(SystemExit, match="exit code 2"):
        evaluated.run_all([Run("a", ("ruler",))], "demo", tmp_path)
