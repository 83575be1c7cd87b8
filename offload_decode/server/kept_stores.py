"""How long a server keeps its stores: pinned ones stay, others may expire a time after their last use. How
they are removed, and what they take of the disk.

FOLDER/.kept/STORE     of a store in FOLDER that was pinned or is to expire: `{"pinned", "expires_after"}` in
                       JSON. The file's time is the last use.
"""

import json
import logging
import os
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from offload_decode.common import files
from offload_decode.common.errors import ConfigError, StoreBusy, StoreError
from offload_decode.common.files import NotPlain, open_plain
from offload_decode.kv.indexes import indexes_folder
from offload_decode.server.catalog import Catalog, Entry
from offload_decode.store.files import SEAL
from offload_decode.store.staging import LOCK, REPLACED, locked, partial_path
from offload_decode.store.writer import clear, restore

LOG = logging.getLogger("offload_decode.server")

TRASH = ".deleted-"
_TOUCHED_S = 60.0  # a last use is written down when it is so much later than the one that is
_LARGEST = 1 << 10


@dataclass(frozen=True)
class Keeping:
    """How long a store is kept: until it is deleted where it is `pinned` or `expires_after` is None, else
    that many seconds beyond `last_used`, in seconds since 1970 (None: not since the server began). Being made
    or appended to is a use as well.
    """

    pinned: bool = False
    expires_after: int | None = None
    last_used: float | None = None

    @property
    def expired(self) -> bool:
        """Whether its time is over."""
        if self.pinned or self.expires_after is None or self.last_used is None:
            return False
        return time.time() - self.last_used > self.expires_after


class KeptStores:
    """How long the stores of a catalog are kept: those in its first folder, where stores are made. With
    `read_only` last uses are not written.
    """

    def __init__(self, catalog: Catalog, read_only: bool = False) -> None:
        self._catalog, self._read_only = catalog, read_only
        self._used: dict[Path, float] = {}

    def of(self, entry: Entry) -> Keeping:
        """How long a store is kept. A file that cannot be read says nothing, and lets nothing expire."""
        if entry.path is None:
            return Keeping()
        used = self._used.get(entry.path)
        try:
            with os.fdopen(open_plain(self._file(entry.path)), "rb") as file:
                said, written = files.parse(file.read(_LARGEST)), os.fstat(file.fileno()).st_mtime
            pinned, after = said["pinned"], said["expires_after"]
            if not isinstance(pinned, bool) or not (after is None or (type(after) is int and after > 0)):
                raise ValueError
            made = os.stat(entry.path / SEAL).st_mtime
        except (ConfigError, NotPlain, OSError, ValueError, TypeError, KeyError):
            return Keeping(last_used=used)
        return Keeping(pinned, after, max(written, made, used or 0.0))

    def set(self, entry: Entry, pinned: bool, expires_after: int | None) -> None:
        """Say how long a store is kept, from now on. Raises `OSError`, and `ConfigError` for one that lies
        elsewhere than where stores are made.
        """
        file = self._file(entry.path)
        file.parent.mkdir(exist_ok=True)
        files.write(file, json.dumps({"pinned": pinned, "expires_after": expires_after}).encode())

    def use(self, entry: Entry) -> None:
        """Note that a store is used now."""
        if entry.path is None or entry.collection:
            return
        self._used[entry.path] = now = time.time()
        with suppress(ConfigError, OSError):  # nothing was said of it, or nothing can be written
            file = self._file(entry.path)
            if not self._read_only and now - os.stat(file).st_mtime > _TOUCHED_S:
                os.utime(file)

    def forget(self, path: Path) -> None:
        """There is no store at `path` any more, or not yet."""
        self._used.pop(path, None)
        with suppress(ConfigError):
            file = self._file(path)
            try:
                file.unlink(missing_ok=True)
            except OSError as error:  # a folder of that name, say
                LOG.warning("%s cannot be removed: %s", file, error.strerror)

    def forget_gone(self) -> None:
        """Forget what was said of stores that are gone, deleted by hand, say: others may get their names."""
        for folder in self._catalog.folders[:1]:
            for file in (folder / ".kept").glob("*"):
                path = folder / file.name
                if not os.path.lexists(path) and not os.path.lexists(partial_path(path)):
                    self.forget(path)

    def expired(self) -> list[str]:
        """The names of stores whose time is over."""
        return [entry.name for entry in self._catalog.entries() if self.of(entry).expired]

    def _file(self, path: Path | None) -> Path:
        if path is None or path.parent not in self._catalog.folders[:1]:
            raise ConfigError("only stores in the folder in which stores are made can be pinned, or expire")
        return path.parent / ".kept" / path.name


def folder_bytes(folder: Path) -> int:
    """Bytes of all files in a folder, each counted once however many names it has."""
    found: dict[tuple[int, int], int] = {}
    for at, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):  # another process removes it
                one = os.lstat(os.path.join(at, name))
                found[one.st_dev, one.st_ino] = one.st_size
    return sum(found.values())


def discard(path: Path) -> None:
    """Remove what a job staged for the store at `path`. The store itself, where there is one, stays."""
    partial = partial_path(path)
    if (partial / LOCK).exists():
        try:
            with locked(partial):
                restore(path, partial / REPLACED)
                clear(partial)
        except StoreBusy as error:
            LOG.warning("%s", error)


def remove(path: Path) -> None:
    """Remove a store with all that lies beside it; it is gone from its name at once."""
    discard(path)
    trash = path.with_name(f"{TRASH}{uuid4().hex}")
    try:
        trash.mkdir()
        path.rename(trash / path.name)
        if (indexes := indexes_folder(path)).exists():
            indexes.rename(trash / indexes.name)
        shutil.rmtree(trash)
    except OSError as error:
        raise StoreError(f"the store could not be removed: {error.strerror}") from error
