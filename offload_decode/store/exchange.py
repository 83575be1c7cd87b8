"""Two folders that change places: at once where the system can, so that none is ever missing."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from pathlib import Path

from offload_decode.indexes import durable

_HERE, _EXCHANGE, _SWAP = -100, 2, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux, RENAME_SWAP of macOS
_UNKNOWN = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)


def exchange(new: Path, old: Path, aside: Path) -> None:
    """Give `new` the name of `old`, which is left under the name of `new`.

    Where the file system cannot exchange names, `old` goes `aside` first, and stays there: for a moment
    nothing has its name. `restore` brings it back if that is where the process was killed.
    """
    if _at_once(new, old):
        durable.sync_names(old, new)
    else:
        durable.rename(old, aside)
        durable.rename(new, old)


def restore(old: Path, aside: Path) -> None:
    """Undo an `exchange` that was killed halfway."""
    if aside.exists() and not os.path.lexists(old):
        durable.rename(aside, old)


def _at_once(one: Path, other: Path) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    names = os.fsencode(one), os.fsencode(other)
    try:
        if sys.platform == "darwin":
            failed = libc.renamex_np(*names, ctypes.c_uint(_SWAP))
        else:
            failed = libc.renameat2(_HERE, names[0], _HERE, names[1], ctypes.c_uint(_EXCHANGE))
    except AttributeError:  # an older C library
        return False
    if failed and (number := ctypes.get_errno()) not in _UNKNOWN:
        raise OSError(number, os.strerror(number), str(other))
    return not failed
