"""Indexes of one kind appear at once: they are built beside their place, and renamed when they are whole."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from offload_decode.errors import StoreBusy, StoreError
from offload_decode.indexes import durable
from offload_decode.indexes.locks import lock
from offload_decode.indexes.plain_files import remove
from offload_decode.kv.head_indexes import OLD


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """The folder of a store's indexes, made if need be, without other builds. StoreBusy where one runs."""
    durable.make_folders(folder)
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
    durable.sync_tree(staging)
    tidy(folder)
    if folder.exists():
        durable.rename(folder, _old(folder))
    durable.rename(staging, folder)
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
