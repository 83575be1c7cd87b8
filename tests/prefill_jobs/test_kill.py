"""A prefill and its indexes, killed with SIGKILL at any moment and run again, end as if never interrupted."""

import json
import random
import shutil
from pathlib import Path

import pytest

from offload_decode.common.errors import StoreExists
from offload_decode.store import layout
from tests.prefill_jobs import killing
from tests.prefill_jobs.killing import PAGE, Disk, Job, Runner, kill_at_steps, told, tree
from tests.store.jobs import make_job

KINDS = ("clusters", "flat", "faiss-ivf", "faiss-hnsw", "hnswlib")
WAYS = {
    "dense": ("-o", "chunk=8"),
    "large": ("-o", "chunk=256"),
    "quoka": ("--method", "quoka", "-o", "chunk=64", "-o", "budget=64"),
}


def begun(runner: Runner, inputs: Path, folder: Path, way: str, *kinds: str) -> Job:
    def commands(folder: Path) -> list[list[str]]:
        store = folder / "store.kv"
        prefill = killing.prefill(inputs / "corpus.txt", inputs / "model", store, *WAYS[way])
        return [prefill, *(killing.index(store, kind) for kind in kinds)]

    return Job(runner, folder / "job", commands)


@pytest.mark.parametrize("each", [0, pytest.param(5, marks=pytest.mark.slow)])
def test_killed_at_steps_of_the_file_system(runner, inputs, tmp_path, each):
    job = begun(runner, inputs, tmp_path, "large", "clusters", *(["flat", "faiss-ivf"] if each else []))
    last = range(job.steps - 30, job.steps - 1)  # the indexes, and before them the end of the publishing
    few = [*range(1, job.steps - 30, job.steps // 3), *random.Random(2).sample(last, 2)]
    assert not kill_at_steps(job, range(1, job.steps - 1, each) if each else few)


def test_leftovers_of_a_kill_after_the_rename_are_harmless(tmp_path, monkeypatch):
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


def test_a_killed_index_takes_nothing_away(runner, inputs, tmp_path):
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


def test_an_index_that_is_built_anew_is_the_old_one_until_it_is_the_new_one(runner, inputs, tmp_path):
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
def test_killed_again_and_again_at_random_steps(runner, inputs, tmp_path, way, seed):
    job, rng = begun(runner, inputs, tmp_path, way, *KINDS), random.Random(seed)
    first = rng.sample(range(1, job.steps - 1), 50)
    assert not kill_at_steps(job, first, lambda: rng.choice([0, 0, rng.randrange(1, job.steps)]))


@pytest.fixture(scope="module")
def unbroken(runner: Runner, inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A store and its indexes, as they end where there is room."""
    folder = tmp_path_factory.mktemp("unbroken")
    store = folder / "store.kv"
    ran = runner.run(prefill(inputs, store), *(killing.index(store, kind) for kind in KINDS))
    assert ran.code == 0, ran
    return tree(folder)


def committed(disk: Disk) -> int:
    """Tokens that a prefill has committed."""
    progress = disk.seen / "store.kv.partial/progress.json"
    return int(json.loads(progress.read_text())["tokens"]) if progress.exists() else 0


def prefill(inputs: Path, store: Path) -> list[str]:
    return killing.prefill(inputs / "corpus.txt", inputs / "model", store, "-o", "chunk=32")


def fill(runner: Runner, disk: Disk, inputs: Path, unbroken: dict[str, bytes], room: int) -> int | None:
    """Prefill with so much room, make more, and resume; the tokens that were kept, None if all had room."""
    disk.leave(room)
    command = prefill(inputs, disk.folder / "store.kv")
    ran = runner.run(command)
    if ran.code:
        assert "No space left on device" in told(ran)
        assert "free some space and run the same prefill again to go on" in ran.err
    kept = committed(disk) if ran.code else None
    if kept is not None:
        assert (f"keeps its first {kept:,} tokens" in ran.err) == ("keeps" in ran.err) == bool(kept)
        if kept:
            again = runner.run(command)
            assert "No space left on device" in told(again), "still full, nothing is lost by trying"
            assert committed(disk) >= kept
            kept = committed(disk)
        disk.free()
        resumed = runner.run(command)
        assert resumed.code == 0, resumed
        assert not kept or f"resumed after {kept:,}" in resumed.err
    else:
        disk.free()
    whole = {name: data for name, data in unbroken.items() if name.startswith("store.kv/")}
    assert tree(disk.seen) == whole, f"with {room} bytes of room"
    disk.empty()
    return kept


def test_prefill_on_a_disk_that_fills_up(runner, inputs, disk, unbroken):
    assert runner.run(prefill(inputs, disk.folder / "store.kv")).code == 0
    needed = disk.used()
    disk.empty()
    assert fill(runner, disk, inputs, unbroken, 5 * PAGE) == 0, "not even the metadata has room"
    kept = fill(runner, disk, inputs, unbroken, needed * 3 // 4)
    assert kept, "some chunks have room"
    assert fill(runner, disk, inputs, unbroken, needed - 3 * PAGE) is not None, "the checksums have none"


@pytest.mark.slow
def test_prefill_on_a_disk_that_fills_up_at_any_page(runner, inputs, disk, unbroken):
    rooms = range(0, disk.size, 3 * PAGE)
    kept = []
    for room in rooms:
        kept.append(fill(runner, disk, inputs, unbroken, room))
        if kept[-1] is None:
            break
    assert kept[0] == 0
    assert len(set(kept)) > 5, kept


@pytest.mark.parametrize("kind", KINDS)
def test_indexes_on_a_disk_that_fills_up(runner, inputs, disk, unbroken, kind):
    assert runner.run(prefill(inputs, disk.folder / "store.kv")).code == 0
    mine = {name: data for name, data in unbroken.items() if name.startswith(f"store.kv.indexes/{kind}/")}
    pages = sum(-(-len(data) // PAGE) for data in mine.values())
    command = killing.index(disk.folder / "store.kv", kind)
    for room in (0, pages // 2, 1):  # besides what the earlier ones have kept
        disk.leave(room * PAGE)
        sentence = told(runner.run(command))
        assert "could not be written (No space left on device): make room" in sentence
        assert not list(disk.seen.rglob("*.tmp")), "nothing half written is left to fill the disk"
        disk.free()
    ran = runner.run(command)
    assert ran.code == 0, ran
    assert " kept)" in ran.err, "heads that were done"
    whole = {name: data for name, data in unbroken.items() if name.startswith("store.kv/")}
    assert tree(disk.seen) == whole | mine


def test_a_limit_on_the_size_of_files(runner, inputs, tmp_path):
    """As a quota or an old file system has it: the error comes from `ftruncate`, not from a write."""
    store = tmp_path / "store.kv"
    command = prefill(inputs, store)
    sentence = told(runner.run(command, limit=4000))
    assert "(File too large): mend this" in sentence
    assert runner.run(command).code == 0
    for kind in ("clusters", "faiss-ivf", "hnswlib"):
        sentence = told(runner.run(killing.index(store, kind), limit=1000))
        assert "could not be written (" in sentence
        assert runner.run(killing.index(store, kind)).code == 0
    assert runner.run(["verify", str(store)]).code == 0


def test_standard_output_that_is_closed_or_full(runner, inputs, tmp_path):
    store = tmp_path / "store.kv"
    ran = runner.run([*prefill(inputs, store), "--json"], stdout="-")
    assert (ran.code, ran.out) == (0, ""), ran
    assert runner.run(["verify", str(store)], stdout="-").code == 0
    ran = runner.run(["verify", str(store), "--json"], stdout="/dev/full")
    assert ran.code == 1
    assert ran.err == "error: No space left on device\n"


def test_a_folder_that_may_not_be_written(runner, inputs, tmp_path):
    (tmp_path / "file").touch()
    assert "Not a directory" in told(runner.run(prefill(inputs, tmp_path / "file/store.kv")))
    assert runner.run(prefill(inputs, tmp_path / "new/folders/store.kv")).code == 0
    for folder in ("/proc/store.kv", "/sys/store.kv"):  # nobody may, root included
        assert "cannot be written" in told(runner.run(prefill(inputs, Path(folder))))
