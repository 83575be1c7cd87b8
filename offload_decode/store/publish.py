"""The last act of a prefill: checksums, everything flushed to the disk, and one rename."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from offload_decode.errors import StoreBusy, StoreExists
from offload_decode.indexes import durable
from offload_decode.indexes.plain_files import remove
from offload_decode.store.checksums import SEAL, SUMS, Report, hash_files, render, seal_of
from offload_decode.store.exchange import exchange
from offload_decode.store.staging import LOCK, PROGRESS, REPLACED, STORE, WINDOWS, locked, partial_path


def refuse_existing(path: Path, staging: Path | None = None) -> None:
    """StoreExists where `path` is taken; `remove_left` of its `staging` then."""
    if os.path.lexists(path):
        remove_left(staging or partial_path(path))
        raise StoreExists(f"{path} exists already: choose another path, or remove it first.")
    for parent in Path(os.path.abspath(path)).parents:
        if (parent / SEAL).exists():  # a file more would make it a damaged store
            raise StoreExists(f"{parent} is a store itself: choose a path outside of it.")


def remove_left(partial: Path) -> None:
    """Remove the staging folder of a prefill, or what else had one, that was killed when its store had its
    name already: there is no store in it.
    """
    if (partial / LOCK).exists() and not (partial / STORE).exists():
        with suppress(StoreBusy), locked(partial):
            shutil.rmtree(partial)
    with suppress(OSError):  # an empty folder is what a kill leaves as the very last thing
        partial.rmdir()


def seal(partial: Path, files: Iterable[str], progress: Report | None = None) -> None:
    """Put the checksums of all files into the store in the staging folder, and flush it to the disk."""
    root = partial / STORE
    sums = render(hash_files(root, files, progress))
    for name, data in ((SUMS, sums), (SEAL, seal_of(sums))):
        durable.write(partial / name, data)  # its temporary file must not lie in the store
        durable.rename(partial / name, root / name)
    durable.sync_tree(root)


def publish(partial: Path, path: Path, *, replacing: bool = False) -> None:
    """Give the sealed store in the staging folder its name, `replacing` the one that has it, and remove the
    folder.

    A crash at any point leaves the staging folder, from which this can be done again, or the store; where one
    is replaced, the earlier store has its name until the new one has it.
    """
    if replacing:
        exchange(partial / STORE, path, aside=partial / REPLACED)
    else:
        refuse_existing(path)
        durable.rename(partial / STORE, path)
    clear(partial)


def clear(partial: Path) -> None:
    """Remove a staging folder that is done with."""
    (partial / PROGRESS).unlink(missing_ok=True)
    for folder in (WINDOWS, STORE, REPLACED):
        with suppress(OSError):
            remove(partial / folder)
    # The lock goes last: as long as it is there, what is left is known to be ours.
    durable.sync_folders([partial])
    shutil.rmtree(partial)
