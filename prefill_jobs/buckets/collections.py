"""Collections in buckets: the same tree of objects under a URL as of files in a folder, without the lock.

URL/collection.json       put first
URL/words.sqlite          put when all stores are there,
URL/documents.jsonl       followed by the list of them
URL/stores/3f/3f0c….kv/…  each store as `push` puts it
URL/PUSHING               during a push: which collection is pushed

A machine that asks a collection in a bucket caches its lists and the stores that were asked lately.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from offload_decode.collections.collection import STORES, Changing, Collection, Header
from offload_decode.collections.journal import DOCUMENTS, Entry
from offload_decode.collections.words import WORDS, Words
from offload_decode.common import files
from offload_decode.common.errors import (
    BucketError,
    ConfigError,
    StoreExists,
    StoreIncomplete,
    StoreMismatch,
    StoreNotFound,
)
from offload_decode.indexes.verified import cache_folder
from offload_decode.kv.indexes import kind_folders
from offload_decode.prefill_jobs.buckets.bucket import CLAIM, Bucket, Found
from offload_decode.prefill_jobs.buckets.cache import Cache, name_of
from offload_decode.prefill_jobs.buckets.stores import (
    check_room,
    claimed,
    pull,
    pulling_path,
    push,
    send,
    taken,
)
from offload_decode.prefill_jobs.buckets.transfer import Item, Meter, Transfer, Watch, checked, in_parallel
from offload_decode.store.files import SEAL, Progress
from offload_decode.store.layout import COLLECTION as HEADER
from offload_decode.store.staging import STORE, locked, surfaced
from offload_decode.store.writer import refuse_existing

Watching = Callable[[], AbstractContextManager[Watch]]
"""Opens a `Watch` for the time of a fetch."""

_LISTS = (HEADER, WORDS, DOCUMENTS)
_STORE = re.compile(r"([0-9a-f]{32}\.kv)(?:\.indexes)?")


@dataclass
class Moved:
    """The result for a collection: documents that were `moved`, were there already (`kept`), or are `gone`
    and were removed; moved files and bytes, without the lists, and seconds.
    """

    moved: int = 0
    kept: int = 0
    gone: int = 0
    files: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def add(self, store: Transfer) -> None:
        self.moved += 1
        self.files += store.files
        self.bytes += store.bytes


def push_collection(path: Path, url: str, progress: Watch, drop: bool = False) -> Moved:
    """Make `url` equal to the collection at `path`: put missing stores and indexes, then the lists, and
    remove stores that no document has. The same call resumes.

    Raises `ConfigError` where most of what is there would be removed, unless `drop`; `StoreExists` where
    anything else is there; `StoreMismatch` for a collection of another model; `StoreBusy` while the
    collection is changed or pushed; also `StoreError`, `BucketError`.
    """
    began, moved = time.perf_counter(), Moved()
    Header.read(path)
    with Changing.at(path) as changing:
        entries = sorted(changing.journal.entries.values())
        stores = {entry.store: changing.store(entry.store) for entry in entries}
        there = (path / WORDS).exists()
        if there:  # opening them rolls back what a killed process left
            with Words(path / WORDS) as words:
                there = all(entry.store in words for entry in entries)
        if not there:
            raise StoreIncomplete(f"Words of the collection {path} are missing: collect again, then push.")
        bucket = Bucket(url)
        before = 0 if drop else len(_stores(bucket))
        if 2 * len(stores) < before:
            raise ConfigError(
                f"{before:,} documents lie at {bucket.url}, and this collection has {len(stores):,}: give "
                "--drop if the others shall be removed there, or collect them first"
            )
        with _claimed(bucket, path):
            whole = _whole(bucket, stores)
            for number, entry in enumerate(entries):
                progress("push documents", number, len(entries), entry.name)
                store = stores[entry.store]
                same = entry.store in whole and not kind_folders(store)
                sent = None if same else _push_store(bucket, entry.store, store)
                if sent is not None and sent.files:
                    moved.add(sent)
                else:
                    moved.kept += 1
            # Words without a document are ignored; a document without words is not found.
            for name in (WORDS, DOCUMENTS):
                _put(bucket, path, name)
            gone = _stores(bucket) - stores.keys()
            for name in gone:
                _remove_store(bucket, name)
            moved.gone = len(gone)
    moved.seconds = time.perf_counter() - began
    return moved


def pull_collection(url: str, path: Path, progress: Watch) -> Moved:
    """Fetch the collection at `url` with all its stores to `path`; the same call resumes.

    Raises `StoreExists` where `path` is taken, `StoreBusy` where another process pulls it; also `StoreError`,
    `BucketError`, `ConfigError`.
    """
    began, moved = time.perf_counter(), Moved()
    path = Path(os.path.abspath(path))
    refuse_existing(path, pulling_path(path))
    bucket, partial = Bucket(url), pulling_path(path)
    lists = lists_at(bucket)
    with surfaced(partial, "what was pulled", "pull"), locked(partial):
        refuse_existing(path)
        root = partial / STORE
        header = root / HEADER
        if header.exists() and header.read_bytes() != bucket.read(f"{bucket.name}/{HEADER}"):
            shutil.rmtree(root)  # of another model, whose stores have the same names
        check_room(partial, sum(found.size for found in lists.values()))
        fetch_lists(bucket, lists, root)
        collection = Collection(root)
        for number, entry in enumerate(collection.entries):
            progress("pull documents", number, len(collection.entries), entry.name)
            store = collection.store(entry)
            if store.exists():
                moved.kept += 1
            else:
                files.make_folders(store.parent)
                moved.add(pull(f"{bucket.url}/{entry.store}", store))
        Changing(root).sweep({entry.store for entry in collection.entries})  # of an earlier pull
        refuse_existing(path)
        files.rename(root, path)
        shutil.rmtree(partial)
    moved.seconds = time.perf_counter() - began
    return moved


@contextmanager
def _claimed(bucket: Bucket, path: Path) -> Iterator[None]:
    """Hold the URL for the collection at `path`, and put its header. An interrupted push leaves its claim for
    its resumption.
    """
    claim, header = f"{bucket.name}/{CLAIM}", f"{bucket.name}/{HEADER}"
    who = hashlib.sha256(f"{platform.node()} {os.path.realpath(path)}".encode()).hexdigest().encode()
    claimed(bucket, who, "collection", f"push that one again, or remove {CLAIM} there first")
    ours, there = (path / HEADER).read_bytes(), bucket.read(header)
    if there is None and bucket.objects(bucket.name).keys() - {CLAIM}:
        bucket.remove(claim)
        raise taken(bucket, "a collection")
    if there not in (None, ours):
        bucket.remove(claim)
        raise StoreMismatch(
            f"{bucket.url} is a collection of another model, or prefilled in another way: choose another "
            "URL, or remove it first."
        )
    _put(bucket, path, HEADER)
    yield
    bucket.remove(claim)


def _whole(bucket: Bucket, stores: Mapping[str, Path]) -> set[str]:
    """Those of the stores that are in the bucket already, with the same bytes."""
    items = {Item(path / SEAL, f"{bucket.name}/{name}/{SEAL}", 0, ""): name for name, path in stores.items()}
    for item in items:
        if not item.path.exists():
            raise StoreNotFound(f"There is no store at {item.path.parent}: collect again, then push.")
    right = checked([*items], lambda item: bucket.read(item.key) == item.path.read_bytes(), lambda *_: None)
    return {items[item] for item in right}


def _push_store(bucket: Bucket, name: str, store: Path) -> Transfer:
    url = f"{bucket.url}/{name}"
    try:
        return push(store, url)
    except StoreExists:  # made again from the same document; the URL is held for this collection
        _remove_store(bucket, name)
        return push(store, url)


def _put(bucket: Bucket, path: Path, name: str) -> None:
    with open(path / name, "rb") as file:
        sha256, size = hashlib.file_digest(file, "sha256").hexdigest(), os.fstat(file.fileno()).st_size
    item = Item(path / name, f"{bucket.name}/{name}", size, sha256)
    found = bucket.found(item.key)
    if found is None or found.size != size or bucket.digest(item.key) != sha256:
        # In a thread: obstore keeps Ctrl-C waiting for the network in the main one.
        in_parallel([item], lambda own, meter: send(bucket, own, meter), lambda done: None)


def _stores(bucket: Bucket) -> set[str]:
    """The names of the stores that are there, in whole or in part, or by their indexes alone."""
    return {
        f"{STORES}/{folder.rpartition('/')[2]}/{own[1]}"
        for folder in bucket.folders(f"{bucket.name}/{STORES}")
        for key in bucket.folders(folder)
        if (own := _STORE.fullmatch(key.rpartition("/")[2]))
    }


def _remove_store(bucket: Bucket, name: str) -> None:
    def remove(item: Item, meter: Meter) -> bool:
        meter.add(0)  # raises where another thread has failed
        bucket.remove(item.key)
        return True

    for folder in (f"{bucket.name}/{name}", f"{bucket.name}/{name}.indexes"):
        bucket.remove(f"{folder}/{SEAL}")  # first, so that the rest is not taken for a store
        items = [Item(Path(), f"{folder}/{key}", 0, "") for key in bucket.objects(folder) if key != SEAL]
        in_parallel(items, remove, lambda done: None)
        if bucket.folder:  # empty folders are left
            shutil.rmtree(Path("/", folder), ignore_errors=True)


def is_collection_at(url: str) -> bool:
    """Whether a collection is at `url`. Raises `BucketError`, `ConfigError`."""
    bucket = Bucket(url)
    return bucket.found(f"{bucket.name}/{HEADER}") is not None


def lists_at(bucket: Bucket) -> dict[str, Found]:
    """The lists of a collection, by name. Raises `StoreNotFound`, `StoreIncomplete`, `BucketError`."""
    found = {name: bucket.found(f"{bucket.name}/{name}") for name in _LISTS}
    if found[HEADER] is None:
        raise StoreNotFound(
            f"There is no collection at {bucket.url}: make one with `offload-decode push`, or mend the URL."
        )
    there = {name: one for name, one in found.items() if one is not None}
    if len(there) < len(found):
        raise StoreIncomplete(f"The push to {bucket.url} has not finished: run it again to go on.")
    return there


def fetch_lists(bucket: Bucket, lists: dict[str, Found], folder: Path) -> None:
    """Fetch the lists into a folder. Raises `BucketError` where a checksum does not match."""
    files.make_folders(folder)
    for name, found in lists.items():
        key = f"{bucket.name}/{name}"
        with files.replacing(folder / name) as beside:
            digest = bucket.fetch(key, found.size, beside, lambda size: None)
            if bucket.digest(key) not in (None, digest):
                raise BucketError(
                    f"{name} of {bucket.url} is not what its checksum says: run it again, as it may have "
                    "been pushed meanwhile, or else push it again."
                )


def cache_of(limit: int, patience: float = 0.0) -> Cache:
    return Cache(cache_folder() / "fetched", limit, patience)


@dataclass(frozen=True)
class RemoteStores:
    """The stores of a collection in a bucket, as any machine gets them. `url`: the collection's; `header`:
    its collection.json; `limit`: bytes of a machine's cache.
    """

    url: str
    header: str
    limit: int

    def check(self) -> None:
        """Raise `BucketError` or `ConfigError` where this machine cannot use the bucket."""
        Bucket(self.url)

    def cache(self, patience: float = 0.0) -> Cache:
        return cache_of(self.limit, patience)

    def name(self, store: str) -> str:
        """The name in the cache of the store at a URL."""
        return name_of(self._key(store))

    def held(
        self, store: str, fetching: Callable[[], AbstractContextManager[Progress]], patience: float = 0.0
    ) -> AbstractContextManager[Path]:
        """The path of the store at a URL while it is in use; fetched first, inside `fetching`, if it is not
        cached. Raises `DoesNotFit`, and as `pull`.
        """

        def fill(path: Path, admit: Callable[[int], None]) -> None:
            with fetching() as progress:
                pull(store, path, progress=progress, admit=admit)

        return self.cache(patience).holding(self._key(store), fill)

    def _key(self, store: str) -> str:
        # The URL identifies the document's bytes, the header what a prefill makes of them.
        return f"{store} {self.header}"


class RemoteCollection(Collection):
    """A collection that is asked in its bucket, with a cache of `limit` bytes for its lists and the stores
    asked lately; `stores`: how any machine gets them.
    """

    def __init__(self, url: str, lists: Path, limit: int, watching: Watching):
        super().__init__(lists)
        self.name = url
        self.stores = RemoteStores(url, (lists / HEADER).read_text(), limit)
        self._watching = watching

    @classmethod
    @contextmanager
    def opened(cls, url: str, limit: int, watching: Watching) -> Iterator[RemoteCollection]:
        """The collection at `url` as it is now. Raises `StoreNotFound`, `StoreIncomplete` during its first
        push, `DoesNotFit`, `BucketError`, `ConfigError`.
        """
        bucket = Bucket(url)
        lists = lists_at(bucket)

        def fill(path: Path, admit: Callable[[int], None]) -> None:
            admit(sum(found.size for found in lists.values()))
            partial = path.with_suffix(".partial")
            fetch_lists(bucket, lists, partial)
            files.rename(partial, path)

        with cache_of(limit).holding(" ".join([bucket.url, *map(str, lists.values())]), fill) as path:
            yield cls(bucket.url, path, limit, watching)

    def held(self, entry: Entry) -> AbstractContextManager[Path]:
        """The path of a document's store while it is asked; fetched first if it is not cached."""

        @contextmanager
        def fetching() -> Iterator[Progress]:
            with self._watching() as watch:
                yield lambda stage, done, total: watch(stage, done, total, entry.name)

        return self.stores.held(self.address(entry), fetching)
