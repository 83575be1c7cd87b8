"""A disk that keeps what was flushed, and of the rest any part: pages of files, names, whole renames.

Renames are atomic, as journals make them. A file that was never flushed may have its name and no bytes.
"""

import os
import random
import shutil
from pathlib import Path

import pytest

from offload_decode.common import files as durable

_PAGE = 4096
Names = dict[tuple[int, str], int]
"""By folder (its inode) and name, the inode."""


class PowerCut(BaseException):
    """Nothing handles it."""


class Disk:
    """What of the folder `root` is on the disk: all that lies there now, and then what is flushed. The power
    fails as flush number `last` is asked for.
    """

    def __init__(self, root: Path, last: int) -> None:
        self.root, self.left = root, last
        self._names: dict[int, dict[str, int]] = {}
        self._bytes: dict[int, bytes] = {}
        self._folders: set[int] = set()
        self._held: dict[int, int] = {}  # an inode that is open is not given to another file
        for folder, folders, names in os.walk(root):
            folders.sort()
            for path in (Path(folder), *(Path(folder, name) for name in sorted(names))):
                self._keep(path)

    def watch(self, patched: pytest.MonkeyPatch) -> None:
        """See every flush from here on."""
        patched.setattr(durable, "_sync", self._flush)

    def lose(self, rng: random.Random) -> None:
        """Leave of `root` what a power cut might."""
        files, now = self._found()
        before = {(folder, name): inode for folder, own in self._names.items() for name, inode in own.items()}
        applied = self._applied(before, now, rng)
        kept: Names = {place: inode for place, inode in before.items() if now.get(place) == inode}
        for place, inode in before.items():
            # A name that was given to another file is never without one.
            if now.get(place) != inode and not applied[now.get(place, inode)]:
                kept[place] = inode
        for place, inode in now.items():
            if before.get(place) != inode and applied[inode]:
                kept[place] = inode
        plan: dict[str, bytes | None] = {}

        def place_all(folder: int, path: str) -> None:
            for (parent, name), inode in sorted(kept.items()):
                if parent != folder:
                    continue
                where = os.path.join(path, name)
                if inode in self._folders:
                    plan[where] = None
                    place_all(inode, where)
                else:
                    plan[where] = self._torn(inode, files.get(inode), rng)

        place_all(os.stat(self.root).st_ino, "")
        self.close()
        shutil.rmtree(self.root)
        self.root.mkdir()
        for name, data in plan.items():
            if data is None:
                (self.root / name).mkdir()
            else:
                (self.root / name).write_bytes(data)

    def close(self) -> None:
        """Let the inodes go."""
        for descriptor in self._held.values():
            os.close(descriptor)
        self._held.clear()

    @staticmethod
    def _applied(before: Names, now: Names, rng: random.Random) -> dict[int, bool]:
        """For each inode whether its new names reached the disk; of two that exchanged names both or
        neither.
        """
        # In the order in which they were found, which is by name: inode numbers differ from run to run.
        applied = {inode: rng.random() < 0.5 for inode in dict.fromkeys([*now.values(), *before.values()])}
        came_from = {inode: place for place, inode in before.items()}
        for place, inode in now.items():
            other = before.get(place, inode)
            if other != inode and now.get(came_from.get(inode, place)) == other:
                applied[inode] = applied[other]
        return applied

    def _flush(self, path: str | Path) -> None:
        self.left -= 1
        if self.left <= 0:
            raise PowerCut
        self._keep(path)

    def _keep(self, path: str | Path) -> None:
        inode = os.stat(path).st_ino
        if inode not in self._held:
            self._held[inode] = os.open(path, os.O_RDONLY)
        if os.path.isdir(path):
            with os.scandir(path) as entries:
                found = sorted((entry.name, entry.inode()) for entry in entries)
            self._names[inode] = dict(found)
            self._folders.add(inode)
        else:
            self._bytes[inode] = Path(path).read_bytes()

    def _found(self) -> tuple[dict[int, bytes], Names]:
        """The bytes of every file as it is now, and every name."""
        files: dict[int, bytes] = {}
        names: Names = {}
        for folder, folders, own in os.walk(self.root):
            here = os.stat(folder).st_ino
            folders.sort()
            for name in (*folders, *sorted(own)):
                path = Path(folder, name)
                names[here, name] = inode = path.stat().st_ino
                if name in folders:
                    self._folders.add(inode)
                else:
                    files[inode] = path.read_bytes()
        return files, names

    def _torn(self, inode: int, now: bytes | None, rng: random.Random) -> bytes:
        """Of the pages that were not flushed any; of a file that never was perhaps not even its length."""
        before = self._bytes.get(inode)
        if now is None or now == before:
            return before or b""
        if before is None and rng.random() < 0.3:
            return b""
        old = (before or b"").ljust(len(now), b"\0")
        starts = range(0, len(now), _PAGE)
        return b"".join((now if rng.random() < 0.5 else old)[start : start + _PAGE] for start in starts)
