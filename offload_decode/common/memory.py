"""The memory of this process, and a limit that the system enforces.

On Linux RLIMIT_DATA limits private writable memory: allocations beyond it fail. Maps of a store are shared
and do not count, nor does address space that is only reserved.
"""

import ctypes
import errno
import os
import resource
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from offload_decode.common.errors import ConfigError

OUT_OF_MEMORY = (
    "out of memory: free some, raise --ram or --gpu-memory where they are given, use a smaller chunk "
    "or --batch-size, or --device cpu; what a prefill has committed stays: the same command goes on"
)
_NO_ROOM = ("DefaultCPUAllocator", "bad_alloc", "can't start new thread", "Cannot allocate memory")
_STATUS = Path("/proc/self/status")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed: of Python, torch on GPU or CPU, a C++ library, the system."""
    match error:
        case OSError():
            return error.errno == errno.ENOMEM
        case ImportError():
            return "failed to map segment" in str(error)
        case RuntimeError() if any(sign in str(error) for sign in _NO_ROOM):
            return True
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"


def own_memory() -> int:
    """Bytes of memory this process holds; pages of files are left out, as the system drops them at need."""
    if _STATUS.exists():
        return _status("RssAnon")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS: the peak of all pages, in bytes


def resident() -> int:
    """Bytes of memory of this process, pages of files among them, such as those of libraries."""
    if _STATUS.exists():
        return _status("VmRSS")
    return own_memory()


def total_memory() -> int:
    """Bytes of memory of this machine, or of the control group that holds the process to less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    group = Path("/sys/fs/cgroup/memory.max")
    text = group.read_text().strip() if group.exists() else "max"
    return min(total, int(text)) if text.isdigit() else total


def limit_memory(size: int) -> None:
    """From now on, let allocations fail that would take this process' memory beyond `size` bytes.

    What is reserved already and not in use (stacks of threads, arenas) is not counted. Raises `ConfigError`
    where the system has no such limit, or where more is held already.
    """
    if sys.platform != "linux":
        raise ConfigError("--ram can be enforced on Linux alone: leave it out here")
    held = own_memory()
    if size <= held:
        raise ConfigError(
            f"--ram {size / 2**20:,.0f}MiB cannot be kept: the program alone holds {held / 2**20:,.0f} MiB; "
            "give more"
        )
    _set_limit(_status("VmData") + size - held)


def room() -> int | None:
    """Bytes that `limit_memory` leaves to this process; None where there is no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return None if soft == resource.RLIM_INFINITY else soft - _status("VmData")


class Peak:
    """The most memory that this process held inside the block: `bytes`, looked at every few milliseconds."""

    def __enter__(self) -> Self:
        self.bytes, self._over = own_memory(), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self.bytes = max(self.bytes, own_memory())

    def _watch(self) -> None:
        while not self._over.wait(0.01):
            with suppress(OSError):  # where no file can be opened any more, whoever works says so
                self.bytes = max(self.bytes, own_memory())


@contextmanager
def lifted(size: Callable[[], int]) -> Iterator[None]:
    """Inside, a limit is higher by `size()` bytes: of mapped files, which count and can be dropped."""
    soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if soft == resource.RLIM_INFINITY:
        yield
        return
    _set_limit(soft + size())
    try:
        yield
    finally:
        _set_limit(soft)


def give_back() -> None:
    """Return to the system what was freed: glibc keeps it, such as what a tokenizer was parsed from."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _set_limit(size: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard != resource.RLIM_INFINITY:
        size = min(size, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (size, hard))


def _status(field: str) -> int:
    lines = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
    return int(lines[field].split()[0]) * 1024
