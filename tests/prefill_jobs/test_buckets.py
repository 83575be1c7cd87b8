"""A store that went through a bucket is the store that it was; what breaks on the way, a rerun mends."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import boto3
import pytest

from offload_decode.common.errors import (
    BucketError,
    ConfigError,
    DoesNotFit,
    OffloadDecodeError,
    StoreBusy,
    StoreDamaged,
    StoreError,
    StoreExists,
    StoreIncomplete,
    StoreNotFound,
)
from offload_decode.prefill_jobs import buckets
from offload_decode.prefill_jobs.buckets.pull import pulling_path
from offload_decode.store.files import SEAL, SUMS, render, seal_of
from offload_decode.store.reader import verify_store
from offload_decode.store.staging import locked
from tests.prefill_jobs.services import GoogleXml, Service, clear, moto, serving, use_google, use_s3
from tests.store.jobs import FULL, SLIDING, make_job, tree

BUCKET = "bucket"


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch) -> None:
    clear(monkeypatch)


@pytest.fixture(scope="module")
def stores(tmp_path_factory) -> Path:
    """`a.kv` with indexes beside it, `b.kv` of other keys, and `big.kv` with objects of several parts."""
    home = tmp_path_factory.mktemp("stores")
    make_job(60, layers=(FULL, SLIDING)).write(home / "a.kv")
    make_job(60, layers=(FULL, SLIDING), seed=1).write(home / "b.kv")
    make_job(34_000, "float32", layers=(FULL,)).write(home / "big.kv", [34_000])
    kind = home / "a.kv.indexes" / "faiss-ivf"
    kind.mkdir(parents=True)
    for number in range(4):
        (kind / f"layer-000-head-{number:03d}.faiss").write_bytes(os.urandom(1000 * number))
    (kind / "left.json.tmp").write_bytes(b"of a build that was killed")
    return home


@pytest.fixture(scope="module")
def s3_service() -> Iterator[Service]:
    with serving(moto()) as service:
        client(service).create_bucket(Bucket=BUCKET)
        yield service


def client(service: Service):
    return boto3.client(
        "s3",
        endpoint_url=service.url,
        aws_access_key_id="x",
        aws_secret_access_key="x",
        region_name="us-east-1",
    )


@pytest.fixture
def s3(s3_service, monkeypatch, tmp_path) -> Service:
    """An S3 service whose bucket this process uses; `url(s3, tmp_path)` is a fresh place in it."""
    use_s3(monkeypatch, s3_service.url)
    s3_service.requests.clear()
    s3_service.refuse_after, s3_service.delay = None, 0.0
    return s3_service


@pytest.fixture(params=["s3", "gs", "file"])
def place(request, monkeypatch, tmp_path) -> Iterator[str]:
    """The URL of a fresh place in each kind of bucket."""
    if request.param == "s3":
        request.getfixturevalue("s3")
        yield f"s3://{BUCKET}{tmp_path}/x y.kv"
    elif request.param == "gs":
        with serving(GoogleXml(BUCKET)) as service:
            use_google(monkeypatch, service.url)
            yield f"gs://{BUCKET}/x y.kv"
    else:
        yield f"file://{tmp_path}/made/x%20y.kv"


@pytest.fixture
def url(s3, tmp_path) -> str:
    return f"s3://{BUCKET}{tmp_path}/x.kv"


def objects(service: Service, url: str) -> dict[str, bytes]:
    """The objects under a URL, by key after its name."""
    found, prefix = client(service), url.split("/", 3)[3]
    listed = found.list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", [])
    return {
        entry["Key"].removeprefix(prefix): found.get_object(Bucket=BUCKET, Key=entry["Key"])["Body"].read()
        for entry in listed
    }


def spoil(service: Service, url: str, name: str) -> None:
    """Flip a bit of an object and leave the checksum that it was put with."""
    found, key = client(service), f"{url.split('/', 3)[3]}/{name}"
    was = found.get_object(Bucket=BUCKET, Key=key)
    body = bytearray(was["Body"].read())
    body[len(body) // 2] ^= 1
    found.put_object(Bucket=BUCKET, Key=key, Body=bytes(body), Metadata=was["Metadata"])


def same(store: Path, other: Path) -> bool:
    return tree(store) == tree(other)


def indexes(store: Path) -> dict[str, bytes]:
    """What travels of the indexes beside a store."""
    found = tree(store.with_name(store.name + ".indexes"))
    return {name: data for name, data in found.items() if not name.endswith(".tmp")}


# --- what comes back


def test_push_and_pull_give_the_same_store_and_indexes_and_keep_what_is_there(place, stores, tmp_path):
    assert not buckets.exists(place)
    pushed = buckets.push(stores / "a.kv", place)
    assert buckets.exists(place)
    stages: list[tuple[str, int, int]] = []
    pulled = buckets.pull(place, tmp_path / "back.kv", progress=lambda *step: stages.append(step))
    assert same(stores / "a.kv", tmp_path / "back.kv")
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
    assert same(stores / "big.kv", tmp_path / "back.kv")


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
    assert same(stores / "a.kv", tmp_path / "a.kv")
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
    for cut in range(1, requests, requests // 6):
        url = f"s3://{BUCKET}{tmp_path}/cut-{cut}"
        s3.requests.clear()
        s3.refuse_after = cut
        with pytest.raises(BucketError, match="AccessDenied"):
            buckets.push(stores / "a.kv", url)
        s3.requests, s3.refuse_after = s3.requests[:cut], None
        first = set(s3.sent("PUT"))
        s3.requests.clear()
        whole = buckets.exists(url)
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
    for cut in range(1, requests, requests // 6):
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
        assert same(stores / "a.kv", store)
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
    assert not buckets.exists(url)
    moved = buckets.push(stores / "a.kv", url)
    assert moved.skipped_files >= len(put) - buckets.transfer.FILES_AT_ONCE
    assert moved.files + moved.skipped_files == moved_in_all(stores)

    s3.requests.clear()
    killed(lambda: len(s3.sent("GET")) >= 12, "pull", url, tmp_path / "back.kv")
    assert not (tmp_path / "back.kv").exists()
    s3.delay = 0.0
    pulled = buckets.pull(url, tmp_path / "back.kv")
    assert pulled.skipped_files > 0
    assert same(stores / "a.kv", tmp_path / "back.kv")


def test_push_killed_in_an_object_of_several_parts_resumes(s3, url, stores, tmp_path):
    s3.delay = 0.05
    killed(lambda: any("partNumber" in line for line in s3.requests), "push", stores / "big.kv", url)
    s3.delay = 0.0
    buckets.push(stores / "big.kv", url)
    buckets.pull(url, tmp_path / "back.kv")
    assert same(stores / "big.kv", tmp_path / "back.kv")


def test_a_push_into_a_folder_leaves_nothing_half_written(stores, tmp_path):
    url, target = f"file://{tmp_path}/big.kv", tmp_path / "big.kv"
    killed(lambda: any(target.rglob("*#*")) or (target / "layers").exists(), "push", stores / "big.kv", url)
    (target / "layers" / "000" / "keys").mkdir(parents=True, exist_ok=True)
    (target / "layers" / "000" / "keys" / "c.0.0.0#1").write_bytes(b"half")
    buckets.push(stores / "big.kv", url)
    assert same(stores / "big.kv", target)


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
    assert same(stores / "a.kv", tmp_path / "back.kv")


# --- damage


def test_a_flipped_bit_in_the_bucket_is_named_and_mended(s3, url, stores, tmp_path):
    buckets.push(stores / "a.kv", url)
    damaged = ["layers/000/keys/c.0.0.0", "tokens/c.0"]
    for name in damaged:
        spoil(s3, url, name)
    with pytest.raises(StoreDamaged) as caught:
        buckets.pull(url, tmp_path / "back.kv")
    assert all(f"x.kv/{name} (changed)" in str(caught.value) for name in damaged)
    assert str(caught.value).count("(changed)") == 2
    assert not (tmp_path / "back.kv").exists()
    for name in damaged:
        client(s3).delete_object(Bucket=BUCKET, Key=f"{url.split('/', 3)[3]}/{name}")
    with pytest.raises(StoreDamaged, match=r"tokens/c\.0 \(missing\)"):
        buckets.pull(url, tmp_path / "back.kv")
    assert buckets.push(stores / "a.kv", url).files == 2
    assert buckets.pull(url, tmp_path / "back.kv").files == 2
    assert same(stores / "a.kv", tmp_path / "back.kv")


def test_a_flipped_bit_of_an_index_is_named(s3, url, stores, tmp_path):
    buckets.push(stores / "a.kv", url)
    spoil(s3, url.replace("x.kv", "x.kv.indexes"), "faiss-ivf/layer-000-head-002.faiss")
    with pytest.raises(StoreDamaged, match=r"x\.kv\.indexes/faiss-ivf/layer-000-head-002\.faiss \(changed\)"):
        buckets.pull(url, tmp_path / "back.kv")


def test_files_of_an_interrupted_pull_are_hashed_again(s3, url, stores, tmp_path):
    buckets.push(stores / "a.kv", url)
    staged = pulling_path(tmp_path / "back.kv") / "store"
    shutil.copytree(stores / "b.kv", staged)
    (staged.parent / "lock").touch()
    (staged / "stray").write_bytes(b"")
    moved = buckets.pull(url, tmp_path / "back.kv")
    assert same(stores / "a.kv", tmp_path / "back.kv")
    assert moved.files > moved.skipped_files > 0  # the metadata of the two stores is the same


def test_an_object_of_the_right_size_and_unknown_content_is_sent_again(s3, url, stores):
    buckets.push(stores / "a.kv", url)
    right = (stores / "a.kv" / "tokens" / "c.0").read_bytes()
    key = f"{url.split('/', 3)[3]}/tokens/c.0"
    client(s3).put_object(Bucket=BUCKET, Key=key, Body=bytes(len(right)))
    assert buckets.push(stores / "a.kv", url).files == 1
    assert objects(s3, url)["/tokens/c.0"] == right


def test_a_changed_file_of_a_folder_is_sent_again(stores, tmp_path):
    buckets.push(stores / "a.kv", f"file://{tmp_path}/a.kv")
    file = tmp_path / "a.kv" / "tokens" / "c.0"
    file.write_bytes(bytes(file.stat().st_size))
    assert buckets.push(stores / "a.kv", f"file://{tmp_path}/a.kv").files == 1
    assert same(stores / "a.kv", tmp_path / "a.kv")


def test_a_damaged_store_is_not_pushed(s3, url, stores, tmp_path):
    store = shutil.copytree(stores / "big.kv", tmp_path / "big.kv")
    file = store / "layers" / "000" / "keys" / "c.1.0.0"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(StoreDamaged, match=r"c\.1\.0\.0 is not what its checksum says"):
        buckets.push(store, url)
    assert "/layers/000/keys/c.1.0.0" not in objects(s3, url)
    assert not buckets.exists(url)


@pytest.fixture
def bad(stores, tmp_path) -> Path:
    """A store in a folder that a stranger may write to."""
    return Path(shutil.copytree(stores / "a.kv", tmp_path / "bad.kv"))


@pytest.mark.parametrize("name", ["../evil", "/etc/evil", "a/../../evil", "a//b", "a/./b"])
def test_a_list_cannot_name_files_elsewhere(bad, tmp_path, name):
    (bad / SUMS).write_bytes(render({name: "0" * 64}))
    (bad / SEAL).write_bytes(seal_of((bad / SUMS).read_bytes()))
    with pytest.raises(StoreDamaged, match="not the list of a store"):
        buckets.pull(f"file://{bad}", tmp_path / "deep" / "back.kv")


def test_lists_without_end_or_of_another_store_are_refused(bad, stores, tmp_path):
    shutil.copy(stores / "b.kv" / SUMS, bad / SUMS)
    with pytest.raises(StoreDamaged, match="do not belong together"):
        buckets.pull(f"file://{bad}", tmp_path / "back.kv")
    os.truncate(bad / SUMS, 1 << 34)
    with pytest.raises(StoreDamaged, match="more bytes than a store needs"):
        buckets.pull(f"file://{bad}", tmp_path / "back.kv")


@pytest.mark.parametrize("name", [SUMS, SEAL, "zarr.json", "layers/000/keys/c.0.0.0"])
@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_pipes_in_a_folder_never_block(bad, stores, tmp_path, name, kind):
    """A pipe would keep its reader waiting for ever."""
    (bad / name).unlink()
    os.mkfifo(bad / name) if kind == "pipe" else (bad / name).symlink_to("/dev/zero")
    with pytest.raises(StoreDamaged) as raised:
        buckets.pull(f"file://{bad}", tmp_path / "back.kv")
    assert "\n" not in str(raised.value)
    if name in (SUMS, SEAL):
        with pytest.raises(StoreDamaged, match="not a plain file: remove it"):
            buckets.push(stores / "a.kv", f"file://{bad}")
    else:  # which puts a file there
        buckets.push(stores / "a.kv", f"file://{bad}")
        buckets.pull(f"file://{bad}", tmp_path / "back.kv")


def test_too_little_memory_for_obstore_is_an_error(monkeypatch, stores, tmp_path):
    """Without them obstore would wait for ever."""
    monkeypatch.setattr(buckets.bucket, "room", lambda: buckets.bucket.LEAST_ROOM - 1)
    with pytest.raises(DoesNotFit, match="63 MiB: raise"):
        buckets.push(stores / "a.kv", f"file://{tmp_path}/a.kv")


# --- who may write where


def test_another_store_or_anything_else_at_the_url_is_refused(place, stores, tmp_path):
    buckets.push(stores / "a.kv", place)
    with pytest.raises(StoreExists, match="something else than this store"):
        buckets.push(stores / "b.kv", place)
    with pytest.raises(StoreExists, match="holds a store already"):
        buckets.check_writable(place)
    buckets.pull(place, tmp_path / "back.kv")
    assert same(stores / "a.kv", tmp_path / "back.kv")


def test_a_push_that_another_store_began_is_refused(s3, url, stores):
    s3.refuse_after = 12
    with pytest.raises(BucketError):
        buckets.push(stores / "a.kv", url)
    s3.refuse_after = None
    with pytest.raises(StoreExists, match="Another store is being pushed"):
        buckets.push(stores / "b.kv", url)
    buckets.check_writable(url)
    buckets.push(stores / "a.kv", url)


def test_objects_that_are_no_store_are_left_alone(stores, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years")
    for refused in (lambda url: buckets.push(stores / "a.kv", url), buckets.check_writable):
        with pytest.raises(StoreExists, match="something else"):
            refused(f"file://{tmp_path}/mine")
    assert tree(tmp_path) == {"mine/thesis.txt": b"years"}


def at_once(*calls: Callable[[], object]) -> list[object]:
    """What each call returned or raised."""
    results: list[object] = [None] * len(calls)

    def run(number: int) -> None:
        try:
            results[number] = calls[number]()
        except OffloadDecodeError as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("other", ["a.kv", "b.kv"])
def test_of_two_pushers_both_put_one_store_or_one_puts_its_own(s3, url, stores, tmp_path, other):
    s3.delay, names = 0.005, ["a.kv", other]
    both = at_once(*(lambda name=name: buckets.push(stores / name, url) for name in names))
    s3.delay, pushed = 0.0, [isinstance(moved, buckets.Transfer) for moved in both]
    assert pushed.count(True) == (2 if other == "a.kv" else 1), both
    assert all(isinstance(moved, buckets.Transfer | StoreExists) for moved in both), both
    buckets.pull(url, tmp_path / "back.kv")
    assert same(stores / names[pushed.index(True)], tmp_path / "back.kv")
    assert "/PUSHING" not in objects(s3, url)


def test_a_folder_is_pushed_to_once_at_a_time(stores, tmp_path):
    with locked(tmp_path / "a.kv.pushing"), pytest.raises(StoreBusy):
        buckets.push(stores / "a.kv", f"file://{tmp_path}/a.kv")


def test_a_store_is_pulled_once_at_a_time(s3, url, stores, tmp_path):
    buckets.push(stores / "a.kv", url)
    with locked(pulling_path(tmp_path / "back.kv")), pytest.raises(StoreBusy):
        buckets.pull(url, tmp_path / "back.kv")


def test_leftovers_of_a_pull_killed_at_its_end_are_removed(monkeypatch, stores, tmp_path):
    """It had given the store its name, and had its own folder still."""
    back = tmp_path / "back.kv"
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    buckets.pull(f"file://{stores / 'a.kv'}", back)
    monkeypatch.undo()
    assert pulling_path(back).exists()
    assert not buckets.pull(f"file://{stores / 'a.kv'}", back).files
    assert not pulling_path(back).exists()
    assert same(stores / "a.kv", back)


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
    assert same(stores / "big.kv", tmp_path / "back.kv")
    assert not pulling_path(tmp_path / "back.kv").exists()


def test_a_target_that_is_taken(s3, url, stores, tmp_path):
    (tmp_path / "back.kv").touch()
    with pytest.raises(StoreExists):
        buckets.pull(url, tmp_path / "back.kv")
    assert not s3.requests


def test_check_writable(place):
    buckets.check_writable(place)
    assert not buckets.exists(place)
    with pytest.raises(StoreNotFound):
        buckets.pull(place, Path("nowhere.kv"))


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
    assert same(stores / "a.kv", tmp_path / "back.kv")


# --- what cannot work


def refusal(call: Callable[[], object], kind: type[OffloadDecodeError] = BucketError) -> str:
    """The sentence of an error that came within seconds and tells no secret."""
    began = time.monotonic()
    with pytest.raises(kind) as caught:
        call()
    assert time.monotonic() - began < 5
    sentence = str(caught.value)
    assert "\n" not in sentence
    told = sentence + "".join(traceback.format_exception(caught.value))
    assert not re.search("SECRETKEY|ACCESSKEY", told)
    return sentence


def test_sentences_for_s3(s3, url, stores, monkeypatch):
    def put(to: str = url) -> Callable[[], object]:
        return lambda: buckets.push(stores / "a.kv", to)

    assert "There is no bucket for s3://no-bucket/x" in refusal(put("s3://no-bucket/x"))
    assert "There is no bucket" in refusal(lambda: buckets.check_writable("s3://no-bucket/x"))
    s3.refuse_after = 0
    assert "was refused (AccessDenied): check AWS_ACCESS_KEY_ID" in refusal(put())
    s3.refuse_after = None
    with monkeypatch.context() as patch:
        patch.delenv("AWS_ACCESS_KEY_ID")
        patch.delenv("AWS_SECRET_ACCESS_KEY")
        assert "No credentials that work" in refusal(put())
    for endpoint, sentence in {
        "http://127.0.0.1:9": "out of reach",
        "https://nothing.invalid": "out of reach",
        "http://nothing.invalid": "plain http",
    }.items():
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        assert sentence in refusal(put())
    for endpoint in ("", "nothing.invalid", "ftp://nothing.invalid", "http://", "http://[", "http://a:b"):
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        assert "AWS_ENDPOINT_URL is not" in refusal(put(), ConfigError)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.url)
    monkeypatch.setenv("AWS_TIMEOUT", "soon")
    assert "One of the AWS_… variables cannot be used" in refusal(put())


def test_sentences_for_google(monkeypatch, stores):
    with serving(GoogleXml(BUCKET)) as service:
        use_google(monkeypatch, service.url, token="SECRETKEY")
        assert "was refused" in refusal(lambda: buckets.exists(f"gs://{BUCKET}/x"))
        use_google(monkeypatch, service.url)
        assert "There is no bucket" in refusal(lambda: buckets.push(stores / "a.kv", "gs://other/x"))
        clear(monkeypatch)
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/nowhere/key.json")
        assert "set GOOGLE_APPLICATION_CREDENTIALS" in refusal(lambda: buckets.exists(f"gs://{BUCKET}/x"))


def test_a_folder_that_cannot_be_made(stores, tmp_path):
    (tmp_path / "file").touch()
    assert "Not a directory" in refusal(
        lambda: buckets.push(stores / "a.kv", f"file://{tmp_path}/file/x.kv"), OffloadDecodeError
    )


@pytest.mark.parametrize(
    "text",
    ["s3://", "s3://bucket", "s3://bucket/", "s3:///x", "s3://key:SECRETKEY@bucket/x", "s3://bucket/../x",
     "s3://bucket/a//b", "file://", "file:///", "file://host/x", "file://relative", "az://a/b", "x"],
)  # fmt: skip
def test_urls_that_name_no_store(text, stores):
    assert "the URL of a store" in refusal(lambda: buckets.push(stores / "a.kv", text), ConfigError)


def test_is_url():
    assert all(map(buckets.is_url, ["s3://b/x", "gs://b/x", "file:///x"]))
    assert not any(map(buckets.is_url, ["x", "/x", "s3:/b/x", "az://b/x", "C://x", "s3", "http://b/x", ""]))


def test_without_obstore(monkeypatch, stores):
    monkeypatch.setitem(sys.modules, "obstore", None)
    assert "pip install 'offload-decode[buckets]'" in refusal(
        lambda: buckets.push(stores / "a.kv", "s3://bucket/x"), ConfigError
    )
