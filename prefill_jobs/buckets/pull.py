"""Bucket to store: every object is hashed on arrival, and the store gets its name when all are right.

STORE.pulling/
├── lock       held by the process that pulls
├── parts/     files on their way
└── store/     complete and checked files; becomes STORE
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from offload_decode.common import files
from offload_decode.common.errors import StoreDamaged, StoreError
from offload_decode.kv.indexes import indexes_folder
from offload_decode.prefill_jobs.buckets.bucket import Bucket, parse_sums, store_sums
from offload_decode.prefill_jobs.buckets.transfer import (
    Item,
    Meter,
    Progress,
    Transfer,
    checked,
    move,
    size_of,
)
from offload_decode.store.files import SEAL, SUMS
from offload_decode.store.reader import KVStore
from offload_decode.store.staging import STORE, locked, surfaced
from offload_decode.store.writer import refuse_existing, remove_left

PARTS = "parts"


def pulling_path(path: Path) -> Path:
    return path.with_name(path.name + ".pulling")


def pull(
    url: str,
    store: Path,
    *,
    progress: Progress = lambda stage, done, total: None,
    admit: Callable[[int], None] = lambda size: None,
) -> Transfer:
    """Fetch the store at `url`, and the indexes beside it, to `store`; the same call resumes, and keeps
    exactly that store where it is there already. `admit` gets the total bytes before any is fetched, and may
    raise.

    Raises `StoreExists` where `store` is taken, `StoreBusy` where another process pulls it, `StoreDamaged`
    with the names of missing or changed objects; also `StoreNotFound`, `BucketError`, `ConfigError`.
    """
    began = time.perf_counter()
    path = Path(os.path.abspath(store))
    is_store = (path / SEAL).is_file()
    if not is_store:
        refuse_existing(path, pulling_path(path))
    bucket = Bucket(url)
    sums, listed = store_sums(bucket)
    found = bucket.read(f"{bucket.indexes}/{SUMS}")
    index_sums = parse_sums(bucket, found) if found else {}
    partial = pulling_path(path)
    if is_store:
        kept = _items(bucket, bucket.name, path, sums)
        kept += _items(bucket, bucket.indexes, indexes_folder(path), index_sums)
        if not _is_exactly(path, bucket, listed, kept, progress):
            refuse_existing(path, partial)
        remove_left(partial)
        return Transfer(0, 0, len(kept), size_of(kept), time.perf_counter() - began)
    with surfaced(partial, "what was pulled", "pull"), locked(partial):
        refuse_existing(path)
        root = partial / STORE
        items = _items(bucket, bucket.name, root, sums)
        items += _items(bucket, bucket.indexes, indexes_folder(path), index_sums)
        admit(size_of(items))
        files.remove(partial / PARTS)
        (partial / PARTS).mkdir()
        wanted = {item.path for item in items}
        for folder, _, names in os.walk(root):  # the pull may have been begun for another store
            for path_left in {Path(folder, name) for name in names} - wanted:
                path_left.unlink()
        there = _there(items, progress)
        check_room(partial, size_of(items) - size_of(there))

        def fetch(item: Item, meter: Meter) -> bool:
            """Fetch one object to its place; whether its checksum is wrong."""
            part_file = partial / PARTS / hashlib.sha256(item.key.encode()).hexdigest()
            if bucket.fetch(item.key, item.size, part_file, meter.add) != item.sha256:
                part_file.unlink()
                return True
            item.path.parent.mkdir(parents=True, exist_ok=True)
            files.sync_files([part_file])
            files.rename(part_file, item.path)
            return False

        fetched, damaged = move(items, there, fetch, "pull", progress)
        if damaged:
            raise _damaged(bucket, [item.key for item in damaged], "changed")
        files.write(root / SUMS, listed)
        files.write(root / SEAL, bucket.seal or b"")
        KVStore.open(root)
        for top in (root, indexes_folder(path)):
            files.sync_folders(folder for folder, _, _ in os.walk(top))
        refuse_existing(path)
        files.rename(root, path)
        shutil.rmtree(partial / PARTS)
        shutil.rmtree(partial)  # the lock is the last to go: it marks what is left as a pull's
    return replace(fetched, seconds=time.perf_counter() - began)


def _items(bucket: Bucket, folder: str, root: Path, sums: dict[str, str]) -> list[Item]:
    sizes = bucket.objects(folder) if sums else {}
    if missing := [f"{folder}/{name}" for name in sorted(sums) if name not in sizes]:
        raise _damaged(bucket, missing, "missing")
    return [Item(root / name, f"{folder}/{name}", sizes[name], sums[name]) for name in sorted(sums)]


def _damaged(bucket: Bucket, keys: list[str], what: str) -> StoreDamaged:
    listed = ", ".join(f"{key} ({what})" for key in sorted(keys))
    return StoreDamaged(
        f"{bucket.url} is damaged: {listed}; remove these objects, push the store again, "
        "and pull again to go on."
    )


def _there(items: list[Item], progress: Progress) -> set[Item]:
    """The items that are complete already, as an interrupted pull leaves them; each is hashed again."""

    def is_right(item: Item) -> bool:
        with open(item.path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == item.sha256

    likely = [item for item in items if item.path.is_file() and item.path.stat().st_size == item.size]
    return checked(likely, is_right, progress)


def _is_exactly(path: Path, bucket: Bucket, listed: bytes, items: list[Item], progress: Progress) -> bool:
    """Whether the store at `path` and the indexes beside it are exactly these items, to the byte."""
    lists = {path / SUMS: listed, path / SEAL: bucket.seal}
    tops = (path, indexes_folder(path))
    found = {Path(folder, name) for top in tops for folder, _, names in os.walk(top) for name in names}
    return (
        found == {*lists, *(item.path for item in items)}
        and all(file.is_file() and file.read_bytes() == data for file, data in lists.items())
        and len(_there(items, progress)) == len(items)
    )


def check_room(partial: Path, needed: int) -> None:
    """`StoreError` where the disk of `partial` has fewer bytes free."""
    free = shutil.disk_usage(partial).free
    if needed > free:
        raise StoreError(
            f"{partial} needs {needed / 1e9:,.2f} GB more and the disk has {free / 1e9:,.2f} GB free: "
            "free some space and run the same pull again."
        )
