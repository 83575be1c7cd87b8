"""Locks by which one process at a time writes a folder. The system lets go of them with the process.

Across the machines of a network file system they hold where its server keeps locks. Where it keeps none, or
none of folders (NFS), that is said: nothing is written without a lock.
"""

from __future__ import annotations

import errno

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
