"""Results: written unit by unit, gone on with after a kill, refused where they are of something else."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from offload_decode.common.errors import ConfigError
from offload_decode.evals import runs
from offload_decode.evals.runs import Header, Record, Unit
from offload_decode.evals.stats import wilson

FIRST = (
    '{"record": "run", "format": 1, "evaluation": "x", "configuration": {}, "made_with": {}, "units": 1, '
    '"started": ""}\n'
)
HEADER = Header("counting", {"seed": 1}, {"model": "m"}, 3, "2026-01-01T00:00:00+00:00")


def written(path: Path, units: Sequence[str]) -> None:
    with runs.opened(path, HEADER) as (write, _):
        for unit in units:
            write(runs.unit_records(unit, [{"record": "answer", "said": unit * 2}], 0.5))


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "new" / "run.jsonl"
    written(path, ["a", "b"])
    found = runs.read(path)
    assert found.header == HEADER
    assert found.records == (
        {"record": "answer", "unit": "a", "said": "aa"},
        {"record": "answer", "unit": "b", "said": "bb"},
    )
    assert found.finished == {"a", "b"}
    assert len(found.finished) < found.header.units


def test_a_million_records_hold_the_same_strings_once(tmp_path: Path) -> None:
    written(path := tmp_path / "run.jsonl", ["a", "b"])
    first, second = runs.read(path).records
    for one, other in zip(first, second, strict=True):
        assert one is other
    assert first["record"] is second["record"]


def test_a_file_without_a_whole_line_is_not_called_empty(tmp_path: Path) -> None:
    for text, said in (("hello", "its first line is not whole"), ("", "it is empty")):
        (path := tmp_path / "run.jsonl").write_text(text)
        with pytest.raises(ConfigError, match=f"as results of an evaluation: {said}"):
            runs.read(path)


@pytest.mark.parametrize("cut", range(1, 200, 7))
def test_a_file_cut_anywhere_loses_its_last_unit_at_most_and_is_gone_on_with(
    tmp_path: Path, cut: int
) -> None:
    path = tmp_path / "run.jsonl"
    written(path, ["a", "b"])
    whole = path.read_bytes()
    start = whole.index(b'{"record": "answer"', whole.index(b'"unit": "a", "seconds"'))
    path.write_bytes(whole[: max(start, len(whole) - cut)])
    assert runs.read(path).finished == {"a"}
    written(path, ["b", "c"])
    found = runs.read(path)
    assert found.finished == {"a", "b", "c"}
    assert len(found.finished) == found.header.units
    assert [record["said"] for record in found.records] == ["aa", "bb", "cc"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"configuration": {"seed": 2}}, "seed"),
        ({"made_with": {"model": "other"}}, "model"),
        ({"evaluation": "other"}, "evaluation"),
    ],
)
def test_results_of_another_run_are_left_alone(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    path = tmp_path / "run.jsonl"
    written(path, ["a"])
    before = path.read_bytes()
    other = dataclasses.replace(HEADER, **change)
    with pytest.raises(ConfigError, match=f"differs in {named}"), runs.opened(path, other):
        raise AssertionError("it was opened")
    assert path.read_bytes() == before


def test_half_characters_of_file_names_are_kept(tmp_path: Path) -> None:
    name = "\udc80 \u00e9 \U0001f600 \\udc80"
    with runs.opened(tmp_path / "run.jsonl", HEADER) as (write, _):
        write(runs.unit_records("a", [{"record": "answer", "said": name}], 0.5))
    assert runs.read(tmp_path / "run.jsonl").records[0]["said"] == name


@pytest.mark.parametrize("left", [0, 5, 40, None])
def test_a_run_that_was_ended_before_anything_was_finished_is_in_nobodys_way(
    tmp_path: Path, left: int | None
) -> None:
    path = tmp_path / "run.jsonl"
    written(path, [])
    path.write_bytes(path.read_bytes()[:left])
    other = dataclasses.replace(HEADER, configuration={"seed": 2})
    with runs.opened(path, other) as (write, _):
        write(runs.unit_records("a", [], 0.1))
    assert runs.read(path).header == other


def test_one_process_writes_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with (
        runs.opened(path, HEADER),
        pytest.raises(ConfigError, match="another process writes"),
        runs.opened(path, HEADER),
    ):
        raise AssertionError("it was opened twice")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no JSON\n",
        "years of work",
        "[1]\n",
        '{"record": "answer"}\n',
        FIRST.replace('"format": 1', '"format": 99'),
        FIRST + '{"record": "answer"}\n',
    ],
)
def test_other_files_are_refused_in_a_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other"
    path.write_text(text)
    with pytest.raises(ConfigError, match="cannot be read as results"):
        runs.read(path)
    if text:  # an empty file is nobody's, and may be written
        with pytest.raises(ConfigError, match="cannot be read as results"), runs.opened(path, HEADER):
            raise AssertionError("it was opened")
        assert path.read_text() == text


def test_no_file_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="eval"):
        runs.read(tmp_path / "none")
    with pytest.raises(ConfigError, match="choose another --out"), runs.opened(tmp_path, HEADER):
        raise AssertionError("it was opened")


class Counting:
    """Three units; the second fails the first time."""

    name = "counting"

    def __init__(self, fails: set[str]) -> None:
        self.fails, self.measured = fails, []  # type: ignore[var-annotated]

    def configuration(self) -> Mapping[str, Any]:
        return {"values": (1, 2)}

    def units(self) -> Sequence[Unit]:
        return [Unit(key, 10) for key in "abc"]

    def measure(self, unit: Unit, report: Callable[[int], None]) -> Sequence[Record]:
        self.measured.append(unit.key)
        report(4)
        if unit.key in self.fails:
            raise RuntimeError("killed")
        return [{"record": "count", "value": ord(unit.key)}]


def test_a_run_goes_on_where_it_was_and_counts_what_it_prefills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "made_with", lambda loaded: {"model": loaded})
    told: list[tuple[int, int]] = []
    failing, going_on = Counting({"b"}), Counting(set())
    with pytest.raises(RuntimeError):
        runs.run(failing, "m", tmp_path / "run.jsonl")  # type: ignore[arg-type]
    found = runs.run(going_on, "m", tmp_path / "run.jsonl", lambda *now: told.append(now))  # type: ignore[arg-type]
    assert failing.measured == ["a", "b"]
    assert going_on.measured == ["b", "c"]
    assert [record["value"] for record in found.of("count")] == [97, 98, 99]
    assert told == [(10, 30), (14, 30), (20, 30), (24, 30), (30, 30)]


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),
    # Values of Wilson's interval as R's prop.test(x, n, correct = FALSE) prints them.
    [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (5, 10, 0.2366, 0.7634), (99, 100, 0.9455, 0.9982)],
)
def test_wilson_intervals(right: int, count: int, low: float, high: float) -> None:
    share = wilson([1.0] * right + [0.0] * (count - right))
    assert (share.mean, share.count) == (right / count, count)
    assert (share.low, share.high) == pytest.approx((low, high), abs=1e-4)
