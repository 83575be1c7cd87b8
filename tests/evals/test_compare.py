"""Two runs: p-values by their definitions, and a difference that is called one only where it is."""

import math
import random
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from offload_decode.common.errors import ConfigError
from offload_decode.evals.compare import Comparison, compare
from offload_decode.evals.runs import read as read_run
from offload_decode.evals.stats import holm, paired, unpaired
from tests.evals.made_up import MADE_WITH, WAYS, write_run


def two(path: Path, before: Any, after: Any, first: dict[str, Any], second: dict[str, Any]) -> Comparison:
    runs = write_run(path / "a.jsonl", before, **first), write_run(path / "b.jsonl", after, **second)
    return compare(*(read_run(run) for run in runs))


def test_mcnemars_exact_test_is_that_of_a_coin() -> None:
    first, second = [1.0] * 8 + [0.0] * 2 + [1.0] * 30, [0.0] * 8 + [1.0] * 2 + [1.0] * 30
    heads = sum(sum(coins) in (0, 1, 2, 8, 9, 10) for coins in product((0, 1), repeat=10))
    assert paired(first, second) == pytest.approx(heads / 2**10)
    assert paired(first, first) == 1.0


def test_few_differences_are_given_every_sign() -> None:
    first, second = [1.0, 0.75, 0.5, 1.0], [0.5, 0.5, 0.5, 0.0]
    differences = [0.5, 0.25, 1.0]
    sums = [
        sum(s * d for s, d in zip(signs, differences, strict=True)) for signs in product((1, -1), repeat=3)
    ]
    assert paired(first, second) == sum(abs(each) >= 1.75 for each in sums) / 8


def test_many_differences_are_much_as_if_each_sign_were_tried() -> None:
    rng = random.Random(0)
    first = [rng.choice((0.0, 0.5, 1.0)) for _ in range(60)]
    second = [rng.choice((0.0, 0.5, 0.5, 1.0)) for _ in range(60)]
    found = [a - b for a, b in zip(first, second, strict=True)]
    drawn = [abs(sum(rng.choice((1, -1)) * each for each in found)) for _ in range(4000)]
    assert paired(first, second) == pytest.approx(sum(d >= abs(sum(found)) for d in drawn) / 4000, abs=0.06)


def test_two_groups() -> None:
    assert unpaired([1.0] * 30, [1.0] * 20) == 1.0
    assert unpaired([1.0] * 5 + [0.0] * 5, [1.0] * 5 + [0.0] * 5) == 1.0
    assert unpaired([1.0] * 40 + [0.0] * 10, [1.0] * 20 + [0.0] * 30) < 1e-4
    # The table's chi-squared with N - 1 for N, and one degree of freedom.
    squared = 39 * (12 * 14 - 8 * 6) ** 2 / (20 * 20 * 18 * 22)
    p = unpaired([1.0] * 12 + [0.0] * 8, [1.0] * 6 + [0.0] * 14)
    assert p == pytest.approx(math.erfc(math.sqrt(squared / 2)))


def test_holms_correction() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


@pytest.mark.parametrize("level", [0.05, 0.01, 0.05 / 30])
@pytest.mark.parametrize("share", [0.5, 0.7, 0.9])
def test_noise_is_called_change_as_rarely_as_is_said(share: float, level: float) -> None:
    """Of all pairs of runs of 20 questions that are answered rightly with one probability."""
    each = [math.comb(20, right) * share**right * (1 - share) ** (20 - right) for right in range(21)]
    called = sum(
        each[one] * each[other]
        for one, other in product(range(21), repeat=2)
        if unpaired([1.0] * one + [0.0] * (20 - one), [1.0] * other + [0.0] * (20 - other)) < level
    )
    assert called <= 1.1 * level


def test_another_draw_of_questions_is_two_groups(tmp_path: Path) -> None:
    found = two(tmp_path, 0.7, 0.7, {"luck": 1}, {"luck": 2})
    assert all(change.pairs == 0 for change in found.changes)
    assert not any(change.more_than_noise for change in found.changes)


