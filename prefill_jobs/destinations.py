"""Where a store is to be: a path, or a URL for which it is written beside and pushed when it is whole."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from offload_decode.common import files
from offload_decode.common.errors import (
    ConfigError,
    StoreBusy,
    StoreError,
    StoreExists,
    StoreForeign,
    StoreMismatch,
)
from offload_decode.common.files import lock, remove
from offload_decode.kv.indexes import OLD
from offload_decode.prefill_jobs.buckets import Transfer, check_writable, push
from offload_decode.prefill_jobs.buckets.bucket import Bucket
from offload_decode.prefill_jobs.buckets.cache import user_cache
from offload_decode.store.files import SEAL
from offload_decode.store.format import Manifest, fingerprint_version
from offload_decode.store.layout import ROOT, header_of
from offload_decode.store.reader import KVStore
from offload_decode.store.staging import LOCK, locked
from offload_decode.store.writer import refuse_existing
from offload_decode.types import Document

Progress = Callable[[str, int, int], None]


class Found(NamedTuple):
    """A whole store: its manifest, its bytes, and its documents where reading them fetches nothing."""

    manifest: Manifest
    bytes: int
    documents: list[Document] | None


class Place(ABC):
    """`name` is what the user calls it."""

    name: str

    def admit(self) -> None:
        """Refuse, before the work begins, a place where no store can be put. One that holds a store is
        admitted: whether it is the one that is wanted shows when the corpus is read.
        """
        with suppress(StoreExists):
            self.check()
        self.found()

    @abstractmethod
    def check(self) -> None:
        """Raise `StoreExists` where something is there, `BucketError` where nothing could be put."""

    @abstractmethod
    def found(self) -> Found | None:
        """The store that lies there; None where there is none that is whole."""

    @abstractmethod
    @contextmanager
    def opened(self) -> Iterator[Path]:
        """The path to write the store to."""

    @abstractmethod
    def deliver(self, progress: Progress) -> Transfer | None:
        """Bring the whole store from the path of `opened` to its place; what was sent, if anything."""


def place_of(out: str | Path, staging: Path | None = None) -> Place:
    """The place that `--out` names; `staging` is where stores for URLs are written."""
    if "://" in str(out):
        return InBucket(str(out), staging or default_staging())
    if Path(out).name in ("", ".."):
        raise ConfigError(
            f"--out '{out}' names no store: give one a name, or end it with / for a folder of stores"
        )
    return InFolder(Path(out))


def default_staging() -> Path:
    """A folder in the user's cache directory."""
    return user_cache() / "staging"


def same_store(found: Found, asked: Manifest, documents: Sequence[Document], name: str) -> None:
    """StoreMismatch where the store that lies at `name` is not the one that was asked for."""
    # Of the same format, another release or what encoding turned out to cost makes no other store.
    ours, theirs = (vars(m) | {"software": None, "kv_error": None} for m in (asked, found.manifest))
    others = [field for field in ours if ours[field] != theirs[field]]
    if found.documents is not None and not others and list(documents) != found.documents:
        others = ["list of documents"]
    if fingerprint_version(found.manifest.weights_hash) != fingerprint_version(asked.weights_hash):
        others = ["release, which knows models by other fingerprints"]
    if others:
        raise StoreMismatch(
            f"{name} is there already, of another {' and another '.join(map(_told, others))}"
            f"{_methods(found.manifest, asked)}: remove it, or choose another --out."
        )


def _told(field: str) -> str:
    return {"token_hash": "text", "n_tokens": "length", "rope": "--context"}.get(field, field)


def _methods(found: Manifest, asked: Manifest) -> str:
    """Both prefills, where they differ."""
    if found.prefill == asked.prefill:
        return ""
    made, wanted = (
        " ".join([str(one["method"]), *(f"{k}={v}" for k, v in sorted(one.items()) if k != "method")])
        for one in (found.prefill, asked.prefill)
    )
    return f" ({made}; asked for is {wanted})"


