import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offload_decode.common.errors import (
    StoreBusy,
    StoreDamaged,
    StoreError,
    StoreForeign,
    StoreIncomplete,
    StoreMismatch,
)
from offload_decode.store import KVStore, staging
from tests.store.jobs import FULL, SLIDING, Job, begun, make_job, tree


@pytest.fixture
def job() -> Job:
    return make_job(700, layers=(FULL, SLIDING))


SIZES = [70, 5, 300]


class Killed(BaseException):
    """Stands for the end of the process."""


def kill_at(monkeypatch: pytest.MonkeyPatch, step: int) -> Callable[[], int]:
    """End the process at the `step`-th change of the disk: before it, after it, or in the middle of a write.

    Only what the main thread does counts: a thread of zarr's would live on.
    """
    count = 0

    def wrapped(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            if threading.current_thread() is not threading.main_thread():
                return real(*args, **kwargs)
            count += 1
            if count == step and step % 3 == 0:
                raise Killed
            if count == step and step % 3 == 1 and name == "pwrite":
                real(args[0], args[1][: len(args[1]) // 2], *args[2:])
                raise Killed
            try:
                return real(*args, **kwargs)
            finally:
                if count == step:
                    raise Killed

        return call

    for name in ("pwrite", "replace", "rename", "unlink", "rmdir", "fsync", "mkdir"):
        monkeypatch.setattr(os, name, wrapped(name))
    return lambda: count


def ends_alike(job: Job, folder: Path) -> None:
    """The prefill of `folder / "store"` goes on, and ends in the bytes of one that was not interrupted."""
    job.write(folder / "store", SIZES)
    assert tree(folder / "store") == tree(job.write(folder / "unbroken"))


def resumed_from_kills(job: Job, folder: Path, steps: Callable[[int], Iterable[int]]) -> None:
    """Killed at these of its steps, whose number is told, a prefill that goes on ends in the same bytes."""
    unbroken = tree(job.write(folder / "unbroken"))
    with pytest.MonkeyPatch.context() as patch:
        counted = kill_at(patch, 0)
        job.write(folder / "counted", SIZES)
    for step in steps(counted()):
        path = folder / str(step)
        with pytest.MonkeyPatch.context() as patch:
            kill_at(patch, step)
            with pytest.raises(Killed):
                job.write(path, SIZES)
        if not path.exists():
            with pytest.raises(StoreError):
                KVStore.open(path)
            job.write(path, SIZES)
        KVStore.open(path).verify()
        assert tree(path) == unbroken, f"killed at step {step}"
        shutil.rmtree(path)


# Each eighth is killed before, in the middle and after by turns; arrays that are begun and chunks that are
# committed one after another leave the same again. What is left of a store that is published is its own.
@pytest.mark.parametrize("each", [8, pytest.param(1, marks=pytest.mark.slow)])
def test_resume_from_any_kill_point_is_bit_identical(job: Job, tmp_path: Path, each: int) -> None:
    def steps(last: int) -> Iterable[int]:
        assert last > 100
        return (*range(1, last - 8, each), *range(last - 8, last + 1))

    resumed_from_kills(job, tmp_path, steps)


def test_resume_survives_being_killed_again_and_again(job: Job, tmp_path: Path) -> None:
    kills = 0
    while not (tmp_path / "store").exists() and kills < 20:
        with pytest.MonkeyPatch.context() as patch:
            kill_at(patch, 50)
            try:
                job.write(tmp_path / "store", SIZES)
            except Killed:
                kills += 1
    assert kills >= 2
    assert tree(tmp_path / "store") == tree(job.write(tmp_path / "unbroken"))


def test_a_copy_of_the_staging_folder_goes_on(job: Job, tmp_path: Path) -> None:
    unbroken = tree(job.write(tmp_path / "unbroken"))
    with job.open(tmp_path / "store") as writer:
        for i, stop in enumerate((90, 91, 480, 700)):
            start = writer.done
            for layer in range(2):
                job.append(writer, layer, start, stop)
                copy = tmp_path / f"copy{i}{layer}"
                shutil.copytree(tmp_path / "store.partial", copy.with_name(copy.name + ".partial"))
                with job.open(copy) as resumed:
                    assert resumed.done == start, "what was not committed does not count"
                    assert (resumed.keys(0, 1) == job.keys[0, 1, :start]).all()
                    first = max(0, start - 32)
                    assert (resumed.window(1)[1] == job.values[1, :, first:start]).all()
                    job.feed(resumed)
                    resumed.publish()
                assert tree(copy) == unbroken
            writer.commit(stop)


def test_killed_while_the_folder_was_made(job: Job, tmp_path: Path) -> None:
    partial = begun(job, tmp_path / "store", tokens=0)
    (partial / "progress.json").unlink()
    for name in ("layers/000/keys/c.0.0.0", "layers/001/zarr.json"):
        (partial / "store" / name).unlink()
    (partial / "store/zarr.json.1234.partial").write_text("{")
    ends_alike(job, tmp_path)


SLOW_WRITER = """
import sys, time
from pathlib import Path
from offload_decode.store import layout
from tests.store.jobs import FULL, SLIDING, make_job
layout.CHUNK_TOKENS = 256
job = make_job(700, layers=(FULL, SLIDING))
with job.open(Path(sys.argv[1])) as writer:
    for stop in range(writer.done + 7, 700, 7):
        job.feed(writer, [7], until=stop)
        print(stop, flush=True)
        time.sleep(0.01)
"""


@pytest.mark.parametrize("after", [0.0, 0.013, 0.2])
def test_a_real_kill_9(job: Job, tmp_path: Path, after: float) -> None:
    path = tmp_path / "store"
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_WRITER, str(path)], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"7\n"
    with pytest.raises(StoreBusy, match=r"store\.partial: wait for it to end"):
        job.open(path)
    time.sleep(after)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    with pytest.raises(StoreIncomplete, match="of 700 tokens"):
        KVStore.open(path)
    with job.open(path) as writer:
        assert 7 <= writer.done < 700
        assert writer.done % 7 == 0
        job.feed(writer)
        writer.publish()
    assert tree(path) == tree(job.write(tmp_path / "unbroken"))


def test_another_job_is_refused_and_harms_nothing(job: Job, tmp_path: Path) -> None:
    partial = begun(job, tmp_path / "store")
    before = tree(partial)
    tokens = job.tokens.copy()
    tokens[600] += 1
    others = {
        "text": make_job(700, layers=(FULL, SLIDING), seed=1),
        "text:": make_job(690, layers=(FULL, SLIDING), seed=1),
        "dtype": make_job(700, "bfloat16", layers=(FULL, SLIDING)),
        "query_samples": make_job(700, layers=(FULL, SLIDING), query_samples=25),
        "model_id": replace(job, manifest=replace(job.manifest, model_id="other")),
        "prefill": replace(job, manifest=replace(job.manifest, prefill={"method": "dense", "chunk": 256})),
        "list of documents": replace(job, documents=job.documents[:1]),
    }
    for what, other in others.items():
        with pytest.raises(
            StoreMismatch, match=rf"store\.partial was begun with another .*{what}.*remove it"
        ):
            other.open(tmp_path / "store")
    assert tree(partial) == before
    job.write(tmp_path / "store", SIZES)


@pytest.mark.parametrize(
    "name",
    [
        "progress.json",
        "store/zarr.json",
        "store/layers/000/keys/c.1.0.0",
        "store/layers/000/values/c.0.0.0",
        "store/layers/000/page_min/c.0.0.0",
        "store/layers/000/queries/c.1.0.0",
        "store/layers/000/keys/zarr.json",
        "store/tokens/c.0",
        "windows/001-300-333",
    ],
)
@pytest.mark.parametrize("harm", ["flip", "truncate", "remove"])
def test_staged_bytes_that_changed_are_found(job: Job, tmp_path: Path, name: str, harm: str) -> None:
    partial = begun(job, tmp_path / "store")
    file = partial / name
    data = bytearray(file.read_bytes())
    if harm == "flip":
        data[len(data) // 4] ^= 4
        file.write_bytes(data)
    elif harm == "truncate":
        file.write_bytes(data[:-1])
    else:
        file.unlink()
    if (name, harm) == ("progress.json", "remove"):  # as if it had only just begun
        job.write(tmp_path / "store", SIZES)
        return
    with pytest.raises((StoreDamaged, StoreMismatch), match=r"remove|restore"):
        job.open(tmp_path / "store")


def test_bytes_beyond_the_last_commit_do_not_matter(job: Job, tmp_path: Path) -> None:
    partial = begun(job, tmp_path / "store")
    with open(partial / "store/layers/000/keys/c.0.0.0", "r+b") as file:
        file.seek(334 * 128)
        file.write(os.urandom(1000))
    (partial / "windows/001-333-400").write_bytes(b"half")
    ends_alike(job, tmp_path)


def test_a_folder_of_somebody_else_is_left_alone(job: Job, tmp_path: Path) -> None:
    (tmp_path / "store.partial").mkdir()
    (tmp_path / "store.partial" / "thesis.txt").write_text("dear")
    with pytest.raises(StoreForeign, match="move it away"):
        job.open(tmp_path / "store")
    assert [path.name for path in (tmp_path / "store.partial").iterdir()] == ["thesis.txt"]


def test_a_window_keeps_bounded_files(tmp_path: Path) -> None:
    job = make_job(700, layers=(FULL, SLIDING), window=40)
    with job.open(tmp_path / "store") as writer:
        for stop in range(10, 700, 10):
            job.feed(writer, [10], until=stop)
            assert len(list((tmp_path / "store.partial/windows").iterdir())) <= 5


def full_disk(monkeypatch: pytest.MonkeyPatch, after: int, reason: int = errno.ENOSPC) -> None:
    real, count = os.pwrite, 0

    def pwrite(descriptor: int, data: Any, offset: int) -> int:
        nonlocal count
        count += 1
        if count == after:
            return real(descriptor, data[: len(data) // 2], offset)  # a short write comes first
        if count > after:
            raise OSError(reason, os.strerror(reason))
        return real(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)


@pytest.mark.parametrize("reason", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("after", [1, 2, 3, 5, 8, 10])
def test_a_full_disk_or_quota_is_a_sentence_and_keeps_what_is_committed(
    job: Job, tmp_path: Path, after: int, reason: int
) -> None:
    with job.open(tmp_path / "store") as writer:
        job.feed(writer, until=333)
        with pytest.MonkeyPatch.context() as patch:
            full_disk(patch, after, reason)
            with pytest.raises(StoreError, match=rf"{os.strerror(reason)}.*first 333 tokens: free"):
                job.feed(writer)
    ends_alike(job, tmp_path)


def test_an_append_that_failed_can_be_tried_again(job: Job, tmp_path: Path) -> None:
    with job.open(tmp_path / "store") as writer:
        job.feed(writer, until=333)
        with pytest.MonkeyPatch.context() as patch:
            full_disk(patch, 3)
            with pytest.raises(StoreError):
                writer.append(0, job.keys[0, :, 333:400], job.values[0, :, 333:400])
        job.feed(writer)
        writer.publish()
    assert tree(tmp_path / "store") == tree(job.write(tmp_path / "unbroken"))


def test_a_job_that_fails_before_it_writes_leaves_no_folder(tmp_path: Path) -> None:
    def fail(folder: Path, *written: str) -> None:
        with staging.locked(folder):
            for name in written:
                (folder / name).touch()
            raise RuntimeError

    for written in ((), ("rows",)):
        with pytest.raises(RuntimeError):
            fail(tmp_path / "store.partial", *written)
        assert (tmp_path / "store.partial").exists() == bool(written)
