"""Compiled loops: tell the user when they are compiled; end with a sentence when a file that they read fails.

A mapped file that shrinks, or whose disk fails, raises SIGBUS. The sizes of mapped files are checked before
each step, but a file can shrink within one. A handler in Python would return into the fault. This one is
compiled, and calls only what a signal handler may call (POSIX, signal-safety): `write` and `_exit`.
"""

import ctypes
import signal
from functools import cache
from typing import Any

import numba
import numpy as np
from numba.core import event

from offload_decode.cli import output
from offload_decode.common import rows


class _Announcer(event.Listener):
    """Notified of what numba compiles; loading from its cache is no compilation."""

    announced = False

    def on_start(self, event: Any) -> None:
        ours = event.data["dispatcher"].py_func.__module__.startswith("offload_decode.")
        if ours and not self.announced:
            self.announced = True
            when = "once on this machine"
            if rows.TEMPORARY is not None:
                places = " nor ".join(map(str, rows.PLACES))
                when = f"anew in every process, as neither {places} can be written (NUMBA_CACHE_DIR=FOLDER)"
            output.note(f"compiling the loops for this processor, {when}: ten to twenty seconds …")

    def on_end(self, event: Any) -> None:
        """Nothing to do."""


@cache
def announce_compiling() -> None:
    """From here on, print a line on stderr when loops are compiled, which happens once per machine."""
    event.register("numba:compile", _Announcer())  # type: ignore[no-untyped-call]


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
