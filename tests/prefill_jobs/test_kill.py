"""A prefill and its indexes, killed with SIGKILL at any moment and run again, end as if never interrupted."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from offload_decode.common.errors import StoreExists
from offload_decode.store import layout
from tests.prefill_jobs import killing
from tests.prefill_jobs.killing import Job, Runner, kill_at_random, kill_at_steps, tree
from tests.store.jobs import make_job

KINDS = ("clusters", "flat", "faiss-ivf", "faiss-hnsw", "hnswlib")
WAYS = {
    "dense": ("-o", "chunk=8"),
    "quick": ("-o", "chunk=64"),
    "large": ("-o", "chunk=256"),
    "quoka": ("--method", "quoka", "-o", "chunk=64", "-o", "budget=64"),
}


def begun(runner: Runner, inputs: Path, folder: Path, way: str, *kinds: str) -> Job:
    def commands(folder: Path) -> list[list[str]]:
        store = folder / "store.kv"
        prefill = killing.prefill(inputs / "corpus.txt", inputs / "model", store, *WAYS[way])
        return [prefill, *(killing.index(store, kind) for kind in kinds)]

    return Job(runner, folder / "job", commands)


@pytest.mark.slow  # what is killed at every kind of step is killed below
def test_killed_at_random_moments(runner: Runner, inputs: Path, tmp_path: Path) -> None:
    job = begun(runner, inputs, tmp_path, "quick", "clusters")
    stages, spoilt = kill_at_random(job, 4, random.Random(1))
    assert not spoilt, stages


def test_killed_at_steps_of_the_file_system(runner: Runner, inputs: Path, tmp_path: Path) -> None:
    job = begun(runner, inputs, tmp_path, "large", "clusters")
    last = range(job.steps - 30, job.steps - 1)  # the indexes, and before them the end of the publishing
    spread = range(1, job.steps - 30, job.steps // 4)
    assert not kill_at_steps(job, [*spread, *random.Random(2).sample(last, 2)])


def test_leftovers_of_a_kill_after_the_rename_are_harmless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, store, partial = make_job(300), tmp_path / "store", tmp_path / "store.partial"
    whole = tree(job.write(store))

    def leave() -> None:
        partial.mkdir()
        (partial / "lock").touch()
        (partial / "progress.json").write_text("{}")

    leave()
    with pytest.raises(StoreExists):
        job.write(store)
    assert not partial.exists(), "the same command tidies up"
    leave()
    shutil.rmtree(store)
    with monkeypatch.context() as patch:  # a store of the same name is begun, and killed as it is laid out
        patch.setattr(layout, "create_group", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            job.write(store)
    assert tree(job.write(store)) == whole


def test_a_killed_index_takes_nothing_away(runner: Runner, inputs: Path, tmp_path: Path) -> None:
    store, questions = tmp_path / "store.kv", tmp_path / "questions.jsonl"
    questions.write_text('{"question": "What is it?"}\n')
    model = ["--model", str(inputs / "model"), "--max-new-tokens", "2"]
    asked = ["--questions", str(questions), *model]
    assert runner.run(killing.prefill(inputs / "corpus.txt", inputs / "model", store)).code == 0
    build = killing.index(store, "clusters")
    steps, folder = runner.run(build).steps, store.with_name("store.kv.indexes")
    for kill_at in (2, steps // 2):
        shutil.rmtree(folder)
        assert runner.run(build, kill_at=kill_at).killed
        for command in (
            ["ask", str(store), "What is it?", *model],
            ["batch", str(store), *asked, "--out", str(tmp_path / f"{kill_at}")],
            ["verify", str(store)],
            ["inspect", str(store)],
        ):
            ran = runner.run(command)
            assert ran.code == 0, (kill_at, ran)
    assert runner.run(build).code == 0
    assert [path.name for path in folder.iterdir()] == ["clusters"]


def test_an_index_that_is_built_anew_is_the_old_one_until_it_is_the_new_one(
    runner: Runner, inputs: Path, tmp_path: Path
) -> None:
    store, folder = tmp_path / "store.kv", tmp_path / "store.kv.indexes"
    assert runner.run(killing.prefill(inputs / "corpus.txt", inputs / "model", store)).code == 0
    assert runner.run(killing.index(store, "clusters")).code == 0
    anew = [*killing.index(store, "clusters"), "--recall", "0.5"]
    shutil.copytree(folder, tmp_path / "old")
    steps, old = runner.run(anew).steps, tree(tmp_path / "old")
    new = tree(folder)
    removing = len(old) + 1
    for kill_at in (steps // 2, *range(steps - removing - 2, steps - removing + 1)):
        shutil.rmtree(folder)
        shutil.copytree(tmp_path / "old", folder)
        assert runner.run(anew, kill_at=kill_at).killed
        whole = [{f"clusters/{name}": data for name, data in tree(path).items()} for path in folder.iterdir()]
        assert old in whole or new in whole, kill_at
        assert runner.run(anew).code == 0
        assert tree(folder) == new


@pytest.mark.slow
@pytest.mark.parametrize(("way", "seed"), [("dense", 3), ("quoka", 4)])
def test_a_hundred_kills_at_random_moments(
    runner: Runner, inputs: Path, tmp_path: Path, way: str, seed: int
) -> None:
    job = begun(runner, inputs, tmp_path, way, *KINDS)
    stages, spoilt = kill_at_random(job, 100, random.Random(seed))
    assert not spoilt, stages
    assert len(stages) >= 4, stages


@pytest.mark.slow
def test_killed_at_every_fifth_step(runner: Runner, inputs: Path, tmp_path: Path) -> None:
    job = begun(runner, inputs, tmp_path, "large", "clusters", "flat", "faiss-ivf")
    assert not kill_at_steps(job, range(1, job.steps - 1, 5))


@pytest.mark.slow
def test_killed_processes_that_nothing_was_loaded_for(inputs: Path, tmp_path: Path) -> None:
    """As a user would: the installed command, a new process every time."""

    def command(store: Path) -> list[str]:
        program = Path(sys.executable).with_name("offload-decode")
        corpus, model = inputs / "corpus.txt", inputs / "model"
        return [str(program), *killing.prefill(corpus, model, store, "-o", "chunk=4"), "--quiet"]

    (tmp_path / "killed").mkdir()
    began = time.monotonic()
    subprocess.run(command(tmp_path / "unbroken/store.kv"), check=True)
    seconds = time.monotonic() - began
    rng, store = random.Random(5), tmp_path / "killed/store.kv"
    for _ in range(4):
        process = subprocess.Popen(command(store))
        time.sleep(rng.uniform(0.4, 0.9) * seconds)
        process.kill()
        process.wait()
    if not store.exists():
        subprocess.run(command(store), check=True)
    assert tree(tmp_path / "killed") == tree(tmp_path / "unbroken")
