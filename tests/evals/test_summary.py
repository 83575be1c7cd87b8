"""The tables of a run: intervals, chance, controls, ratios to dense, and the worst before the mean."""

from dataclasses import replace
from pathlib import Path

import pytest

from offload_decode.common.errors import ConfigError
from offload_decode.evals import runs, stats, summary
from offload_decode.evals.runs import ANSWER
from offload_decode.evals.stats import wilson
from offload_decode.evals.summary import Summary, rows, summarize
from tests.evals.made_up import write_run


def summary_of(path: Path, *args: object, **kwargs: object) -> Summary:
    return summarize(runs.read(write_run(path / "run.jsonl", *args, **kwargs)))  # type: ignore[arg-type]


def test_newcombes_example() -> None:
    """56 of 70 against 48 of 80: his table II, method 10."""
    found = stats.difference(
        *(wilson([1.0] * right + [0.0] * (of - right)) for right, of in ((56, 70), (48, 80)))
    )
    assert (found.mean, found.low, found.high) == pytest.approx((0.2, 0.0524, 0.3339), abs=5e-5)


def test_pairs_tell_more_than_two_groups() -> None:
    first = [1.0] * 60 + [0.0] * 40
    second = [1.0] * 50 + [0.0] * 50
    paired, apart = stats.paired_difference(first, second), stats.difference(wilson(first), wilson(second))
    assert paired.mean == apart.mean == pytest.approx(0.1)
    assert apart.low < 0 < paired.low < paired.high < apart.high
    same = stats.paired_difference([1.0] * 10, [1.0] * 10)
    assert same.low < 0 < same.high


def test_the_mean_of_many_tasks_is_surer_than_one() -> None:
    one = wilson([1.0, 0.0, 1.0, 1.0])
    four = stats.mean_of([one] * 4)
    assert four.mean == one.mean
    assert (four.high - four.low) == pytest.approx((one.high - one.low) / 2)


def test_cells_hold_the_seeds_together(tmp_path: Path) -> None:
    found = summary_of(tmp_path, 0.5, questions=10, seeds=(0, 1, 2))
    for cell in found.cells:
        assert cell.score.count == 30
        assert cell.score.mean == pytest.approx(sum(cell.seeds.values()) / 3)
        assert cell.score == wilson(list(cell.scores.values()))
    assert found.tasks == ("niah_single_1", "vt", "cwe")
    assert found.lengths == (2048, 8192)


def test_the_worst_task_comes_before_the_mean(tmp_path: Path) -> None:
    found = summary_of(tmp_path, lambda task, *_: {"niah_single_1": 1.0, "vt": 0.4, "cwe": 0.9}[task])
    (head, *_) = found.headlines()
    assert head.worst.task == "vt"
    assert head.mean.mean == pytest.approx(sum(c.score.mean for c in found.cells[:: len(found.ways)][:3]) / 3)
    heading, first, second, *_ = rows(found)
    assert heading[0] == "accuracy in %"
    assert (first[0], second[0]) == ("worst: vt", "mean of 3 tasks")
    assert {len(row) for row in rows(found)} == {len(heading)}


def test_a_ratio_to_dense_stands_only_where_dense_is_right(tmp_path: Path) -> None:
    found = summary_of(
        tmp_path, lambda task, length, way: 0.5 if task == "vt" else 1.0 if way == "dense" else 0.8
    )
    for cell in found.cells:
        assert (cell.ratio is None) == (cell.task == "vt" or cell.way == "dense")
        if cell.ratio is not None:
            assert cell.ratio == pytest.approx(cell.score.mean)
    nobody = summary_of(tmp_path / "other", 1.0, ways=("topk:budget=64",))
    assert all(cell.ratio is None for cell in nobody.cells)


@pytest.mark.parametrize(
    ("way", "family"),
    [
        ("dense", "dense"),
        ("topk:budget=2%", "topk"),
        ("quest:page_size=32,budget=64,metadata=int8", "quest:page_size=32,metadata=int8"),
    ],
)
def test_ways_that_differ_in_their_budget_alone(way: str, family: str) -> None:
    assert summary.without_budget(way) == family


def test_chance_is_what_guesses_score_or_the_control_where_that_is_more(tmp_path: Path) -> None:
    found = summary_of(tmp_path, 0.9, guess=0.25, control=1.0)
    assert {(cell.guess, cell.chance) for cell in found.cells} == {(0.25, 1.0)}
    less = summary_of(tmp_path / "less", 0.9, guess=0.25, control=0.0)
    assert {cell.chance for cell in less.cells} == {0.25}
    without = summary_of(tmp_path / "without", 0.9, guess=0.25, control=None)
    assert {(cell.control, cell.chance) for cell in without.cells} == {(None, 0.25)}
    assert {row[8] for row in rows(without)[1:]} == {"-", ""}


def test_what_does_not_fit_together_is_refused(tmp_path: Path) -> None:
    empty = write_run(tmp_path / "empty.jsonl", tasks=[], unfinished=1)
    with pytest.raises(ConfigError, match="holds no answers to questions"):
        summarize(runs.read(empty))
    measured = replace(runs.read(empty), finished=frozenset({"place 0"}))
    with pytest.raises(ConfigError, match="asks none; `eval report` shows"):
        summarize(measured)
    path = write_run(tmp_path / "run.jsonl", questions=1)
    before = path.read_text()
    path.write_text(before.replace('"score": 1.0', '"score": 1.5', 1))
    with pytest.raises(ConfigError, match="no proper 'score'"):
        summarize(runs.read(path))
    lines = before.splitlines()
    twice = next(i for i, line in enumerate(lines) if f'"record": "{ANSWER}"' in line)
    path.write_text("\n".join([*lines[:twice], lines[twice], *lines[twice:]]) + "\n")
    with pytest.raises(ConfigError, match="two answers by 'dense'"):
        summarize(runs.read(path))