def test_a_change_is_found_in_pairs_and_named(tmp_path: Path) -> None:
    def worse(task: str, _: int, way: str) -> float:
        return 0.5 if (task, way) == ("vt", "topk:budget=64") else 0.9

    model = {"made_with": {**MADE_WITH, "versions": {**MADE_WITH["versions"], "torch": "3.0"}}}
    found = two(tmp_path, 0.9, worse, {"questions": 60}, {"questions": 60, **model})
    noisy = [change for change in found.changes if change.more_than_noise]
    assert {(change.task, change.way) for change in noisy} == {("vt", "topk:budget=64")}
    assert found.changes[: len(noisy)] == tuple(noisy)
    assert all(change.pairs == 60 for change in found.changes)
    assert all(change.change.low <= change.change.mean <= change.change.high < 0 for change in noisy)
    together = [mean for mean in found.means if mean.more_than_noise]
    assert {mean.way for mean in together} == {"topk:budget=64"}
    assert all(mean.change.low <= mean.change.mean <= mean.change.high < 0 for mean in together)
    assert all((mean.tasks, mean.pairs) == (3, 180) for mean in found.means)
    assert found.differs == {"versions.torch": ("2.13.0", "3.0")}
    assert found.bytes_ratio == found.seconds_ratio == 1.0


@pytest.mark.parametrize("luck", [0, 1])
def test_few_questions_of_many_tasks_tell_together(tmp_path: Path, luck: int) -> None:
    """Four a task never do by themselves: 2 / 2**4 of all signs are as far off."""
    asked = {"questions": 4, "lengths": [2048], "ways": WAYS[:1]}
    found = two(tmp_path, 1.0, 0.0, asked, asked | {"luck": luck})
    assert not [change for change in found.changes if luck == 0 and change.more_than_noise]
    (mean,) = found.means
    assert (mean.before, mean.after, mean.pairs) == (1, 0, 0 if luck else 12)
    assert mean.p == pytest.approx(2 / 2**12) if luck == 0 else mean.p < 1e-4


def test_one_task_has_no_mean(tmp_path: Path) -> None:
    found = two(tmp_path, 0.9, 0.9, {"tasks": ["vt"]}, {"tasks": ["vt"]})
    assert not found.means


def test_pairs_need_the_same_questions_of_the_same_text(tmp_path: Path) -> None:
    again = two(tmp_path, 0.9, 0.9, {}, {})
    assert all(change.pairs == 20 and change.p == 1.0 for change in again.changes)
    (tmp_path / "other").mkdir()
    run = write_run(tmp_path / "other" / "b.jsonl", 0.9)
    run.write_text(run.read_text().replace("ab" * 32, "cd" * 32))
    other = compare(read_run(tmp_path / "a.jsonl"), read_run(run))
    assert all(change.pairs == 0 for change in other.changes)


@pytest.mark.parametrize("other", [{"device": "cuda:0"}, {"processor": "another"}])
def test_times_of_other_machines_are_not_compared(tmp_path: Path, other: dict[str, str]) -> None:
    found = two(tmp_path, 0.9, 0.9, {}, {"made_with": {**MADE_WITH, **other}})
    assert found.seconds_ratio is None
    assert found.bytes_ratio == 1.0


def test_what_only_one_run_has_is_told_and_other_runs_are_refused(tmp_path: Path) -> None:
    found = two(tmp_path, 0.9, 0.9, {"ways": WAYS[:3]}, {"ways": WAYS[:2]})
    assert len(found.changes) == 12
    assert len(found.only[0]) == 6
    assert found.only[1] == ()
    for name, other in (("tasks", {"tasks": ["qa_1"]}), ("evaluation", {"evaluation": "passkey"})):
        (tmp_path / name).mkdir()
        with pytest.raises(ConfigError, match=r"in common|compare two runs of one evaluation"):
            two(tmp_path / name, 0.9, 0.9, {}, other)
