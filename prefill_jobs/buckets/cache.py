"""A cache of bounded size for what was fetched from buckets: the least recently used leaves, never what is in
use.

CACHE/
├── lock            held while room is made
└── 3f0c…/          one entry, named after its key
    ├── lock        shared by its users, exclusive while it is fetched; its time is that of the last use
    ├── bytes       how many it takes, or will
    └── content     the entry; until it is complete, it is written beside this
"""

import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

from offload_decode.common import files
from offload_decode.common.errors import DoesNotFit
from offload_decode.common.files import lock

Fill = Callable[[Path, Callable[[int], None]], object]
"""Makes the content at a path, after announcing its bytes. What a killed process left beside the path is
there for the next one.
"""

_LOCK, _BYTES, _CONTENT, _GONE = "lock", "bytes", "content", ".gone"
_POLL_S = 0.2
_ENTRY = re.compile(r"[0-9a-f]{32}")


def name_of(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()[:32]


class Cache:
    """At most `limit` bytes of files in `folder`, which several processes may share. `patience`: seconds to
    wait for the users of entries that would have to leave.
    """

    def __init__(self, folder: Path, limit: int, patience: float = 0.0):
        self.folder, self.limit, self.patience = folder, limit, patience

    def names(self) -> frozenset[str]:
        """The names (`name_of`) of what is here now."""
        return frozenset(path.parent.name for path in self.folder.glob(f"*/{_CONTENT}"))

    @contextmanager
    def holding(self, key: str, fill: Fill) -> Iterator[Path]:
        """The content of `key`, made by `fill` where it is not here; it stays while it is held. Waits for
        another process that is making it.

        Raises `DoesNotFit` where nothing may leave that would make enough room, and what `fill` raises.
        """
        entry = self.folder / name_of(key)
        content = entry / _CONTENT
        while True:
            files.make_folders(entry)
            try:
                held = open(entry / _LOCK, "ab")  # noqa: SIM115
            except FileNotFoundError:  # it has just left
                continue
            with held:
                lock(held.fileno(), wait=True, shared=True)
                if not content.exists() and _is_at(held, entry):
                    lock(held.fileno(), wait=True)
                    if not content.exists() and _is_at(held, entry):
                        fill(content, partial(self._admit, entry))
                    lock(held.fileno(), wait=True, shared=True)  # another process may hold it in between
                if content.exists() and _is_at(held, entry):
                    os.utime(entry / _LOCK)
                    yield content
                    return

    def _admit(self, entry: Path, size: int) -> None:
        """Make room for `size` bytes of an exclusively held entry."""
        may_fit = size <= self.limit  # else dropping or waiting is in vain
        deadline = time.monotonic() + (self.patience if may_fit else 0)
        while (total := self._made_room(entry, size, may_fit)) > self.limit:
            if time.monotonic() >= deadline:
                used = f", and {total - size:,} bytes are in use" if may_fit else ""
                raise DoesNotFit(
                    f"{size:,} bytes are to be fetched to {self.folder}, which may hold {self.limit:,}"
                    f"{used}: let it hold more, with --cache"
                )
            time.sleep(_POLL_S)

    def _made_room(self, entry: Path, size: int, may_fit: bool) -> int:
        """The bytes of all entries with this one, after dropping those that may leave; within the limit, they
        are reserved for it.
        """
        with open(self.folder / _LOCK, "ab") as alone:
            lock(alone.fileno(), wait=True)
            others = sorted(other for other in self._entries() if other[2] != entry)
            total = size + sum(taken for _, taken, _ in others)
            for _, taken, path in others:
                if may_fit and total > self.limit and _dropped(path):
                    total -= taken
            if total <= self.limit:
                files.write(entry / _BYTES, str(size).encode())
            return total

    def _entries(self) -> Iterator[tuple[float, int, Path]]:
        """The time of the last use, the bytes and the path of each."""
        for found in os.scandir(self.folder):
            if found.name.endswith(_GONE):  # a killed process left it
                shutil.rmtree(found.path)
            elif _ENTRY.fullmatch(found.name):
                path = Path(found.path)
                with suppress(FileNotFoundError):  # it is being made
                    yield os.stat(path / _LOCK).st_mtime, _bytes_of(path), path


def _bytes_of(entry: Path) -> int:
    try:
        return int((entry / _BYTES).read_bytes())
    except (FileNotFoundError, ValueError):  # nothing was fetched
        return 0


def _is_at(held: BinaryIO, entry: Path) -> bool:
    """Whether the lock is the entry's, and not that of one that has left."""
    try:
        return os.path.samestat(os.fstat(held.fileno()), os.stat(entry / _LOCK))
    except FileNotFoundError:
        return False


def _dropped(entry: Path) -> bool:
    """Remove an entry unless it is in use; whether that was done."""
    with open(entry / _LOCK, "ab") as held:
        if not lock(held.fileno()):
            return False
        gone = entry.with_name(entry.name + _GONE)
        os.rename(entry, gone)  # half of it is not taken for all
        shutil.rmtree(gone)
    return True
