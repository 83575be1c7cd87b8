"""A store to a bucket and back. Pushed: objects with the right checksum stay, the rest is put, the lists of
checksums last. Pulled: every object is hashed on arrival, and the store gets its name when all are right.

STORE.pulling/
├── lock       held by the process that pulls
├── parts/     files on their way
└── store/     complete and checked files; becomes STORE
"""

import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

from offload_decode.common import files
from offload_decode.common.errors import StoreDamaged, StoreError, StoreExists
from offload_decode.kv.indexes import indexes_folder, kind_folders
from offload_decode.prefill_jobs.buckets.bucket import CLAIM, PART, Bucket, parse_sums, store_sums
from offload_decode.prefill_jobs.buckets.transfer import Item, Meter, Transfer, checked, move, size_of
from offload_decode.store.files import SEAL, SUMS, Progress, hash_files, read_sums, render, seal_of
from offload_decode.store.reader import KVStore
from offload_decode.store.staging import STORE, locked, surfaced
from offload_decode.store.writer import refuse_existing, remove_left

PARTS = "parts"


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
        items = _to_push(root, bucket.name, sums) + _to_push(indexes_folder(root), bucket.indexes, own)
        there = _sent(bucket, items, progress)
        sent, _ = move(items, there, lambda item, meter: send(bucket, item, meter), "push", progress)
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


def _to_push(root: Path, key: str, sums: dict[str, str]) -> list[Item]:
    return [Item(root / name, f"{key}/{name}", (root / name).stat().st_size, sums[name]) for name in sums]


def _sent(bucket: Bucket, items: list[Item], progress: Progress) -> set[Item]:
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
    partial = pulling_path(path)
    is_store = (path / SEAL).is_file()
    if not is_store:
        refuse_existing(path, partial)
    bucket = Bucket(url)
    sums, listed = store_sums(bucket)
    found = bucket.read(f"{bucket.indexes}/{SUMS}")
    index_sums = parse_sums(bucket, found) if found else {}

    def items_in(root: Path) -> list[Item]:
        own = _to_pull(bucket, bucket.name, root, sums)
        return own + _to_pull(bucket, bucket.indexes, indexes_folder(path), index_sums)

    if is_store:
        items = items_in(path)
        if not _is_exactly(path, bucket, listed, items, progress):
            refuse_existing(path, partial)
        remove_left(partial, over=not (partial / STORE).exists())
        return Transfer(0, 0, len(items), size_of(items), time.perf_counter() - began)
    with surfaced(partial, "what was pulled", "pull"), locked(partial):
        refuse_existing(path)  # another process may have pulled it meanwhile
        root = partial / STORE
        items = items_in(root)
        admit(size_of(items))
        files.remove(partial / PARTS)
        (partial / PARTS).mkdir()
        wanted = {item.path for item in items}
        for folder, _, names in os.walk(root):  # the pull may have been begun for another store
            for path_left in {Path(folder, name) for name in names} - wanted:
                path_left.unlink()
        there = _arrived(items, progress)
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


def _to_pull(bucket: Bucket, folder: str, root: Path, sums: dict[str, str]) -> list[Item]:
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


def _arrived(items: list[Item], progress: Progress) -> set[Item]:
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
        and len(_arrived(items, progress)) == len(items)
    )


def check_room(partial: Path, needed: int) -> None:
    """`StoreError` where the disk of `partial` has fewer bytes free."""
    free = shutil.disk_usage(partial).free
    if needed > free:
        raise StoreError(
            f"{partial} needs {needed / 1e9:,.2f} GB more and the disk has {free / 1e9:,.2f} GB free: "
            "free some space and run the same pull again."
        )
