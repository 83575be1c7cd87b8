"""What is wrong with a store in a bucket, or stands in its way, is named, and spoils nothing."""

import os
import re
import shutil
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from offload_decode.common.errors import (
    BucketError,
    ConfigError,
    DoesNotFit,
    OffloadDecodeError,
    StoreBusy,
    StoreDamaged,
    StoreExists,
    StoreNotFound,
)
from offload_decode.prefill_jobs import buckets
from offload_decode.prefill_jobs.buckets.stores import pulling_path
from offload_decode.store.files import SEAL, SUMS, render, seal_of
from offload_decode.store.staging import locked
from tests.cli.conftest import flip
from tests.prefill_jobs.services import BUCKET, GoogleXml, clear, client, objects, serving, spoil, use_google
from tests.store.jobs import tree

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
    assert tree(stores / "a.kv") == tree(tmp_path / "back.kv")


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
    assert tree(stores / "a.kv") == tree(tmp_path / "back.kv")
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
    assert tree(stores / "a.kv") == tree(tmp_path / "a.kv")


def test_a_damaged_store_is_not_pushed(s3, url, stores, tmp_path):
    store = shutil.copytree(stores / "big.kv", tmp_path / "big.kv")
    flip(store / "layers" / "000" / "keys" / "c.1.0.0", -1)
    with pytest.raises(StoreDamaged, match=r"c\.1\.0\.0 is not what its checksum says"):
        buckets.push(store, url)
    assert not {"/layers/000/keys/c.1.0.0", f"/{SEAL}"} & objects(s3, url).keys()


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
    assert tree(stores / "a.kv") == tree(tmp_path / "back.kv")


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


@pytest.mark.parametrize("other", ["a.kv", "b.kv"])
def test_of_two_pushers_both_put_one_store_or_one_puts_its_own(s3, url, stores, tmp_path, other):
    s3.delay, names = 0.005, ["a.kv", other]
    with ThreadPoolExecutor(2) as pool:
        pushing = [pool.submit(buckets.push, stores / name, url) for name in names]
    both = [push.exception() or push.result() for push in pushing]
    s3.delay, pushed = 0.0, [isinstance(moved, buckets.Transfer) for moved in both]
    assert pushed.count(True) == (2 if other == "a.kv" else 1), both
    assert all(isinstance(moved, buckets.Transfer | StoreExists) for moved in both), both
    buckets.pull(url, tmp_path / "back.kv")
    assert tree(stores / names[pushed.index(True)]) == tree(tmp_path / "back.kv")
    assert "/PUSHING" not in objects(s3, url)


def test_a_folder_is_pushed_to_once_at_a_time(stores, tmp_path):
    with locked(tmp_path / "a.kv.pushing"), pytest.raises(StoreBusy):
        buckets.push(stores / "a.kv", f"file://{tmp_path}/a.kv")


def test_a_store_is_pulled_once_at_a_time(s3, url, stores, tmp_path):
    """Whatever is wrong with it is for the one that pulls to say."""
    buckets.push(stores / "a.kv", url)
    client(s3).delete_object(Bucket=BUCKET, Key=f"{url.split('/', 3)[3]}/tokens/c.0")
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
    assert tree(stores / "a.kv") == tree(back)


def test_a_target_that_is_taken(s3, url, stores, tmp_path):
    (tmp_path / "back.kv").touch()
    with pytest.raises(StoreExists):
        buckets.pull(url, tmp_path / "back.kv")
    assert not s3.requests


def test_check_writable(place):
    buckets.check_writable(place)
    with pytest.raises(StoreNotFound):
        buckets.pull(place, Path("nowhere.kv"))


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
        assert "was refused" in refusal(lambda: buckets.check_writable(f"gs://{BUCKET}/x"))
        use_google(monkeypatch, service.url)
        assert "There is no bucket" in refusal(lambda: buckets.push(stores / "a.kv", "gs://other/x"))
        clear(monkeypatch)
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/nowhere/key.json")
        sentence = refusal(lambda: buckets.check_writable(f"gs://{BUCKET}/x"))
        assert "set GOOGLE_APPLICATION_CREDENTIALS" in sentence


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
