"""A collection in a bucket, as it is read: its lists, and the stores that are asked."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from offload_decode.collections.collection import Collection
from offload_decode.collections.journal import DOCUMENTS, Entry
from offload_decode.collections.words import WORDS
from offload_decode.common import files
from offload_decode.common.errors import BucketError, StoreIncomplete, StoreNotFound
from offload_decode.prefill_jobs.buckets.bucket import Bucket, Found
from offload_decode.prefill_jobs.buckets.far_stores import FarStores, cache_of
from offload_decode.prefill_jobs.buckets.transfer import Progress
from offload_decode.store.layout import COLLECTION as HEADER

Watch = Callable[[str, int, int, str], None]
"""Told the stage, how many of how many are done, and the document."""
Watching = Callable[[], AbstractContextManager[Watch]]
"""Begins to watch, for as long as something is fetched."""

_LISTS = (HEADER, WORDS, DOCUMENTS)


def lies_at(url: str) -> bool:
    """Whether a collection, and no store, lies at `url`. Raises `BucketError`, `ConfigError`."""
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


def fetch_list(bucket: Bucket, found: Found, name: str, folder: Path) -> None:
    """Fetch one of them into a folder. Raises `BucketError` where its bytes are not those of its checksum."""
    key, digest = f"{bucket.name}/{name}", hashlib.sha256()
    with files.replacing(folder / name) as beside:
        with open(beside, "xb") as file:
            for part in bucket.parts(key, found.size):
                digest.update(part)
                file.write(part)
        if bucket.digest(key) not in (None, digest.hexdigest()):
            raise BucketError(
                f"{name} of {bucket.url} is not what its checksum says: run it again, as it may have been "
                "pushed meanwhile, or else push it again."
            )


class FarCollection(Collection):
    """A collection in a bucket that is asked. Its lists, and the stores that were asked lately, are in a
    cache of `limit` bytes.

    stores: how they come to any machine.
    """

    def __init__(self, url: str, lists: Path, limit: int, watching: Watching):
        super().__init__(lists)
        self.name = url
        self.stores = FarStores(url, (lists / HEADER).read_text(), limit)
        self._watching = watching

    @classmethod
    @contextmanager
    def opened(cls, url: str, limit: int, watching: Watching) -> Iterator[FarCollection]:
        """The collection at `url` as it is now. Raises `StoreNotFound`, `StoreIncomplete` where it is being
        pushed for the first time, `DoesNotFit`, `BucketError`, `ConfigError`.
        """
        bucket = Bucket(url)
        lists = lists_at(bucket)

        def fill(path: Path, admit: Callable[[int], None]) -> None:
            admit(sum(found.size for found in lists.values()))
            partial = path.with_suffix(".partial")
            files.make_folders(partial)
            for name, found in lists.items():
                fetch_list(bucket, found, name, partial)
            files.rename(partial, path)

        with cache_of(limit).holding(" ".join([bucket.url, *map(str, lists.values())]), fill) as path:
            yield cls(bucket.url, path, limit, watching)

    def held(self, entry: Entry) -> AbstractContextManager[Path]:
        """Where a document's store lies while it is asked: fetched first, if it is not here."""

        @contextmanager
        def fetching() -> Iterator[Progress]:
            with self._watching() as watch:
                yield lambda stage, done, total: watch(stage, done, total, entry.name)

        return self.stores.held(self.address(entry), fetching)
