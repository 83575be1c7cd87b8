"""A renewal that is killed with SIGKILL at any moment, and run again, ends as a prefill of the new corpus;
the store is the earlier or the new one all the while.
"""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.prefill_jobs import killing
from tests.prefill_jobs.killing import Runner, tree
from tests.prefill_jobs.test_append_kill import CHUNK, store_of

OLD = {name: f"{name} is {number}, and " * (6 + 3 * number) for number, name in enumerate("abcd")}
NEW = {
    "shorter": OLD | {"c": OLD["c"][:100] + OLD["c"][110:]},
    "longer": OLD | {"c": OLD["c"][:100] + " besides, " + OLD["c"][100:], "e": "e is new"},
}
Files = dict[str, bytes]


class Renewals:
    """A store of the old corpus; what lies in its folder after a renewal to a new one, and the steps."""

    def __init__(self, runner: Runner, home: Path, model: Path) -> None:
        self.runner, self.home, self.model = runner, home, model
        for name, texts in {"old": OLD, **NEW}.items():
            (home / name).mkdir()
            for file, text in texts.items():
                (home / name / f"{file}.txt").write_text(text)
        self.prefill("old", home / "begun/store.kv")
        assert runner.run(killing.index(home / "begun/store.kv", "clusters")).code == 0
        self.begun = tree(home / "begun")
        self.ends: dict[str, Files] = {}
        self.steps: dict[str, int] = {}
        for name in (*NEW, *NEW):  # what the first run compiles, and keeps for later ones, is not counted
            folder = home / "first" / name
            self.start(folder)
            ran = runner.run(self.command(folder, name))
            assert ran.code == 0, ran
            self.ends[name], self.steps[name] = tree(folder), ran.steps

    def prefill(self, name: str, store: Path) -> None:
        ran = self.runner.run(killing.prefill(self.home / name, self.model, store, *CHUNK))
        assert ran.code == 0, ran

    def command(self, folder: Path, name: str) -> list[str]:
        return ["renew", str(folder / "store.kv"), str(self.home / name)]

    def start(self, folder: Path) -> None:
        """Put into a folder what lies there before a renewal, and nothing else."""
        shutil.rmtree(folder, ignore_errors=True)
        for name, data in self.begun.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)


@pytest.fixture(scope="module")
def renewals(runner: Runner, inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Renewals:
    return Renewals(runner, tmp_path_factory.mktemp("renewals"), inputs / "model")


@pytest.mark.parametrize("name", NEW)
def test_a_renewal_is_a_prefill(renewals: Renewals, tmp_path: Path, name: str) -> None:
    renewals.prefill(name, tmp_path / "whole.kv")
    assert store_of(renewals.ends[name]) == tree(tmp_path / "whole.kv")


def anywhere(seed: int) -> Callable[[int], int]:
    draw = random.Random(seed)
    return lambda steps: draw.randrange(1, steps + steps // 6)


@pytest.mark.parametrize("name", NEW)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 9))])
def test_killed_anywhere_again_and_again(renewals: Renewals, tmp_path: Path, name: str, seed: int) -> None:
    renewals.start(tmp_path)
    command, when = renewals.command(tmp_path, name), anywhere(seed)
    while (ran := renewals.runner.run(command, kill_at=when(renewals.steps[name]))).killed:
        assert store_of(tree(tmp_path)) in (store_of(renewals.begun), store_of(renewals.ends[name]))
    assert ran.code == 0, ran
    assert tree(tmp_path) == renewals.ends[name]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 9))])
def test_edited_again_after_every_kill(renewals: Renewals, tmp_path: Path, seed: int) -> None:
    """What each killed run had begun makes way for the next text: none of it is in the end."""
    renewals.start(tmp_path)
    draw = random.Random(seed)
    stores = [store_of(found) for found in (renewals.begun, *renewals.ends.values())]
    names = [draw.choice([*NEW, "old"]) for _ in range(4)] + ["longer"]
    for name in names[:-1]:
        kill_at = draw.randrange(1, max(renewals.steps.values()))
        ran = renewals.runner.run(renewals.command(tmp_path, name), kill_at=kill_at)
        assert ran.killed or ran.code == 0, ran
        assert store_of(tree(tmp_path)) in stores
    ran = renewals.runner.run(renewals.command(tmp_path, names[-1]))
    assert ran.code == 0, ran
    assert tree(tmp_path) == renewals.ends["longer"]


@pytest.mark.parametrize(
    "from_the_end", [1, 9, 24, *(pytest.param(step, marks=pytest.mark.slow) for step in (3, 16, 30))]
)
def test_killed_while_it_is_published(renewals: Renewals, tmp_path: Path, from_the_end: int) -> None:
    renewals.start(tmp_path)
    command, kill_at = renewals.command(tmp_path, "shorter"), renewals.steps["shorter"] - from_the_end
    ran = renewals.runner.run(command, kill_at=kill_at)
    assert ran.killed or ran.steps < kill_at  # threads may make a few steps less
    ran = renewals.runner.run(command)
    assert ran.code == 0, ran
    assert tree(tmp_path) == renewals.ends["shorter"]
