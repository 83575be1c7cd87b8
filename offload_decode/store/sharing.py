"""Bytes of a file that another one begins with: shared where the file system can, else copied.

A hard link is for files that are the same and never written again; blocks are shared by file systems that
copy on write (btrfs, XFS), which write to neither.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

from offload_decode.store.files import open_regular

BLOCK = 64 * 1024
"""Clones begin and end on the blocks of a file system, which have 4 to 64 KiB."""
_CLONE_RANGE = 0x4020940D  # FICLONERANGE of Linux
_PIECE = 1 << 20


def link(source: Path, target: Path) -> bool:
    """Whether `target` is now a hard link to `source`; not every file system has them."""
    try:
        os.link(source, target)
    except OSError:
        return False
    return True


def copy_range(source: Path, start: int, target: Path, at: int, count: int) -> int:
    """Make `count` bytes of `target` from `at` on those of `source` from `start` on; how many are shared."""
    here, there = open_regular(source), os.open(target, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        whole = count // BLOCK * BLOCK
        shared = whole if whole and _cloned(here, start, there, at, whole) else 0
        for done in range(shared, count, _PIECE):
            _copy(here, start + done, there, at + done, min(_PIECE, count - done))
        return shared
    finally:
        os.close(here)
        os.close(there)


def _cloned(here: int, start: int, there: int, at: int, count: int) -> bool:
    import fcntl

    try:
        fcntl.ioctl(there, _CLONE_RANGE, struct.pack("=qQQQ", here, start, count, at))
    except OSError:  # it cannot, or not these two
        return False
    return True


def _copy(here: int, start: int, there: int, at: int, count: int) -> None:
    data = memoryview(os.pread(here, count, start))
    if len(data) != count:
        raise OSError(0, "it ends too early")
    while data:
        written = os.pwrite(there, data, at)
        data, at = data[written:], at + written