class InFolder(Place):
    """A path; the writer's own staging folder lies beside it."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self.path = path

    def check(self) -> None:
        refuse_existing(self.path)

    def found(self) -> Found | None:
        if not os.path.lexists(self.path):
            return None
        if not (self.path / ROOT).exists():
            refuse_existing(self.path)
        store = KVStore.open(self.path)
        return Found(store.manifest, sum(store.cost().values()), list(store.documents))

    @contextmanager
    def opened(self) -> Iterator[Path]:
        yield self.path

    def deliver(self, progress: Progress) -> None:
        """Nothing to do: it is there already."""


class InBucket(Place):
    """A URL. The store is written to a folder that is named after it, so that the same command goes on, and
    removed from there when all of it is in the bucket:

    STAGING/NAME-DIGEST/lock           held while it is written and pushed
    STAGING/NAME-DIGEST/store          the store, with its `store.partial` before that
    STAGING/NAME-DIGEST/pushed         the store when the bucket has it, on its way out
    """

    def __init__(self, url: str, staging: Path) -> None:
        self.name = url.rstrip("/")
        last = re.sub(r"[^\w.-]", "_", self.name.rpartition("/")[2])
        digest = hashlib.sha256(self.name.encode("utf-8", "surrogateescape")).hexdigest()
        self.folder = staging / f"{last}-{digest[:12]}"
        self.path, self.pushed = self.folder / "store", self.folder / "pushed"

    def check(self) -> None:
        bucket = Bucket(self.name)
        if (self.folder / LOCK).exists():
            with locked(self.folder):
                if self.pushed.exists() or (bucket.seal and bucket.seal == self._seal()):
                    self._remove()  # it was killed when all was done but this
        elif self.folder.is_dir() and not os.listdir(self.folder):
            self.folder.rmdir()  # or all but the last step of this
        check_writable(self.name)

    def found(self) -> Found | None:
        bucket = Bucket(self.name)
        if bucket.seal is None:
            return None
        header = header_of(bucket.read(f"{bucket.name}/{ROOT}") or b"")
        if header is None:
            raise StoreForeign(
                f"{self.name} holds no store that this release can read: choose another URL, or remove it."
            )
        manifest = Manifest.from_json(header)
        return Found(manifest, sum(bucket.objects(bucket.name).values()), None)

    @contextmanager
    def opened(self) -> Iterator[Path]:
        with locked(self.folder):
            yield self.path

    def deliver(self, progress: Progress) -> Transfer:
        moved = push(self.path, self.name, progress=progress)
        self._remove()
        return moved

    def _seal(self) -> bytes | None:
        file = self.path / SEAL
        return file.read_bytes() if file.exists() else None

    def _remove(self) -> None:
        """Remove the folder, so that what a kill leaves of it is known to be no store any more."""
        if self.path.exists():
            os.rename(self.path, self.pushed)
        shutil.rmtree(self.pushed)
        shutil.rmtree(self.folder)


# Indexes of one kind appear at once: they are built beside their place, and renamed when they are whole.


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """The folder of a store's indexes, made if need be, without other builds. StoreBusy where one runs."""
    files.make_folders(folder)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if not _locked(descriptor, folder):
            raise StoreBusy(
                f"Another process builds indexes in {folder}: wait for it to end, or stop it first."
            )
        yield
    finally:
        os.close(descriptor)


def publish(staging: Path, folder: Path, kept: Iterable[Path]) -> None:
    """Put `staging` in the place of `folder`, with the indexes of `folder` that are kept (their base paths).

    Killed at any moment, either folder is whole, and the same call ends it.
    """
    for path in kept:
        for file in folder.glob(f"{path.name}.*"):
            _link(file, staging / file.name)
    files.sync_tree(staging)
    tidy(folder)
    if folder.exists():
        files.rename(folder, _old(folder))
    files.rename(staging, folder)
    tidy(folder)


def tidy(folder: Path) -> None:
    """Remove what an earlier `publish` to `folder` had replaced when it was killed."""
    remove(_old(folder))


def _locked(descriptor: int, folder: Path) -> bool:
    try:
        return lock(descriptor)
    except OSError as error:
        raise StoreError(f"{folder} cannot be built in: {error.strerror}.") from error


def _old(folder: Path) -> Path:
    return folder.with_name(folder.name + OLD)


def _link(file: Path, target: Path) -> None:
    target.unlink(missing_ok=True)
    try:
        os.link(file, target)
    except OSError:  # a file system without links
        shutil.copyfile(file, target)
