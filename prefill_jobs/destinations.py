"""Where a store goes: a path, or a URL, for which it is written to a staging folder and then pushed."""

import hashlib
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from offload_decode.common.errors import ConfigError, StoreExists, StoreForeign, StoreMismatch
from offload_decode.indexes.verified import cache_folder
from offload_decode.prefill_jobs.buckets import Transfer, check_writable, push
from offload_decode.prefill_jobs.buckets.bucket import Bucket
from offload_decode.store.files import SEAL, Progress
from offload_decode.store.format import Manifest, fingerprint_version, unplaced
from offload_decode.store.layout import ROOT, header_of, read_header
from offload_decode.store.reader import KVStore
from offload_decode.store.staging import LOCK, STORE, locked, partial_path
from offload_decode.store.writer import refuse_existing, undo_exchange
from offload_decode.types import Document

_SHOWN = {"token_hash": "text", "n_tokens": "length", "rope": "--context"}  # fields in messages


class Found(NamedTuple):
    """A complete store: its manifest, its bytes, and its documents, unless reading them would fetch them."""

    manifest: Manifest
    bytes: int
    documents: list[Document] | None


class Place:
    """A path, as the user wrote it in `name`; the writer's own staging folder lies beside it."""

    def __init__(self, path: Path) -> None:
        self.name, self.path = str(path), path

    def admit(self) -> None:
        """Refuse, before the work begins, a place that cannot take a store. One that holds a store is
        admitted: whether it is the wanted one shows when the corpus is read.
        """
        with suppress(StoreExists):
            self.check()
        self.found()

    def check(self) -> None:
        """Raise `StoreExists` where something is there, `BucketError` where nothing can be put."""
        refuse_existing(self.path)

    def found(self) -> Found | None:
        """The complete store that is there, if any."""
        undo_exchange(self.path)
        if not os.path.lexists(self.path):
            return None
        if not (self.path / ROOT).exists():
            refuse_existing(self.path)
        store = KVStore.open(self.path)
        return Found(store.manifest, sum(store.cost().values()), list(store.documents))

    def header(self) -> dict[str, Any] | None:
        """The manifest of the store that is there, or was begun, as JSON that nobody has looked at."""
        return read_header(self.path) or read_header(partial_path(self.path) / STORE)

    def named(self, base: Path) -> str:
        """What the store that goes here calls another one: its path, seen from the folder of this one."""
        return os.path.relpath(os.path.realpath(base), os.path.realpath(self.path.parent))

    @contextmanager
    def opened(self) -> Iterator[Path]:
        """The path to write the store to."""
        yield self.path

    def deliver(self, progress: Progress) -> Transfer | None:
        """Bring the complete store from the path of `opened` to its place; what was sent, if anything."""
        return None


def destination_of(out: str | Path, staging: Path | None = None) -> Place:
    """The place that `--out` names; stores for URLs are written below `staging` first."""
    if "://" in str(out):
        return InBucket(str(out), staging or default_staging())
    if Path(out).name in ("", ".."):
        raise ConfigError(
            f"--out '{out}' names no store: give one a name, or end it with / for a folder of stores"
        )
    return Place(Path(out))


def default_staging() -> Path:
    """A folder in the user's cache directory."""
    return cache_folder() / "staging"


def same_store(found: Found, manifest: Manifest, documents: Sequence[Document], name: str) -> None:
    """`StoreMismatch` where the store at `name` is not the one that was asked for."""
    # A release with the same format, the measured cost of an encoding, the length of the training and marks,
    # which earlier releases do not keep, make no other store; what opened the prompt is in the tokens.
    other: dict[str, Any] = dict.fromkeys(("software", "kv_error", "opening", "trained", "marks"))
    ours, theirs = (vars(m) | other | {"base": unplaced(m.base)} for m in (manifest, found.manifest))
    others = [field for field in ours if ours[field] != theirs[field]]
    if found.documents is not None and not others and list(documents) != found.documents:
        others = ["list of documents"]
    if found.manifest.scaled != manifest.scaled:  # which the config's hash and the tables of RoPE follow
        follow = {"model_config_hash", "rope"}
        if found.manifest.prefill | {"rope": ""} == manifest.prefill | {"rope": ""}:
            follow.add("prefill")
        others = ["--rope", *(field for field in others if field not in follow)]
    if fingerprint_version(found.manifest.weights_hash) != fingerprint_version(manifest.weights_hash):
        others = ["release, which knows models by other fingerprints"]
    if others:
        listed = " and another ".join(_SHOWN.get(field, field) for field in others)
        made, wanted = (
            " ".join([str(one["method"]), *(f"{k}={v}" for k, v in sorted(one.items()) if k != "method")])
            for one in (found.manifest.prefill, manifest.prefill)
        )
        methods = "" if made == wanted else f" ({made}; asked for is {wanted})"
        raise StoreMismatch(
            f"{name} is there already, of another {listed}{methods}: remove it, or choose another --out."
        )


class InBucket(Place):
    """A URL. The store is written to a folder named after the URL, so that the same command resumes, and
    removed from there when all of it is in the bucket:

    STAGING/NAME-DIGEST/lock           held while it is written and pushed
    STAGING/NAME-DIGEST/store          the store, or `store.partial` until it is complete
    STAGING/NAME-DIGEST/pushed         the pushed store, about to be removed
    """

    def __init__(self, url: str, staging: Path) -> None:
        self.name = url.rstrip("/")
        last = re.sub(r"[^\w.-]", "_", self.name.rpartition("/")[2])
        digest = hashlib.sha256(self.name.encode("utf-8", "surrogateescape")).hexdigest()
        self.folder = staging / f"{last}-{digest[:12]}"
        self.path, self.pushed = self.folder / "store", self.folder / "pushed"

    def check(self) -> None:
        bucket, seal = Bucket(self.name), self.path / SEAL
        if (self.folder / LOCK).exists():
            with locked(self.folder):
                sent = bucket.seal and seal.exists() and seal.read_bytes() == bucket.seal
                if sent or self.pushed.exists():
                    self._remove()  # a kill left only this to do
        elif self.folder.is_dir() and not os.listdir(self.folder):
            self.folder.rmdir()  # or only the last step of it
        check_writable(self.name)

    def found(self) -> Found | None:
        bucket = Bucket(self.name)
        if bucket.seal is None:
            return None
        if (header := self._sent(bucket)) is None:
            raise StoreForeign(
                f"{self.name} holds no store that this release can read: choose another URL, or remove it."
            )
        return Found(Manifest.from_json(header), sum(bucket.objects(bucket.name).values()), None)

    def header(self) -> dict[str, Any] | None:
        return self._sent(Bucket(self.name)) or super().header()

    def named(self, base: Path) -> str:
        """Its last name: a path of this machine would lead nowhere."""
        return os.path.basename(os.path.realpath(base))

    @contextmanager
    def opened(self) -> Iterator[Path]:
        with locked(self.folder):
            yield self.path

    def deliver(self, progress: Progress) -> Transfer:
        moved = push(self.path, self.name, progress=progress)
        self._remove()
        return moved

    def _sent(self, bucket: Bucket) -> dict[str, Any] | None:
        return header_of(bucket.read(f"{bucket.name}/{ROOT}") or b"")

    def _remove(self) -> None:
        """Remove the folder; rename the store first, so that the rest of a kill is not taken for one."""
        if self.path.exists():
            os.rename(self.path, self.pushed)
        shutil.rmtree(self.pushed)
        shutil.rmtree(self.folder)
