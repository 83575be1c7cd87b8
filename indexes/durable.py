"""What is committed is on the disk before anyone is told so: bytes first, then the name that they get.

A power cut takes whatever was not flushed, in any order: a file may have its name and none of its bytes. So a
file is written beside its place, flushed, renamed, and its folder flushed, which holds the name.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

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
