"""Several files as one contiguous, read-only, zero-copy array.

A stretch of address space is reserved with an anonymous map, and each file is mapped over its part of it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from offload_decode.errors import StoreDamaged, StoreError
from offload_decode.store.files import open_regular

_MAP_FIXED = 0x10  # the same on Linux and macOS; Python's mmap does not export it
_MAP_FAILED = ctypes.c_void_p(-1).value


def require_posix() -> None:
    """StoreError on a system where stores cannot be mapped."""
    if sys.platform not in ("linux", "darwin"):
        raise StoreError(f"KV stores need Linux or macOS, and this is {sys.platform}: use WSL on Windows.")


def map_files(files: Sequence[Path], file_bytes: int) -> npt.NDArray[np.uint8]:
    """The bytes of `files`, each of `file_bytes`, one after another; the array keeps the maps alive.

    With more than one file, `file_bytes` must be a multiple of the page size. Bytes that are written to the
    files later are seen. A file of another size is StoreDamaged, so that no later access can run off its end.
    """
    require_posix()
    assert min(len(files), file_bytes) > 0
    assert len(files) == 1 or file_bytes % mmap.PAGESIZE == 0, "files end on a page"
    length = len(files) * file_bytes
    try:
        reserved = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
    except (OSError, OverflowError) as error:
        raise StoreError(
            f"{files[0]} and what follows it cannot be mapped into memory ({length:,} bytes): "
            "raise the limit of addresses (ulimit -v), or prefill again."
        ) from error
    view = np.frombuffer(reserved, dtype=np.uint8)
    for i, file in enumerate(files):
        _map_over(view.ctypes.data + i * file_bytes, file, file_bytes)
    return view


def _map_over(address: int, file: Path, size: int) -> None:
    try:
        descriptor = open_regular(file)
    except FileNotFoundError as error:
        raise StoreDamaged(f"{file} is missing: restore it from a copy, or prefill again.") from error
    except OSError as error:
        raise StoreError(f"{file} cannot be opened: {error.strerror}.") from error
    try:
        if (found := os.fstat(descriptor).st_size) != size:
            raise StoreDamaged(
                f"{file} has {found:,} bytes and should have {size:,}: "
                "restore it from a copy, or prefill again."
            )
        libc = _libc()
        got = libc.mmap(address, size, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, descriptor, 0)
        if got == _MAP_FAILED:
            reason = os.strerror(ctypes.get_errno())
            raise StoreError(
                f"{file} cannot be mapped into memory ({reason}): raise the limit vm.max_map_count."
            )
    finally:
        os.close(descriptor)


def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
    ]  # fmt: skip
    return libc
