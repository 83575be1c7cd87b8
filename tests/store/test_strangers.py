"""What a stranger may put into a store beside wrong numbers: names that lead out, pipes, text without end."""

from __future__ import annotations

import json
import os
import subprocess
import zlib
from pathlib import Path

import pytest

from offload_decode.common.errors import StoreDamaged, StoreError, StoreForeign, StoreIncomplete
from offload_decode.kv.indexes import indexes_folder
from offload_decode.prefill_jobs.indexing import build_indexes
from offload_decode.store import KVStore, Manifest, files, verify_store
from offload_decode.store.reader import names_of
from offload_decode.store.staging import LOCK, REPLACED, STORE, WINDOWS, partial_path
from tests.store.jobs import FULL, SLIDING, Job, make_job


def named(store: Path, sums: str) -> None:
    """Make this the store's list of checksums, with a seal that fits."""
    (store / files.SUMS).write_text(sums)
    (store / files.SEAL).write_bytes(files.seal_of(sums.encode()))


@pytest.mark.parametrize(
    "name", ["../{}/zarr.json", "/etc/zarr.json", "a\0b/zarr.json", "./zarr.json", "tokens/c.0"]
)
def test_checksums_name_files_of_the_store_once(store: Path, name: str) -> None:
    named(store, (store / files.SUMS).read_text() + f"{'0' * 64}  {name.format(store.name)}\n")
    with pytest.raises(StoreDamaged, match="not a list of the files of a store"):
        KVStore.open(store)


def test_verify_takes_no_path_without_end(store: Path) -> None:
    deep = "/".join(["a"] * 200_000)
    named(store, (store / files.SUMS).read_text() + f"{'0' * 64}  {deep}\n")
    with pytest.raises(StoreDamaged, match="names what is no file of a store") as caught:
        verify_store(store)
    assert len(str(caught.value)) < 1000


def test_verify_walks_into_no_folders_without_end(store: Path) -> None:
    here = os.open(store, os.O_RDONLY)
    for _ in range(1200):  # deeper than Python recurses
        os.mkdir("d", dir_fd=here)
        inner = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(here)
    with pytest.raises(StoreDamaged, match=r"d/d/d.* \(not of this store\)"):
        verify_store(store)
    subprocess.run(["rm", "-r", store / "d"], check=True)


@pytest.mark.parametrize("name", [STORE, WINDOWS, REPLACED])
def test_a_pipe_in_a_staging_folder_is_removed(job: Job, tmp_path: Path, name: str) -> None:
    partial = partial_path(tmp_path / "s")
    partial.mkdir()
    (partial / LOCK).touch()
    os.mkfifo(partial / name)
    job.write(tmp_path / "s")
    verify_store(tmp_path / "s")
    assert not partial.exists()


@pytest.mark.parametrize("kind", ["flat.partial", "flat.old"])
def test_a_pipe_beside_indexes_is_removed(store: Path, kind: str) -> None:
    build_indexes(store, "flat")
    os.mkfifo(indexes_folder(store) / kind)
    build_indexes(store, "flat")
    assert [path.name for path in indexes_folder(store).iterdir()] == ["flat"]


def test_a_sentence_does_not_name_a_hundred_thousand_files(store: Path) -> None:
    sums = files.read_sums(store) | {f"more/{n}": "0" * 64 for n in range(100_000)}
    named(store, files.render(sums).decode())
    with pytest.raises(StoreDamaged, match=r"and 99,950 more\)") as caught:
        KVStore.open(store)
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize(
    "text", ["[[],[],[]]", '["a", {}]', '["a"', "[1]", '{"a": "b"}', '"a"', "", '["a" b]']
)
def test_names_are_texts_before_they_are_parsed(text: str) -> None:
    with pytest.raises(ValueError, match=r"list of names|Expecting"):
        names_of(text.encode())


def test_names_are_read_as_they_were_written() -> None:
    names = ["a", "", 'b "c" \\ [', "ü\n", "]"]
    assert names_of(json.dumps(names).encode()) == names
    assert names_of(b"[]") == []


