"""What is said of a run: intervals, chance, controls, ratios to dense, and the worst before the mean."""

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest

from offload_decode.common.errors import ConfigError
from offload_decode.evals import runs, stats, summary
from offload_decode.evals.runs import ANSWER
from offload_decode.evals.stats import wilson, wilson_of
from offload_decode.evals.summary import Summary, at_chance, rows, summarize, verdict
from tests.evals.made_up import write_run


def summary_of(path: Path, *args: object, **kwargs: object) -> Summary:
    return summarize(runs.read(write_run(path / "run.jsonl", *args, **kwargs)))  # type: ignore[arg-type]


def test_newcombes_example() -> None:
    """56 of 70 against 48 of 80: his table II, method 10."""
    found = stats.difference(wilson_of(56 / 70, 70), wilson_of(48 / 80, 80))
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


def test_cells_hold_the_seeds_together_and_tell_their_spread(tmp_path: Path) -> None:
    found = summary_of(tmp_path, 0.5, questions=10, seeds=(0, 1, 2))
    for cell in found.cells:
        assert cell.score.count == 30
        assert cell.score.mean == pytest.approx(sum(cell.seeds.values()) / 3)
        assert cell.score == wilson(list(cell.scores.values()))
        assert cell.spread == max(cell.seeds.values()) - min(cell.seeds.values())
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
    assert "Dense attention itself is under 90 % in vt" in " ".join(verdict(found))
    nobody = summary_of(tmp_path / "other", 1.0, ways=("topk:budget=64",))
    assert all(cell.ratio is None for cell in nobody.cells)


def test_the_budget_from_which_on_a_task_is_answered_as_densely(tmp_path: Path) -> None:
    shares = {"dense": 1.0, "topk:budget=64": 1.0, "topk:budget=128": 0.5, "topk:budget=256": 1.0}
    shares |= {"topk:budget=512": 1.0, "quest:budget=64": 0.1, "quest:budget=128": 0.2, "h2o:budget=9": 1.0}
    found = summary_of(
        tmp_path, lambda _, __, way: shares[way], ways=tuple(shares), tasks=["vt"], lengths=[2048]
    )
    ((_, reached),) = found.reaching().items()
    assert reached["topk"] is not None
    assert reached["topk"].way == "topk:budget=256", "512 and 256 reach it, 128 does not"
    assert reached["quest"] is None
    assert "h2o" not in reached, "one budget tells nothing"


@pytest.mark.parametrize(
    ("way", "family", "budget"),
    [
        ("dense", "dense", None),
        ("topk:budget=2%", "topk", "2%"),
        ("quest:page_size=32,budget=64,metadata=int8", "quest:page_size=32,metadata=int8", "64"),
    ],
)
def test_ways_that_differ_in_their_budget_alone(way: str, family: str, budget: str | None) -> None:
    assert (summary.without_budget(way), summary.budget_of(way)) == (family, budget)


@pytest.mark.parametrize("guess", [0.0, 0.25])
def test_who_guesses_is_said_to_guess(tmp_path: Path, guess: float) -> None:
    found = summary_of(tmp_path, guess, guess=guess, control=guess, questions=60)
    first, *_ = verdict(found)
    assert first.startswith("This model answers no better than chance on every task")
    assert not any("do not trust" in sentence for sentence in verdict(found))
    assert sum(cell.at_chance for cell in found.cells) > 0.9 * len(found.cells)


@pytest.mark.parametrize(("right", "questions"), [(1.0, 1), (0.0, 2)])
def test_too_few_questions_are_said_to_be_too_few(tmp_path: Path, right: float, questions: int) -> None:
    """Not that the model guesses: it may well not."""
    first, *_ = verdict(summary_of(tmp_path, right, questions=questions))
    assert first.startswith(f"At most {questions} question")
    assert first.endswith("Ask more (--limit).")


def test_luck_in_one_of_many_cells_is_not_called_skill(tmp_path: Path) -> None:
    """Of many runs of guesses, at most one in twenty is said to do better than chance."""
    rng = random.Random(7)
    whole = summary_of(tmp_path, 0.25, guess=0.25)
    lucky = 0
    for _ in range(60):
        scores = [wilson_of(sum(rng.random() < 0.25 for _ in range(40)) / 40, 40) for _ in whole.cells]
        cells = [replace(cell, score=score) for cell, score in zip(whole.cells, scores, strict=True)]
        lucky += at_chance(replace(whole, cells=tuple(cells))) != list(whole.tasks)
    assert lucky <= 3


