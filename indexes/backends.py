"""The optional libraries, imported where an index kind needs them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from offload_decode.indexes.errors import MissingBackend


class Library:
    """A module that is imported when something of it is first used."""

    def __init__(self, imported: Callable[[], Any]):
        self._imported = imported

    def __getattr__(self, name: str) -> Any:
        return getattr(self._imported(), name)


def faiss() -> Any:
    """The module `faiss`, from the CPU or the GPU package."""
    return _import("faiss", "pip install 'offload-decode[cpu]' (or [gpu] on a CUDA machine, never both)")


def hnswlib() -> Any:
    """The module `hnswlib`, which is compiled at installation."""
    return _import("hnswlib", "pip install 'offload-decode[hnsw]' (needs a C++ compiler)")


def _import(module: str, remedy: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingBackend(
            f"This index kind needs {module}, which cannot be imported ({error}): "
            f"{remedy}, or use kind 'flat'."
        ) from error
