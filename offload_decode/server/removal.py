"""Stores that leave their folder: gone from their name at once, whatever happens on the way."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from uuid import uuid4

from offload_decode.errors import StoreBusy, StoreError
from offload_decode.kv.head_indexes import indexes_folder
from offload_decode.store.exchange import restore
from offload_decode.store.publish import clear
from offload_decode.store.staging import LOCK, REPLACED, locked, partial_path

log = logging.getLogger("offload_decode.server")

_TRASH = ".deleted-"


def discard(path: Path) -> None:
    """Remove what a job staged for the store at `path`. The store itself, where there is one, stays."""
    partial = partial_path(path)
    if (partial / LOCK).exists():
        try:
            with locked(partial):
                restore(path, partial / REPLACED)
                clear(partial)
        except StoreBusy as error:
            log.warning("%s", error)


def remove(path: Path) -> None:
    """Remove a store with all that lies beside it; it is gone from its name at once."""
    discard(path)
    trash = path.with_name(f"{_TRASH}{uuid4().hex}")
    try:
        trash.mkdir()
        os.rename(path, trash / path.name)
        if indexes_folder(path).exists():
            os.rename(indexes_folder(path), trash / indexes_folder(path).name)
        shutil.rmtree(trash)
    except OSError as error:
        raise StoreError(f"the store could not be removed: {error.strerror}") from error


def empty_trash(folder: Path) -> None:
    """Remove what a server left of stores when it was killed while it deleted them."""
    for left in folder.glob(f"{_TRASH}*"):
        shutil.rmtree(left, ignore_errors=True)
