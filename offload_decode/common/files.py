"""What is committed is on the disk before anyone is told so: bytes first, then the name that they get.

A power cut takes whatever was not flushed, in any order: a file may have its name and none of its bytes. So a
file is written beside its place, flushed, renamed, and its folder flushed, which holds the name.
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BESIDE = ".tmp"
_AT_ONCE = 4  # files that are flushed together share what the file system writes for each of them
_on = True


@contextmanager
def synced(on: bool) -> Iterator[None]:
    """Whether what is committed inside is waited for until it is on the disk. A process that is killed loses
    no more without it; what a power cut leaves then is anyone's guess.
    """
    global _on
    before, _on = _on, on
    try:
        yield
    finally:
        _on = before


def sync_files(files: Iterable[str | Path]) -> None:
    """Flush the bytes of files to the disk."""
    if not _on or not (each := [*files]):
        return
    try:
        with ThreadPoolExecutor(min(_AT_ONCE, len(each))) as pool:
            list(pool.map(_sync, each))
    except RuntimeError:  # under a cap on memory there may be none for the stack of a thread
        for path in each:
            _sync(path)


def sync_folders(folders: Iterable[str | Path]) -> None:
    """Flush the names in folders to the disk."""
    sync_files(folders)


def sync_tree(root: str | Path) -> None:
    """Flush every file under `root`, then every name."""
    found = [(folder, files) for folder, _, files in os.walk(root)]
    sync_files(os.path.join(folder, name) for folder, files in found for name in files)
    sync_folders(folder for folder, _ in found)


def make_folders(folder: Path) -> None:
    """Make a folder and those above it that are not there, and flush the names of what was made."""
    missing = [own for own in (folder, *folder.parents) if not own.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    sync_folders({own.parent for own in missing})


def rename(old: Path, new: Path) -> None:
    """Give what lies at `old`, which is flushed, the name `new`, in place of a file that has it."""
    os.replace(old, new)
    sync_names(new, old)


def sync_names(new: Path, old: Path) -> None:
    """Flush a name that was given and then the one that was left: in between what has them may have two, but
    never none.
    """
    sync_folders([new.parent])
    if old.parent != new.parent:
        sync_folders([old.parent])


def write(file: Path, data: bytes) -> None:
    """Put a file of these bytes in the place of the one at `file`, or of none."""
    with replacing(file) as beside, open(beside, "xb") as out:
        out.write(data)


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """The name of a file to be made beside `target`: it takes its place, or is removed where that fails."""
    beside = target.with_name(target.name + BESIDE)
    beside.unlink(missing_ok=True)  # what a killed process left, or a link that would lead elsewhere
    try:
        yield beside
        sync_files([beside])
        rename(beside, target)
    finally:
        beside.unlink(missing_ok=True)


def _sync(path: str | Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Locks by which one process at a time writes a folder. The system lets go of them with the process.
#
# Across the machines of a network file system they hold where its server keeps locks. Where it keeps
# none, or none of folders (NFS), that is said: nothing is written without a lock.

_NONE = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF)


def lock(descriptor: int, wait: bool = False, shared: bool = False) -> bool:
    """Lock an open file or folder, alone or `shared` with others that do; False where another process has it,
    unless that is waited for. `OSError` says where the file system has no such locks.
    """
    import fcntl

    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(descriptor, kind | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NONE:
            raise
        reason = "its file system cannot lock it, as some network file systems: use a folder on a local disk"
        raise OSError(error.errno, reason) from error
    return True


# Plain files are opened, and nothing else: a link could lead anywhere, a pipe would keep one waiting,
# even where it was to be removed as a folder.


class NotPlain(Exception):
    """What is at a path is no plain file; the message says what it is."""


def open_plain(path: str | Path, follow: bool = False) -> int:
    """A descriptor of the plain file at `path`, for reading; of what a link leads to only with `follow`.

    Raises `NotPlain`, and `OSError` where it cannot be opened. Never waits.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        if error.errno == errno.ELOOP and not follow:
            raise NotPlain("it is a link") from error
        if error.errno == errno.ENXIO:  # a socket
            raise NotPlain("it is not a regular file") from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotPlain("it is not a regular file")
    return descriptor


def remove(path: Path) -> None:
    """Remove a folder with all that is in it, or whatever else has its name."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# JSON from outside, read strictly: no NaN, no names twice, no nesting without end.

DEPTH = 100


def parse(text: str | bytes) -> Any:
    """The value of a JSON text. Raises `ValueError` (`json.JSONDecodeError` with the place, for bad syntax)
    for NaN, numbers too large for a float, a name that an object has twice, and more than `DEPTH` brackets
    within each other: what was read can then be written again.
    """
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_number, parse_float=_finite)
    except RecursionError:
        raise _too_deep() from None
    level = [value]
    for _ in range(DEPTH + 1):
        level = [each for part in level for each in _parts(part)]
        if not level:
            return value
    raise _too_deep()


def _parts(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _too_deep() -> ValueError:
    return ValueError("its brackets are nested too deeply")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"it names {twice!r} twice")
    return found


def _no_number(name: str) -> Any:
    raise ValueError(f"it holds {name}, which JSON does not have")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"it holds {digits[:20]}, which is too large a number")
    return number
