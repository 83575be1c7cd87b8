"""Who pushed a collection: one statement of its lists and of those of each of its stores, so that none is
exchanged for another of the same signer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from offload_decode.collections.journal import DOCUMENTS
from offload_decode.collections.words import WORDS
from offload_decode.errors import StoreUntrusted
from offload_decode.store.checksums import SUMS, render
from offload_decode.store.metadata import COLLECTION as HEADER
from prefill_jobs.buckets.bucket import Bucket
from prefill_jobs.buckets.push import index_sums
from prefill_jobs.buckets.signatures import check_said, digests_at, name_of


@dataclass(frozen=True)
class OfCollection:
    """Checks the stores of the collection in `bucket` by what a `Verifier` says was signed of all of it."""

    bucket: Bucket
    said: Mapping[str, str]

    def check(self, bucket: Bucket, sums: bytes, index_sums: bytes | None) -> None:
        """`StoreUntrusted` unless these lists of checksums were signed of the store in this bucket."""
        store = bucket.name.removeprefix(self.bucket.name[: -len(name_of(self.bucket))])
        check_said(bucket, self.of_store(store), digests_at(store, sums, index_sums))

    def of_store(self, store: str) -> dict[str, str]:
        """What was said of a store, by its path from the folder that holds the collection."""
        paths = f"{store}/{SUMS}", f"{store}.indexes/{SUMS}"
        return {path: self.said[path] for path in paths if path in self.said}


def digests(bucket: Bucket, path: Path, stores: Mapping[str, Path]) -> dict[str, str]:
    """What is signed of the collection at `path` with these stores, all of which lie in the bucket."""
    name = name_of(bucket)
    digests = {f"{name}/{one}": _sha256(path / one) for one in (HEADER, WORDS, DOCUMENTS)}
    for store, here in stores.items():
        digests |= _digests_of(here, f"{name}/{store}")
        there = bucket.read(f"{bucket.name}/{store}.indexes/{SUMS}")
        said = there and hashlib.sha256(there).hexdigest()
        if said != digests.get(f"{name}/{store}.indexes/{SUMS}"):
            raise StoreUntrusted(
                f"The indexes of {store} at {bucket.url} are not those that lie here: remove them there, and "
                "push again."
            )
    return digests


def _digests_of(here: Path, store: str) -> dict[str, str]:
    """SHA-256 of the lists of checksums of a store and of the indexes beside it."""
    digests = {f"{store}/{SUMS}": _sha256(here / SUMS)}
    if indexes := index_sums(here, lambda stage, done, total: None):
        digests[f"{store}.indexes/{SUMS}"] = hashlib.sha256(render(indexes)).hexdigest()
    return digests


def check_lists(signed: OfCollection, root: Path) -> None:
    """`StoreUntrusted` unless the lists in the folder `root` are those that were signed."""
    name = name_of(signed.bucket)
    found = {f"{name}/{one}": _sha256(root / one) for one in (HEADER, WORDS, DOCUMENTS)}
    check_said(signed.bucket, {path: signed.said.get(path, "") for path in found}, found)


def check_kept(signed: OfCollection, here: Path, store: str) -> None:
    """`StoreUntrusted` unless the store at `here`, perhaps fetched unverified, is what was signed."""
    store = f"{name_of(signed.bucket)}/{store}"
    check_said(signed.bucket, signed.of_store(store), _digests_of(here, store))


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
