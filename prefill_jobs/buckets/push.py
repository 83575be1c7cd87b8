"""Store to bucket: objects with the right checksum stay, the rest is put, the lists of checksums last."""

from __future__ import annotations

import hashlib
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from uuid import uuid4

from offload_decode.common.errors import StoreDamaged, StoreExists
from offload_decode.kv.indexes import indexes_folder, kind_folders
from offload_decode.prefill_jobs.buckets.bucket import CLAIM, PART, Bucket, parse_sums
from offload_decode.prefill_jobs.buckets.transfer import Item, Meter, Progress, Transfer, checked, move
from offload_decode.store.files import SEAL, SUMS, hash_files, read_sums, render, seal_of
from offload_decode.store.reader import KVStore
from offload_decode.store.staging import locked


def exists(url: str) -> bool:
    """Whether a whole store lies at `url`. Raises `BucketError`, `ConfigError`."""
    return Bucket(url).seal is not None


def check_writable(url: str) -> None:
    """Put a small object beside `url` and remove it, so that hours of work for `url` are not in vain.

    An unfinished push is accepted. Raises `StoreExists` for a store or anything else there, and `BucketError`
    where nothing can be written.
    """
    bucket = Bucket(url)
    if bucket.seal is not None:
        raise StoreExists(f"{bucket.url} holds a store already: choose another URL, or remove it first.")
    if (there := bucket.objects(bucket.name)) and CLAIM not in there:
        raise taken(bucket)
    probe = f"{bucket.name}.probe-{uuid4().hex}"
    bucket.create(probe, b"")
    bucket.remove(probe)


def push(store: Path, url: str, *, progress: Progress = lambda stage, done, total: None) -> Transfer:
    """Put the store at `store` and the indexes beside it under `url`; the same call resumes.

    Raises `StoreError`, `StoreExists` where another store is there, `BucketError`, `ConfigError`.
    """
    began = time.perf_counter()
    root = KVStore.open(store).path
    sums = read_sums(root)
    bucket = Bucket(url)
    with _claimed(bucket, seal_of(render(sums))) as whole:
        own = _index_sums(root, progress)
        before = bucket.read(f"{bucket.indexes}/{SUMS}")
        # Where all of the store is there already, earlier indexes stay.
        kept = parse_sums(bucket, before) if before and (whole or not own) else {}
        index_list = render(kept | own) if own else before
        items = _items(root, bucket.name, sums) + _items(indexes_folder(root), bucket.indexes, own)
        there = _there(bucket, items, progress)
        sent, _ = move(items, there, partial(send, bucket), "push", progress)
        lists = {f"{bucket.indexes}/{SUMS}": index_list} if index_list else {}
        lists[f"{bucket.name}/{SUMS}"] = render(sums)
        lists[f"{bucket.name}/{SEAL}"] = seal_of(render(sums))
        for key, data in lists.items():
            if bucket.read(key) != data:
                bucket.put(key, data, hashlib.sha256(data).hexdigest(), len(data))
    return replace(sent, seconds=time.perf_counter() - began)


@contextmanager
def _claimed(bucket: Bucket, seal: bytes) -> Iterator[bool]:
    """Hold the URL for the store of this `seal`; yields whether all of it is there already.

    Several pushes of the same store may hold it together: they put the same bytes. The claim is removed when
    the seal is there, or when there was nothing to claim; an interrupted push leaves it for its resumption.
    """
    with _alone(bucket):
        claim = f"{bucket.name}/{CLAIM}"
        ours = claimed(bucket, seal, "store", "choose another URL, or remove what lies there first")
        there = bucket.read(f"{bucket.name}/{SEAL}")
        foreign = ours and there is None and bucket.objects(bucket.name).keys() - {CLAIM}
        if foreign or there not in (None, seal):
            if ours:
                bucket.remove(claim)
            raise taken(bucket)
        yield there is not None
        for folder in (bucket.folder, Path("/", bucket.indexes)) if bucket.folder else ():
            for path in folder.rglob("*#*"):
                if re.search(r"#\d+$", path.name):  # obstore's unfinished files are named NAME#NUMBER
                    path.unlink()
        bucket.remove(claim)


def claimed(bucket: Bucket, who: bytes, what: str, way_out: str) -> bool:
    """Put the claim of a push; False where it is there already. `StoreExists` where another one is."""
    claim = f"{bucket.name}/{CLAIM}"
    while not (ours := bucket.create(claim, who)):
        if (other := bucket.read(claim)) == who:
            break
        if other is not None:
            raise StoreExists(
                f"Another {what} is being pushed to {bucket.url}, or its push was interrupted: {way_out}."
            )
    return ours


def taken(bucket: Bucket, what: str = "this store") -> StoreExists:
    return StoreExists(
        f"{bucket.url} holds something else than {what}: choose another URL, or remove it first."
    )


@contextmanager
def _alone(bucket: Bucket) -> Iterator[None]:
    """One push at a time writes to a folder, and so unfinished files of a killed one can be removed."""
    if bucket.folder is None:
        yield
        return
    lock = bucket.folder.with_name(bucket.folder.name + ".pushing")
    with locked(lock):
        try:
            yield
        finally:
            shutil.rmtree(lock)


def _index_sums(store: Path, progress: Progress) -> dict[str, str]:
    """SHA-256 of the complete indexes, by path in their folder."""
    folder = indexes_folder(store)
    found = (path for kind in kind_folders(store) for path in kind.iterdir())
    files = [path for path in found if path.is_file() and path.suffix != ".tmp"]
    names = [path.relative_to(folder).as_posix() for path in files]
    return hash_files(folder, names, lambda done, total: progress("hash indexes", done, total))


def _items(root: Path, key: str, sums: dict[str, str]) -> list[Item]:
    return [Item(root / name, f"{key}/{name}", (root / name).stat().st_size, sums[name]) for name in sums]


def _there(bucket: Bucket, items: list[Item], progress: Progress) -> set[Item]:
    """The items whose objects are there already, with the right size and checksum."""
    folders = {folder: bucket.objects(folder) for folder in (bucket.name, bucket.indexes)}
    sizes = {f"{folder}/{name}": size for folder in folders for name, size in folders[folder].items()}
    likely = [item for item in items if sizes.get(item.key) == item.size]
    return checked(likely, lambda item: bucket.digest(item.key) == item.sha256, progress)


def send(bucket: Bucket, item: Item, meter: Meter) -> bool:
    """Put a file; `StoreDamaged` where its checksum does not match."""
    parts = _read(item, meter)
    bucket.put(item.key, b"".join(parts) if item.size <= PART else parts, item.sha256, item.size)
    return True


def _read(item: Item, meter: Meter) -> Iterator[bytes]:
    """The parts of a file; `StoreDamaged` at its end where its checksum does not match.

    obstore gives up an upload whose source raises, and so a damaged file never becomes an object.
    """
    digest = hashlib.sha256()
    with open(item.path, "rb") as file:
        while part := file.read(PART):
            digest.update(part)
            meter.add(len(part))
            yield part
    if digest.hexdigest() != item.sha256:
        raise StoreDamaged(
            f"{item.path} is not what its checksum says: see `offload-decode verify`, and restore it from a "
            "copy or prefill again."
        )
