"""What the benchmark of endurance calls lost or wrong."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks.endurance import injuries
from benchmarks.endurance.__main__ import dealt
from benchmarks.endurance.commands import Command, Home, left
from benchmarks.endurance.rounds import Outcome, Rounds
from benchmarks.endurance.serving import is_flat
from benchmarks.endurance.tally import Tally
from tests.prefill_jobs.killing import Ran

TOLD = "error: it is damaged.\n"


class Scripted:
    """A runner whose commands write a file as told, and end as told, one after another."""

    def __init__(self, *ends: tuple[int, str, str | None]) -> None:
        self.ends = list(ends)

    def run(self, command: list[str], **how: float) -> Ran:
        code, err, content = self.ends.pop(0)
        if content is not None:
            Path(command[0]).write_text(content)
        return Ran(code, "", err, 0.1, 1)


def outcome(tmp_path: Path, name: str, *ends: tuple[int, str, str | None]) -> Outcome:
    """Of one round of a command that writes "whole" when nothing happens to it."""
    runner = Scripted((0, "", "whole"), (0, "", "whole"), *ends)
    command = Command("write", "", lambda folder: [str(folder / "file")], lambda folder: ["/dev/null"])
    home = Home(runner, tmp_path / "whole")  # type: ignore[arg-type]
    home.add(command)
    rounds = Rounds(runner, home, tmp_path / "round", None, random.Random(0))  # type: ignore[arg-type]
    return rounds.of(command)[name]()


def test_the_same_command_again_ends_in_the_same_bytes(tmp_path: Path) -> None:
    killed, whole = (-9, "", "half"), (0, "", "whole")
    assert outcome(tmp_path / "1", "killed", killed, whole) == Outcome(True)
    assert outcome(tmp_path / "2", "memory cap", (1, TOLD, None), whole) == Outcome(True)
    assert outcome(tmp_path / "3", "killed", killed, (1, TOLD, None)).lost
    assert "differs in file" in outcome(tmp_path / "4", "killed", killed, (0, "", "whale")).wrong


@pytest.mark.parametrize(
    "ended", [(-11, ""), (-9, TOLD), (1, ""), (1, "Traceback"), (1, "error: unexpected Bug: x")]
)
def test_a_failure_without_a_sentence_is_wrong(tmp_path: Path, ended: tuple[int, str]) -> None:
    found = outcome(tmp_path, "memory cap", (*ended, None), (0, "", "whole"))
    assert ("hangs" if ended[0] == -9 else "without a sentence") in found.wrong


@pytest.mark.parametrize("name", ["bit flipped", "file cut"])
def test_damage_must_be_told_and_is_gone_with_the_file_restored(tmp_path: Path, name: str) -> None:
    told, whole = (1, TOLD, None), (0, "", None)
    assert outcome(tmp_path / "1", name, told, whole) == Outcome(True)
    assert "nobody was told" in outcome(tmp_path / "2", name, whole, whole).wrong
    assert outcome(tmp_path / "3", name, told, told).lost


def test_injuries_change_a_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    for injury in injuries.LYING.values():
        for seed in range(20):
            file.write_bytes(b"bytes")
            injury(file, random.Random(seed))
            assert file.read_bytes() != b"bytes"


def test_lines_count_as_a_set_and_without_their_folder(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        lines = [f'{{"store": "{tmp_path / name}/{number}"}}' for number in "12"]
        (tmp_path / name / "x.jsonl").write_text("\n".join(lines if name == "a" else lines[::-1]) + "\n")
    assert left(tmp_path / "a", tmp_path / "a") == left(tmp_path / "b", tmp_path / "b")
    (tmp_path / "b/x.jsonl").write_text("{}\n")
    assert left(tmp_path / "a", tmp_path / "a") != left(tmp_path / "b", tmp_path / "b")


def test_every_round_comes_as_often_as_any_other() -> None:
    deck = [(name, "", lambda: Outcome(True)) for name in "abc"]
    drawn = dealt(deck, random.Random(0))
    assert sorted(next(drawn)[0] for _ in range(6)) == ["a", "a", "b", "b", "c", "c"]


def test_the_tally_adds_up() -> None:
    tally = Tally()
    for told in (Outcome(True), Outcome(False), Outcome(True, lost="1: no"), Outcome(True, wrong="other")):
        tally.add("push", "killed", told, 0.5)
    total = tally.total()
    counts = total.times, total.struck, total.recovered, total.lost, total.wrong, total.seconds
    assert counts == (4, 3, 2, 1, 1, 2.0)
    assert tally.words == ["push, killed: 1: no", "push, killed: other"]
    assert "| push " in tally.text()


def test_memory_that_grows_is_not_flat() -> None:
    assert is_flat([100] * 30)
    assert is_flat([50, 80, *[100] * 28]), "it may fill its caches"
    assert not is_flat(list(range(100, 130)))
