"""Files: durable and atomic writes, locks, opening regular files only, strict JSON, text
that UTF-8 holds.

A power cut loses whatever was not flushed, in any order: a file may have its name and none of its bytes. So a
file is written beside its place, flushed, renamed, and the folder that holds the name is flushed.
"""

import errno
import json
import math
import os
import shutil
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

BESIDE = ".tmp"
_AT_ONCE = 4  # files that are flushed together share what the file system writes for each of them
_on = True


@contextmanager
def synced(on: bool) -> Iterator[None]:
    """Whether commits inside wait until they are on the disk; if not, a power cut may leave anything."""
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
    except RuntimeError:  # a memory limit may leave no room for a thread's stack
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
    """Make a folder and its missing parents, and flush their names."""
    missing = [own for own in (folder, *folder.parents) if not own.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    sync_folders({own.parent for own in missing})


def rename(old: Path, new: Path) -> None:
    """Rename `old`, which is flushed already, to `new`, replacing a file of that name."""
    os.replace(old, new)
    sync_names(new, old)


def sync_names(new: Path, old: Path) -> None:
    """Flush the new name, then the old: a crash in between may leave both, never neither."""
    sync_folders([new.parent])
    if old.parent != new.parent:
        sync_folders([old.parent])


def write(file: Path, data: bytes) -> None:
    """Write or replace `file` atomically."""
    with replacing(file) as beside, open(beside, "xb") as out:
        out.write(data)


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A temporary name beside `target`: the file made there replaces it, or is removed on failure."""
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


# Of file systems that keep no locks, or none of folders (some NFS): nothing is written without a lock.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF)


def lock(descriptor: int, wait: bool = False, shared: bool = False) -> bool:
    """Lock an open file or folder, exclusively or `shared`; False where another process has it, unless
    `wait`. The system releases the lock with the process. `OSError` where the file system has no such locks.
    """
    import fcntl

    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(descriptor, kind | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        reason = "its file system cannot lock it, as some network file systems: use a folder on a local disk"
        raise OSError(error.errno, reason) from error
    return True


class NotPlain(Exception):
    """The path is no regular file; the message says what it is."""


def open_plain(path: str | Path, follow: bool = False) -> int:
    """A descriptor of the regular file at `path`, for reading; links only with `follow`. Never blocks: a link
    could lead anywhere, and a pipe would keep its reader waiting.

    Raises `NotPlain`, and `OSError` where it cannot be opened.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        if error.errno == errno.ELOOP and not follow:
            raise NotPlain("it is a link") from error
        if error.errno != errno.ENXIO:
            raise
    else:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
    raise NotPlain("it is not a regular file")


def remove(path: Path) -> None:
    """Remove a file, link or folder tree."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


DEPTH = 100


def parse(text: str | bytes) -> Any:
    """The value of a JSON text from outside. Raises `ValueError` (`json.JSONDecodeError` with the place, for
    bad syntax) for NaN, numbers too large for a float, duplicate names, and nesting deeper than `DEPTH`.
    """
    with suppress(RecursionError):
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_number, parse_float=_finite)
        level = [value]
        for _ in range(DEPTH + 1):
            level = [part for each in level for part in _inner(each)]
            if not level:
                return value
    raise ValueError("its brackets are nested too deeply")


def without_surrogates(text: str) -> str:
    """Text that UTF-8 can hold: JSON and PDF may spell half a surrogate pair, which no tokenizer takes and
    which becomes U+FFFD. Two halves that meet are their character.
    """
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _inner(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"it names {twice!r} twice")
    return found


def _no_number(name: str) -> Any:
    raise ValueError(f"it holds {name}, which JSON does not have")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"it holds {digits[:20]}, which is too large a number")
    return number
