"""End a command with a sentence when a mapped file shrinks or its disk fails, which raises SIGBUS.

The sizes of mapped files are checked before each step, but a file can shrink within one. A handler in Python
would return into the fault. This one is compiled, and calls only what a signal handler may call (POSIX,
signal-safety): `write` and `_exit`.
"""

import ctypes
import signal
from typing import Any

import numba
import numpy as np

_SENTENCE = np.frombuffer(
    b"error: a file of the store or of its index shrank while it was read, or its disk failed: "
    b"restore it from a copy, prefill again, or build the index again\n",
    np.uint8,
)
_types: Any = numba.types  # its void, called with the types of arguments, is a signature
_write = _types.ExternalFunction("write", _types.intp(_types.int32, _types.voidptr, _types.uintp))
_exit = _types.ExternalFunction("_exit", _types.void(_types.int32))


@numba.cfunc("void(int32)", cache=True)
def _end(_: int) -> None:
    _write(2, _SENTENCE.ctypes, len(_SENTENCE))
    _exit(1)


def exit_on_bus_error() -> None:
    """From here on, SIGBUS prints one line on stderr and ends the process with exit code 1."""
    set_handler = ctypes.CDLL(None).signal
    set_handler.argtypes = [ctypes.c_int, ctypes.c_void_p]
    set_handler.restype = ctypes.c_void_p
    set_handler(signal.SIGBUS, _end.address)
