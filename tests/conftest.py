"""Settings that must stand before anything else is imported."""

import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from numba.core.compiler_lock import global_compiler_lock
from numba.core.dispatcher import Dispatcher

if TYPE_CHECKING:
    from tests.card import Card

# Without a CUDA device Triton's kernels run under its interpreter. Triton reads this as it is first imported,
# and transformers may be the first to import it.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# As the plugin does it: what an assertion of a suite compared is shown.
pytest.register_assert_rewrite(
    *(f"offload_decode.testing.{what}_contract" for what in ("selector", "index", "method"))
)

# Tests write thousands of small stores, and every file of a store is waited for until it is on the disk. In
# memory there is nothing to wait for; what passed is removed at once (see pyproject.toml).
_MEMORY = Path("/dev/shm")
if os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free > 4 << 30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(_MEMORY))

# What is remembered between runs stays out of the user's cache. Workers share that of their run.
if "PYTEST_XDIST_WORKER" not in os.environ:
    _CACHE = tempfile.TemporaryDirectory()
    os.environ["XDG_CACHE_HOME"] = _CACHE.name

_LOCKS, _compile = Path(os.environ["XDG_CACHE_HOME"]), Dispatcher.compile


def _compile_once(self: Any, signature: Any) -> Any:
    """Of workers that need the same loop one compiles it; the others wait, and load it from numba's cache."""
    name = f"{self.py_func.__module__}.{self.py_func.__qualname__}"
    if not name.startswith("offload_decode."):
        return _compile(self, signature)
    with global_compiler_lock, open(_LOCKS / name, "w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        return _compile(self, signature)


Dispatcher.compile = _compile_once


@pytest.fixture
def card() -> Iterator["Card"]:
    """A stand-in for a CUDA device, with the host's arithmetic."""
    from tests.card import references, stand_in

    with references(), stand_in() as card:
        yield card


@pytest.fixture(autouse=True, scope="session")
def _suites_try_the_stand_in() -> None:
    """What the suites try on a device runs on the stand-in, with the host's arithmetic."""
    from offload_decode.testing import devices
    from tests.card import references, stand_in

    devices.on_device, devices.beside_device = stand_in, references


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """A command that serves sends the logs of its process to its own stderr, which ends with its test."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:], root.level = handlers, level
