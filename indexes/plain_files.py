"""Plain files are opened, and nothing else: a link could lead anywhere, a pipe would keep one waiting, even
where it was to be removed as a folder.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from pathlib import Path


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
