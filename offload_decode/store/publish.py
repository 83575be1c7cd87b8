"""The last act of a prefill: checksums, everything flushed to the disk, and one rename."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from offload_decode.errors import StoreBusy, StoreExists
from offload_decode.store.checksums import SEAL, SUMS, Report, hash_files, render, seal_of
from offload_decode.store.staging import (
    LOCK,
    PROGRESS,
    STORE,
    WINDOWS,
    locked,
    partial_path,
    write_atomically,
)


def refuse_existing(path: Path) -> None:
    """StoreExists where `path` is taken.

    A prefill that was killed when its store had its name already has left its folder, without the store in
    it: that is removed.
    """
    if os.path.lexists(path):
        partial = partial_path(path)
        if (partial / LOCK).exists() and not (partial / STORE).exists():
            with suppress(StoreBusy), locked(partial):
                shutil.rmtree(partial)
        raise StoreExists(f"{path} exists already: choose another path, or remove it first.")
    for parent in Path(os.path.abspath(path)).parents:
        if (parent / SEAL).exists():  # a file more would make it a damaged store
            raise StoreExists(f"{parent} is a store itself: choose a path outside of it.")


def publish(partial: Path, path: Path, files: Iterable[str], progress: Report | None = None) -> None:
    """Give the store that lies whole in the staging folder its name, and remove the folder.

    A crash at any point leaves either the staging folder, from which this can be done again, or the store.
    """
    root = partial / STORE
    sums = render(hash_files(root, files, progress, sync=True))
    for name, data in ((SUMS, sums), (SEAL, seal_of(sums))):
        write_atomically(partial / name, data, sync=True)  # its temporary file must not lie in the store
        os.replace(partial / name, root / name)
    for folder, _, _ in os.walk(root):
        sync_folder(folder)
    refuse_existing(path)
    os.rename(root, path)
    sync_folder(path.parent)
    # The lock goes last: as long as it is there, what is left is known to be ours.
    (partial / PROGRESS).unlink()
    shutil.rmtree(partial / WINDOWS)
    shutil.rmtree(partial)


def sync_folder(folder: str | Path) -> None:
    """Flush the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
