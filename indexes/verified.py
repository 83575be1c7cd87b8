"""A cache of file validations: a large file that was checked is not read again until it changes.

A file is unchanged while its path, size, device, inode and both its times are: the second one, of its last
change, is set by the system alone, so that no tool which restores the first hides a write. What a disk loses
without a write stays unseen: `offload-decode verify` reads every byte.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

KEPT = 256
"""Most files in a folder of the cache; the least recently used go first."""
_MOST = 1 << 20  # bytes of a folder's list: 16,000 lines
_SETTLED_S = 2.0  # a file that was written just now may be written once more within a tick of its clock

Identity = list[str | int]


def holds(file: Path, what: str, check: Callable[[], bool], anew: bool = False) -> bool:
    """`check()`, which reads a file; True at once where `what`, which names the check, held for it before
    and it has not changed since, unless it is to be done `anew`. A cache that cannot be read or written is
    done without.
    """
    before = identity(file)
    folder = str(file.resolve().parent).encode("utf-8", "surrogateescape")
    known = cache_folder() / "verified" / hashlib.sha256(folder).hexdigest()  # of the files of one folder
    line = hashlib.sha256(json.dumps([what, before]).encode()).hexdigest()
    lines: list[str] = []
    with suppress(OSError, ValueError), open(known, encoding="ascii") as listed:
        lines = listed.read(_MOST).split()
    there = before is not None and line in lines
    if there and not anew:
        return True
    right = check()
    if right and not there and before is not None and before == identity(file) and settled(before):
        with suppress(OSError):
            _add(known, line)
    return right


def identity(file: Path) -> Identity | None:
    """What stays the same of a file while nobody changes or replaces it; None where it is gone."""
    try:
        seen = file.stat()
        fields = (seen.st_size, seen.st_dev, seen.st_ino, seen.st_mtime_ns, seen.st_ctime_ns)
        return [str(file.resolve()), *fields]
    except OSError:
        return None


def settled(seen: Identity) -> bool:
    """Whether a file of this identity has been left alone long enough for its times to tell of a change. A
    modification in the future was set, as by an archive of another time zone, and not written.
    """
    now, modified, changed = time.time(), int(seen[-2]) / 1e9, int(seen[-1]) / 1e9
    return now - (changed if modified > now else max(modified, changed)) > _SETTLED_S


def cache_folder() -> Path:
    """Where this user's programs keep what can be found again."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path(os.path.expanduser("~/.cache"))) / "offload-decode"


def make_room(folder: Path) -> None:
    """Make a folder of the cache, and in it room for a file."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    for path in kept[: max(0, len(kept) - KEPT + 1)]:
        path.unlink(missing_ok=True)


def _add(known: Path, line: str) -> None:
    if not known.exists():
        make_room(known.parent)
    elif known.stat().st_size + len(line) >= _MOST:  # of files that have long been replaced
        known.unlink()
    with open(known, "a", encoding="ascii") as file:
        file.write(f"{line}\n")