def test_addresses_that_there_are_not_are_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "f"
    with pytest.raises(StoreError, match="cannot be mapped into memory"):
        files.map_files([file] * 2, 1 << 62)


@pytest.mark.parametrize("kind", ["pipe", "link", "folder"])
def test_a_lock_is_a_plain_file(job: Job, tmp_path: Path, kind: str) -> None:
    with job.open(tmp_path / "s") as writer:
        job.feed(writer, until=100)
    lock = tmp_path / "s.partial/lock"
    lock.unlink()
    {"pipe": os.mkfifo, "link": lambda path: path.symlink_to(tmp_path / "made"), "folder": os.mkdir}[kind](
        lock
    )
    with pytest.raises(StoreDamaged, match="lock in"):
        job.open(tmp_path / "s")
    assert not (tmp_path / "made").exists(), "a link would make a file elsewhere"


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": "x"},
        {"tokens": [100]},
        {"tokens": -100},
        {"crcs": {"tokens": ["x"]}},
        {"segments": {"1": [["../..", 100, 0]]}},
        {"segments": {"1": [[0, 100, 0], [50, 100, 0]]}},
        {"errors": {"layers/000/keys": [0.0]}},
    ],
)
def test_progress_from_elsewhere_is_looked_at(job: Job, tmp_path: Path, change: dict[str, object]) -> None:
    with job.open(tmp_path / "s") as writer:
        job.feed(writer, until=100)
    progress = tmp_path / "s.partial/progress.json"
    body = json.loads(progress.read_text()) | change
    body.pop("crc")
    progress.write_text(json.dumps({**body, "crc": zlib.crc32(json.dumps(body).encode())}))
    with pytest.raises(StoreIncomplete, match="run it again to go on"):
        KVStore.open(tmp_path / "s")
    with pytest.raises(StoreDamaged, match="is damaged: remove"):
        job.open(tmp_path / "s")


def test_no_more_queries_than_their_places_may_take(store: Path) -> None:
    """A sparse file of a terabyte of them takes no disk, and would take all memory."""
    manifest = json.loads((store / "zarr.json").read_text())["attributes"]["offload_decode"]
    Manifest.from_json(manifest | {"query_samples": 10**12})  # of 1,300 tokens there are 2,600
    with pytest.raises(StoreForeign, match="more than 1,048,576 queries"):
        Manifest.from_json(manifest | {"query_samples": 10**12, "n_tokens": 10**9, "seam": 0})


@pytest.mark.parametrize("name", ["layers/000/keys/c.0.0.0", "zarr.json", "tokens/zarr.json"])
def test_verify_reads_no_hole_of_terabytes(store: Path, name: str) -> None:
    """It would take hours: what a file of the store should have, or could, is known."""
    with open(store / name, "ab") as file:
        file.truncate(1 << 42)
    with pytest.raises(StoreDamaged, match=f"{name} .*4,398,046,511,104 bytes"):
        verify_store(store)


def test_verify_names_a_file_of_another_size_beside_those_that_changed(store: Path) -> None:
    keys, values = (store / f"layers/000/{name}/c.0.0.0" for name in ("keys", "values"))
    size = keys.stat().st_size
    os.truncate(keys, size + 1)
    values.write_bytes(bytes(values.stat().st_size))
    with pytest.raises(StoreDamaged) as caught:
        verify_store(store)
    assert f"keys/c.0.0.0 ({size + 1:,} bytes instead of {size:,})" in str(caught.value)
    assert "values/c.0.0.0 (changed)" in str(caught.value)


@pytest.mark.parametrize(
    "name", ["001/window_keys/c.0.0.0", "000/keys/c.0.0.0", "000/key_norms/c.0.0.0", "000/zarr.json"]
)
def test_a_staged_file_of_another_size_is_not_gone_on_with(tmp_path: Path, name: str) -> None:
    job = make_job(300, layers=(FULL, SLIDING))
    with job.open(tmp_path / "s") as writer:
        job.feed(writer, until=100)
    os.truncate(tmp_path / f"s.partial/store/layers/{name}", 1 << 42)
    with pytest.raises(StoreDamaged, match=name.removesuffix("/c.0.0.0")):
        job.open(tmp_path / "s")