@pytest.mark.parametrize(
    ("right", "of", "guess", "better"),
    [(1, 20, 0.0, False), (2, 20, 0.0, True), (3, 20, 0.0, True), (3, 20, 0.1, False), (20, 20, 0.2, True)],
)
def test_a_few_answers_that_nobody_guesses_are_better_than_chance(
    tmp_path: Path, right: int, of: int, guess: float, better: bool
) -> None:
    """Questions are guessed at twenty times each, so that chance is known better than the score."""
    whole = summary_of(tmp_path, 0.5, guess=guess, control=0.0)
    cell = replace(whole.cells[0], score=wilson_of(right / of, of))
    assert cell.at_chance is not better
    lucky = replace(cell, control=wilson_of(0.4, 5))
    assert lucky.chance.mean == pytest.approx(0.4 if guess == 0 else guess), "two of five may be guessed"


def test_fishers_test_of_the_lady_tasting_tea() -> None:
    """All four cups of four told from four: one in 70 (The Design of Experiments, 1935)."""
    assert stats.larger(wilson_of(1.0, 4), wilson_of(0.0, 4)) == pytest.approx(1 / 70)
    assert stats.larger(wilson_of(0.75, 4), wilson_of(0.25, 4)) == pytest.approx(17 / 70)


def test_half_of_several_lists_is_more_than_chance(tmp_path: Path) -> None:
    """Four lists of which 40 % are right are no luck where no guess has ever named one thing of them."""
    cell = summary_of(tmp_path, 0.0).cells[0]
    half = dict.fromkeys(list(cell.scores)[:4], 0.4)
    listed = replace(cell, scores=half, score=wilson(list(half.values())))
    assert not listed.at_chance
    assert replace(listed, luckiest=0.5).at_chance, "a guess may have been as right"
    assert stats.exceeding([0.4] * 4, 0.0, 80) == pytest.approx(1 / math.comb(84, 4))
    one_of_four = stats.larger(wilson_of(1 / 4, 4), wilson_of(0, 80))
    assert stats.exceeding([0.4, 0, 0, 0], 0.0, 80) == pytest.approx(one_of_four)


def test_one_task_at_chance_is_named(tmp_path: Path) -> None:
    found = summary_of(tmp_path, lambda task, *_: 0.0 if task == "vt" else 0.9)
    assert verdict(found)[0] == "No better than chance, in every way: vt (of 3 tasks)."
    assert {cell.task for cell in found.cells if cell.at_chance} == {"vt"}
    assert [row[0] for row in rows(found) if row[-1] == "no better than chance"].count("vt") == 10


def test_a_cell_that_may_be_luck_is_not_called_a_guess(tmp_path: Path) -> None:
    """The sentence does not contradict the table, where a cell is marked if it is no better than chance."""
    whole = summary_of(tmp_path, lambda task, *_: 0.0 if task == "vt" else 0.9)
    lucky = wilson_of(2 / 40, 40)
    cells = [
        replace(cell, score=lucky, guess=0.0) if cell.task == "vt" and cell.way == "dense" else cell
        for cell in whole.cells
    ]
    found = replace(whole, cells=tuple(cells))
    assert at_chance(found) == ["vt"]
    assert not found.by_place["vt", 2048, "dense"].at_chance
    assert verdict(found)[0].startswith("Better than chance in single cells of vt (of 3 tasks)")


def test_an_answered_control_is_warned_of(tmp_path: Path) -> None:
    found = summary_of(tmp_path, 0.9, control=0.9, questions=40)
    warning = next(sentence for sentence in verdict(found) if "do not trust" in sentence)
    assert "niah_single_1, vt, cwe" in warning
    without = summary_of(tmp_path / "other", 0.9, control=None)
    assert not any("control" in sentence for sentence in verdict(without))
    assert all(cell.control is None for cell in without.cells)
    assert {row[8] for row in rows(without)[1:]} == {"-", ""}


def test_a_run_that_is_not_finished_says_so(tmp_path: Path) -> None:
    assert "120 of 127 parts" in " ".join(verdict(summary_of(tmp_path, 1.0, unfinished=7)))
    assert verdict(summary_of(tmp_path / "whole", 1.0)) == []


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
