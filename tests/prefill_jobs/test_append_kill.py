"""An append that is killed with SIGKILL at any moment, and run again, ends as one prefill; the store is the
earlier or the longer one all the while.
"""

import json
import random
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.prefill_jobs import killing
from tests.prefill_jobs.killing import PAGE, Disk, Runner, told, tree

TEXTS = {name: f"{name} is {number}, and " * (6 + 3 * number) for number, name in enumerate("abcd")}
CHUNK = ("-o", "chunk=64")
Tree = dict[str, bytes]


@dataclass
class Appends:
    """Two appends to a store and its index: `home` has their corpora `c` and `d`, `begun` the store, `trees`
    what its folder holds before and after each, and `steps` the changes of the file system that each makes.
    """

    runner: Runner
    home: Path
    begun: Path
    trees: list[Tree]
    steps: list[int]

    def command(self, folder: Path, number: int, *more: str) -> list[str]:
        return ["append", str(folder / "store.kv"), str(self.home / "cd"[number]), *more]

    def start(self, folder: Path, number: int = 0) -> None:
        """Put into a folder what lies there before an append."""
        for name, data in self.trees[number].items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)


@pytest.fixture(scope="module")
def appends(runner: Runner, inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Appends:
    home = tmp_path_factory.mktemp("appends")
    for folder in ("ab", "abcd", "c", "d"):
        (home / folder).mkdir()
        for name in folder:
            (home / folder / f"{name}.txt").write_text(TEXTS[name])
    model, begun = inputs / "model", home / "begun"
    for command in (
        killing.prefill(home / "ab", model, begun / "store.kv", *CHUNK),
        killing.index(begun / "store.kv", "clusters"),
        killing.prefill(home / "abcd", model, home / "whole.kv", *CHUNK),
    ):
        assert runner.run(command).code == 0
    made = Appends(runner, home, begun, [tree(begun)], [])
    made.start(home / "first")  # so that what is compiled, and kept for later runs, is not counted
    for number in range(2):
        assert runner.run(made.command(home / "first", number)).code == 0
        ran = runner.run(made.command(begun, number))
        assert ran.code == 0, ran
        made.trees.append(tree(begun))
        made.steps.append(ran.steps)
    return made


def store_of(found: Tree) -> Tree:
    return {
        name.removeprefix("store.kv/"): data for name, data in found.items() if name.startswith("store.kv/")
    }


def test_two_appends_are_one_prefill(appends: Appends) -> None:
    assert store_of(appends.trees[2]) == tree(appends.home / "whole.kv")


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 9))])
def test_wherever_they_are_killed(appends: Appends, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    appends.start(tmp_path)
    for number, steps in enumerate(appends.steps):
        command = appends.command(tmp_path, number)
        while (ran := appends.runner.run(command, kill_at=rng.randrange(1, steps + steps // 6))).killed:
            there = store_of(tree(tmp_path))
            assert there in (store_of(appends.trees[number]), store_of(appends.trees[number + 1]))
        assert ran.code == 0, ran
        assert tree(tmp_path) == appends.trees[number + 1]


@pytest.mark.parametrize(
    "from_the_end", [1, 9, 24, *(pytest.param(step, marks=pytest.mark.slow) for step in (3, 16, 30))]
)
def test_killed_while_it_is_published(appends: Appends, tmp_path: Path, from_the_end: int) -> None:
    appends.start(tmp_path)
    command, kill_at = appends.command(tmp_path, 0), appends.steps[0] - from_the_end
    ran = appends.runner.run(command, kill_at=kill_at)
    assert ran.killed or ran.steps < kill_at  # threads may make a few steps less
    assert store_of(tree(tmp_path)) in [store_of(each) for each in appends.trees[:2]]
    ran = appends.runner.run(command)
    assert ran.code == 0, ran
    assert tree(tmp_path) == appends.trees[1]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 5))])
def test_a_store_on_it_wherever_it_is_killed(
    appends: Appends, inputs: Path, tmp_path: Path, seed: int
) -> None:
    """It ends as one that was not killed, with its index, and the base stays as it is."""
    rng, trees = random.Random(seed), []
    for number, folder in enumerate((tmp_path / "whole", tmp_path / "killed")):
        appends.start(folder)
        more = ("--on", str(folder / "store.kv"))
        command = killing.prefill(appends.home / "c", inputs / "model", folder / "on.kv", *more)
        ran = appends.runner.run(command)
        if number:
            shutil.rmtree(folder)
            appends.start(folder)
            steps = ran.steps
            while (ran := appends.runner.run(command, kill_at=rng.randrange(1, steps + steps // 6))).killed:
                found = tree(folder)
                assert {name: found[name] for name in appends.trees[0]} == appends.trees[0]
        assert ran.code == 0, ran
        trees.append(tree(folder))
    assert trees[0] == trees[1]
    assert {name.partition("/")[0] for name in trees[0]} > {"on.kv", "on.kv.indexes"}


def test_a_kill_loses_at_most_one_chunk(appends: Appends, tmp_path: Path) -> None:
    appends.start(tmp_path, 1)
    progress = tmp_path / "store.kv.partial/progress.json"
    found = [0]
    for kill_at in (*range(appends.steps[1] // 2, appends.steps[1], 40), *range(20, 120, 20)):
        if found[-1] and kill_at > 120:
            continue  # what lies before the first chunk is done
        assert appends.runner.run(appends.command(tmp_path, 1), kill_at=kill_at).killed
        found.append(json.loads(progress.read_text())["tokens"] if progress.exists() else 0)
    assert found == sorted(found), "what was committed stays"
    assert len(set(found)) > 2, "it was killed among the chunks"
    report = json.loads(appends.runner.run(appends.command(tmp_path, 1, "--json")).out)
    assert report["resumed_from"] == found[-1]
    assert tree(tmp_path) == appends.trees[2]


def test_an_empty_folder_of_a_killed_append_is_removed(appends: Appends, tmp_path: Path) -> None:
    appends.start(tmp_path, 1)
    (tmp_path / "store.kv.partial").mkdir()
    assert appends.runner.run(appends.command(tmp_path, 0)).code == 0, "nothing is new"
    assert tree(tmp_path) == appends.trees[1]


def test_on_a_disk_that_fills_up(appends: Appends, runner: Runner, disk: Disk) -> None:
    appends.start(disk.seen)
    for room in (0, 4, 60, 100):
        disk.leave(room * PAGE)
        sentence = told(runner.run(appends.command(disk.folder, 0)))
        assert "No space left on device" in sentence
        assert "again to go on" in sentence
        assert store_of(tree(disk.seen)) == store_of(appends.trees[0]), room
        assert runner.run(["verify", str(disk.folder / "store.kv")]).code == 0
        disk.free()
    ran = runner.run(appends.command(disk.folder, 0))
    assert ran.code == 0, ran
    assert tree(disk.seen) == appends.trees[1]
