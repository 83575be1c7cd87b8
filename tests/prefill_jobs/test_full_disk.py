"""A disk that fills up under a prefill or an index build: one sentence, and a resume as if it never had.

The disks are real ones of a few hundred kilobytes, filled by a file that is then removed.
"""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from offload_decode.common.errors import StoreError
from tests.prefill_jobs import killing
from tests.prefill_jobs.killing import PAGE, Disk, Runner, told, tree
from tests.store.jobs import make_job

KINDS = ("clusters", "flat", "faiss-ivf", "faiss-hnsw", "hnswlib")


@pytest.fixture
def disk(runner: Runner, tmp_path: Path) -> Disk:
    """A disk of 8 MB, in use by nobody else."""
    if not runner.has_disks:
        pytest.skip("small disks need the right to mount a tmpfs (root, or user namespaces)")
    return Disk(runner, tmp_path / "disk", 8 * 1024 * 1024)


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
        assert f"keeps its first {kept:,} tokens" in ran.err
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


def test_prefill_on_a_disk_that_fills_up(
    runner: Runner, inputs: Path, disk: Disk, unbroken: dict[str, bytes]
) -> None:
    assert runner.run(prefill(inputs, disk.folder / "store.kv")).code == 0
    needed = disk.used()
    disk.empty()
    assert fill(runner, disk, inputs, unbroken, 5 * PAGE) == 0, "not even the metadata has room"
    kept = fill(runner, disk, inputs, unbroken, needed * 3 // 4)
    assert kept, "some chunks have room"
    assert fill(runner, disk, inputs, unbroken, needed - 3 * PAGE) is not None, "the checksums have none"


@pytest.mark.slow
def test_prefill_on_a_disk_that_fills_up_at_any_page(
    runner: Runner, inputs: Path, disk: Disk, unbroken: dict[str, bytes]
) -> None:
    rooms = range(0, disk.size, 3 * PAGE)
    kept = []
    for room in rooms:
        kept.append(fill(runner, disk, inputs, unbroken, room))
        if kept[-1] is None:
            break
    assert kept[0] == 0
    assert len(set(kept)) > 5, kept


@pytest.mark.parametrize("kind", KINDS)
def test_indexes_on_a_disk_that_fills_up(
    runner: Runner, inputs: Path, disk: Disk, unbroken: dict[str, bytes], kind: str
) -> None:
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


def test_a_limit_on_the_size_of_files(runner: Runner, inputs: Path, tmp_path: Path) -> None:
    """As a quota or an old file system has it: the error comes from `ftruncate`, not from a write."""
    store = tmp_path / "store.kv"
    command = prefill(inputs, store)
    sentence = told(runner.run(command, limit=4000))
    assert "(File too large) and keeps its first 0 tokens: mend this" in sentence
    assert runner.run(command).code == 0
    for kind in ("clusters", "faiss-ivf", "hnswlib"):
        sentence = told(runner.run(killing.index(store, kind), limit=1000))
        assert "could not be written (" in sentence
        assert runner.run(killing.index(store, kind)).code == 0
    assert runner.run(["verify", str(store)]).code == 0


def test_standard_output_that_is_closed_or_full(runner: Runner, inputs: Path, tmp_path: Path) -> None:
    store = tmp_path / "store.kv"
    ran = runner.run([*prefill(inputs, store), "--json"], stdout="-")
    assert (ran.code, ran.out) == (0, ""), ran
    assert runner.run(["verify", str(store)], stdout="-").code == 0
    ran = runner.run(["verify", str(store), "--json"], stdout="/dev/full")
    assert ran.code == 1
    assert ran.err == "error: No space left on device\n"


def test_a_folder_that_may_not_be_written(runner: Runner, inputs: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "Not a directory" in told(runner.run(prefill(inputs, tmp_path / "file/store.kv")))
    assert runner.run(prefill(inputs, tmp_path / "new/folders/store.kv")).code == 0
    for folder in ("/proc/store.kv", "/sys/store.kv"):  # nobody may, root included
        assert "cannot be written" in told(runner.run(prefill(inputs, Path(folder))))


@pytest.mark.parametrize("reason", [errno.ENOSPC, errno.EDQUOT])
def test_writes_that_fail_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: int) -> None:
    """A full disk or quota on any machine: every few writes one fails, until the store is whole."""
    job, writes = make_job(700), 0
    sentences: list[str] = []
    real = os.pwrite

    def pwrite(descriptor: int, data: memoryview, offset: int) -> int:
        nonlocal writes
        writes += 1
        if writes % 61 == 0:
            raise OSError(reason, os.strerror(reason))
        return real(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    while not (tmp_path / "store").exists():
        try:
            job.write(tmp_path / "store")
        except StoreError as error:
            sentences.append(str(error))
    assert len(sentences) > 2
    assert all(f"({os.strerror(reason)}) and keeps its first" in each for each in sentences)
    assert all("free some space and run the same prefill again" in each for each in sentences)
    monkeypatch.undo()
    assert tree(tmp_path / "store") == tree(job.write(tmp_path / "unbroken"))
