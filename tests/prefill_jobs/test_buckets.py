"""A store that went through a bucket is the store that it was; what breaks off on the way, a rerun mends."""

import errno
import hashlib
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from offload_decode.common.errors import (
    BucketError,
    StoreError,
    StoreExists,
    StoreIncomplete,
    StoreNotFound,
)
from offload_decode.prefill_jobs import buckets
from offload_decode.prefill_jobs.buckets import stores as bucket_stores
from offload_decode.prefill_jobs.buckets.stores import pulling_path
from offload_decode.store.files import SEAL, SUMS
from offload_decode.store.reader import verify_store
from tests.prefill_jobs.services import BUCKET, exists, objects
from tests.store.jobs import tree


def indexes(store: Path) -> dict[str, bytes]:
    """What travels of the indexes beside a store."""
    found = tree(store.with_name(store.name + ".indexes"))
    return {name: data for name, data in found.items() if not name.endswith(".tmp")}


# --- what comes back


def test_push_and_pull_give_the_same_store_and_indexes_and_keep_what_is_there(place, stores, tmp_path):
    assert not exists(place)
    pushed = buckets.push(stores / "a.kv", place)
    assert exists(place)
    stages: list[tuple[str, int, int]] = []
    pulled = buckets.pull(place, tmp_path / "back.kv", progress=lambda *step: stages.append(step))
    assert tree(stores / "a.kv") == tree(tmp_path / "back.kv")
    assert indexes(stores / "a.kv") == indexes(tmp_path / "back.kv")
    verify_store(tmp_path / "back.kv")
    files = len(tree(stores / "a.kv")) - 2 + 4
    assert (pushed.files, pushed.skipped_files, pulled.files, pulled.bytes) == (files, 0, files, pushed.bytes)
    assert stages[-1] == ("pull", pulled.bytes, pulled.bytes)
    assert sorted(path.name for path in tmp_path.glob("back*")) == ["back.kv", "back.kv.indexes"]

    again = buckets.push(stores / "a.kv", place)
    assert (again.files, again.skipped_files, again.skipped_bytes) == (0, files, pushed.bytes)
    again = buckets.pull(place, tmp_path / "back.kv")
    assert (again.files, again.skipped_files, again.skipped_bytes) == (0, files, pulled.bytes)


@pytest.mark.parametrize("change", ["a file", "an index", "the list", "one more index"])
def test_another_store_at_the_target_is_refused(stores, tmp_path, change):
    url = f"file://{tmp_path}/bucket/a.kv"
    buckets.push(stores / "a.kv", url)
    buckets.pull(url, back := tmp_path / "back.kv")
    kinds = tmp_path / "back.kv.indexes"
    file = {"a file": back / "tokens/c.0", "the list": back / SUMS, "one more index": kinds / "more.json"}
    changed = file.get(change) or next(path for path in kinds.rglob("*.faiss") if path.stat().st_size)
    changed.write_bytes(b"?" * changed.stat().st_size if changed.exists() else b"?")
    with pytest.raises(StoreExists):
        buckets.pull(url, back)


def test_objects_of_several_parts(place, stores, tmp_path):
    buckets.push(stores / "big.kv", place)
    buckets.pull(place, tmp_path / "back.kv")
    assert tree(stores / "big.kv") == tree(tmp_path / "back.kv")


def test_the_bucket_holds_the_tree_of_the_store(s3, url, stores):
    buckets.push(stores / "a.kv", url)
    found = objects(s3, url)
    assert {name[1:]: data for name, data in found.items() if name[0] == "/"} == tree(stores / "a.kv")
    listed = found.pop(f".indexes/{SUMS}").decode().splitlines()
    put = [line for line in s3.requests if line.startswith("PUT") and "PUSHING" not in line]
    assert [line.rpartition("/")[2] for line in put[-3:]] == [SUMS, SUMS, SEAL]
    there = {name.removeprefix(".indexes/"): data for name, data in found.items() if name[0] == "."}
    assert there == indexes(stores / "a.kv")
    assert listed == [f"{hashlib.sha256(there[name]).hexdigest()}  {name}" for name in sorted(there)]


def test_a_folder_that_was_pushed_to_is_a_store_that_sha256sum_can_check(stores, tmp_path):
    buckets.push(stores / "a.kv", f"file://{tmp_path}/a.kv")
    assert tree(stores / "a.kv") == tree(tmp_path / "a.kv")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.kv", "a.kv.indexes"]
    for folder in ("a.kv", "a.kv.indexes"):
        check = ["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"]
        subprocess.run(check, cwd=tmp_path / folder, check=True)


