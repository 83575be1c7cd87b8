"""Parts of files as one array: addresses are reserved, and each part is mapped over some of them."""

import ctypes
import mmap
import os
from functools import cache

import numpy as np
import numpy.typing as npt

_MAP_FIXED = 0x10  # the same on Linux and macOS; Python's mmap does not export it
_MAP_FAILED = ctypes.c_void_p(-1).value


def reserve(length: int) -> tuple[mmap.mmap, npt.NDArray[np.uint8]]:
    """So many read-only bytes, and their map, which they keep alive. Raises `OSError` and `OverflowError`."""
    reserved = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
    return reserved, np.frombuffer(reserved, dtype=np.uint8)


def map_over(address: int, descriptor: int, start: int, length: int) -> None:
    """Map bytes of a file over reserved ones. `start` and the address are those of a page of memory; so is
    the end, or nothing follows within its page. Raises `OSError`.
    """
    where = ctypes.c_void_p(address), ctypes.c_size_t(length)
    how = mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, descriptor, ctypes.c_int64(start)
    if _libc().mmap(*where, *how) == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    return libc