def test_indexes_that_are_built_later_follow(s3, url, stores, tmp_path):
    store = shutil.copytree(stores / "a.kv", tmp_path / "a.kv")
    buckets.push(store, url)
    (tmp_path / "a.kv.indexes" / "hnswlib").mkdir(parents=True)
    (tmp_path / "a.kv.indexes" / "hnswlib" / "layer-000-head-000.json").write_bytes(b"{}")
    assert buckets.push(store, url).files == 1
    elsewhere = shutil.copytree(store, tmp_path / "elsewhere" / "a.kv")
    shutil.copytree(stores / "a.kv.indexes", tmp_path / "elsewhere" / "a.kv.indexes")
    buckets.push(elsewhere, url)
    buckets.pull(url, tmp_path / "back.kv")
    assert indexes(tmp_path / "back.kv") == indexes(store) | indexes(stores / "a.kv")


# --- interruptions


def test_push_cut_off_at_any_request_resumes(s3, stores, tmp_path):
    buckets.push(stores / "a.kv", f"s3://{BUCKET}{tmp_path}/whole")
    requests = len(s3.requests)
    for cut in range(1, requests, requests // 4):
        url = f"s3://{BUCKET}{tmp_path}/cut-{cut}"
        s3.requests.clear()
        s3.refuse_after = cut
        with pytest.raises(BucketError, match="AccessDenied"):
            buckets.push(stores / "a.kv", url)
        s3.requests, s3.refuse_after = s3.requests[:cut], None
        first = set(s3.sent("PUT"))
        s3.requests.clear()
        whole = exists(url)
        if not whole:
            with pytest.raises((StoreIncomplete, StoreNotFound)):
                buckets.pull(url, tmp_path / "early.kv")
        moved = buckets.push(stores / "a.kv", url)
        second = s3.sent("PUT")
        assert len(second) == len(set(second)) == moved.files
        assert not first & set(second)
        assert len(first) + len(second) == moved.files + moved.skipped_files == moved_in_all(stores)
        expected = tree(stores / "a.kv")
        assert {n[1:]: d for n, d in objects(s3, url).items() if n[0] == "/"} == expected


def moved_in_all(stores: Path) -> int:
    return len(tree(stores / "a.kv")) - 2 + 4


def test_pull_cut_off_at_any_request_resumes(s3, url, stores, tmp_path):
    buckets.push(stores / "a.kv", url)
    s3.requests.clear()
    buckets.pull(url, tmp_path / "whole.kv")
    requests = len(s3.requests)
    for cut in range(1, requests, requests // 4):
        store = tmp_path / f"cut-{cut}.kv"
        s3.requests.clear()
        s3.refuse_after = cut
        with pytest.raises(BucketError, match="AccessDenied"):
            buckets.pull(url, store)
        assert not store.exists()
        fetched = len([line for line in s3.requests[:cut] if line in s3.sent("GET")])
        s3.refuse_after = None
        s3.requests.clear()
        moved = buckets.pull(url, store)
        again = [line for line in s3.sent("GET") if "a.kv.indexes" not in line]
        # A zero-byte file is no request, and one whose answer came too late is asked for again.
        assert len(again) <= moved.files <= moved_in_all(stores) - fetched + buckets.transfer.FILES_AT_ONCE
        assert tree(stores / "a.kv") == tree(store)
        assert indexes(stores / "a.kv") == indexes(store)
        assert not pulling_path(store).exists()


RUN = """
import sys
from pathlib import Path
from offload_decode.prefill_jobs import buckets
if sys.argv[1] == "push":
    buckets.push(Path(sys.argv[2]), sys.argv[3])
else:
    buckets.pull(sys.argv[2], Path(sys.argv[3]))
"""


def killed(when: Callable[[], bool], *args: str | Path) -> None:
    """Start a transfer in a process of its own and kill it in the middle."""
    process = subprocess.Popen([sys.executable, "-c", RUN, *map(str, args)])
    deadline = time.monotonic() + 30
    while not when() and time.monotonic() < deadline:
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


def test_killed_push_and_killed_pull_resume(s3, url, stores, tmp_path):
    s3.delay = 0.03
    killed(lambda: len(s3.sent("PUT")) >= 9, "push", stores / "a.kv", url)
    time.sleep(0.2)  # what the server had accepted ends
    put = set(s3.sent("PUT"))
    s3.requests.clear()
    assert not exists(url)
    moved = buckets.push(stores / "a.kv", url)
    assert moved.skipped_files >= len(put) - buckets.transfer.FILES_AT_ONCE
    assert moved.files + moved.skipped_files == moved_in_all(stores)

    s3.requests.clear()
    killed(lambda: len(s3.sent("GET")) >= 12, "pull", url, tmp_path / "back.kv")
    assert not (tmp_path / "back.kv").exists()
    s3.delay = 0.0
    pulled = buckets.pull(url, tmp_path / "back.kv")
    assert pulled.skipped_files > 0
    assert tree(stores / "a.kv") == tree(tmp_path / "back.kv")


def test_push_killed_in_an_object_of_several_parts_resumes(s3, url, stores, tmp_path):
    s3.delay = 0.05
    killed(lambda: any("partNumber" in line for line in s3.requests), "push", stores / "big.kv", url)
    s3.delay = 0.0
    buckets.push(stores / "big.kv", url)
    buckets.pull(url, tmp_path / "back.kv")
    assert tree(stores / "big.kv") == tree(tmp_path / "back.kv")


def test_a_push_into_a_folder_leaves_nothing_half_written(stores, tmp_path):
    url, target = f"file://{tmp_path}/big.kv", tmp_path / "big.kv"
    killed(lambda: any(target.rglob("*#*")) or (target / "layers").exists(), "push", stores / "big.kv", url)
    (target / "layers" / "000" / "keys").mkdir(parents=True, exist_ok=True)
    (target / "layers" / "000" / "keys" / "c.0.0.0#1").write_bytes(b"half")
    buckets.push(stores / "big.kv", url)
    assert tree(stores / "big.kv") == tree(target)


def test_two_processes_pull_one_store(stores, tmp_path):
    """One of them has it, and the other is told."""
    buckets.push(stores / "big.kv", f"file://{tmp_path}/far.kv")
    given = [sys.executable, "-c", RUN, "pull", f"file://{tmp_path}/far.kv", str(tmp_path / "back.kv")]
    both = [
        subprocess.Popen(given, cwd=Path(__file__).parents[2], stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [process.communicate(timeout=120)[1] for process in both]
    assert 0 in [process.returncode for process in both]
    for process, text in zip(both, said, strict=True):
        assert process.returncode == 0 or re.search("StoreBusy|StoreExists", text), text
    assert tree(stores / "big.kv") == tree(tmp_path / "back.kv")
    assert not pulling_path(tmp_path / "back.kv").exists()


def test_a_store_that_another_process_pulled_meanwhile_leaves_no_folder(stores, tmp_path, monkeypatch):
    url, back = f"file://{tmp_path}/far.kv", tmp_path / "back.kv"
    buckets.push(stores / "a.kv", url)
    listed = bucket_stores.store_sums

    def overtaken(bucket):
        monkeypatch.setattr(bucket_stores, "store_sums", listed)
        buckets.pull(url, back)
        return listed(bucket)

    monkeypatch.setattr(bucket_stores, "store_sums", overtaken)
    with pytest.raises(StoreExists):
        buckets.pull(url, back)
    assert not pulling_path(back).exists()


def test_ctrl_c_stops_at_once_and_the_push_resumes(s3, url, stores, tmp_path):
    def interrupt(stage: str, done: int, total: int) -> None:
        if stage == "push" and done:
            raise KeyboardInterrupt

    s3.delay = 0.2
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        buckets.push(stores / "a.kv", url, progress=interrupt)
    assert time.monotonic() - began < 5
    assert len(s3.sent("PUT")) < moved_in_all(stores)
    s3.delay = 0.0
    assert buckets.push(stores / "a.kv", url).skipped_files > 0
    buckets.pull(url, tmp_path / "back.kv")
    assert tree(stores / "a.kv") == tree(tmp_path / "back.kv")


# --- disks that are full


def test_too_little_disk_space_fails_before_anything_is_fetched(s3, url, stores, tmp_path, monkeypatch):
    buckets.push(stores / "big.kv", url)
    s3.requests.clear()
    usage = shutil._ntuple_diskusage(10**9, 10**9, 10**6)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(StoreError, match=r"needs 0\.0\d GB more and the disk has 0\.00 GB free"):
        buckets.pull(url, tmp_path / "back.kv")
    assert not s3.sent("GET")


def test_a_disk_that_fills_up_is_a_sentence_and_a_resume(s3, url, stores, tmp_path, monkeypatch):
    buckets.push(stores / "a.kv", url)
    fsync, calls = os.fsync, []

    def full(descriptor: int) -> None:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):  # each file is flushed once, and folders too
            calls.append(descriptor)
        if len(calls) > 6:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(
            StoreError, match="keeps what was pulled: free some space and run the same pull again"
        ):
            buckets.pull(url, tmp_path / "back.kv")
    assert buckets.pull(url, tmp_path / "back.kv").skipped_files == 6
    assert tree(stores / "a.kv") == tree(tmp_path / "back.kv")
