"""Index kinds by name, built in or an extension's. A kind's module is imported when it is asked for, its
library when it is used.
"""

from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from offload_decode.common.errors import MissingBackend, UnknownIndex, UnusableKind
from offload_decode.common.plugins import INDEXES, Extensions
from offload_decode.indexes.base import VectorIndex

_MODULES = {
    "clusters": "offload_decode.indexes.clusters.index",
    "flat": "offload_decode.indexes.flat",
    "faiss-ivf": "offload_decode.indexes.faiss",
    "faiss-hnsw": "offload_decode.indexes.faiss",
    "hnswlib": "offload_decode.indexes.hnswlib",
}

BUILT_IN = tuple(_MODULES)
_BASE = "offload_decode.indexes.base:VectorIndex"
EXTENSIONS: Extensions[VectorIndex] = Extensions(INDEXES, _BASE, lambda: _MODULES, UnusableKind)


def kinds() -> tuple[str, ...]:
    """Every kind that `get` knows, whether or not its library is installed."""
    return tuple(EXTENSIONS.names())


def usable() -> list[str]:
    """The kinds whose class can be used; `doctor` reports the others."""
    found = []
    for kind in kinds():
        with suppress(UnusableKind):
            stated(kind)
            found.append(kind)
    return found


def get(kind: str) -> type[VectorIndex]:
    """The class of `kind`. Raises UnknownIndex, UnusableKind, or MissingBackend without its library."""
    found = stated(kind)
    if found.library is not None:
        found.library()
    return found


def load_libraries() -> None:
    """Import the libraries of all built-in kinds that are installed, before memory is limited: Faiss reserves
    128 MiB as it is loaded, of which it uses little, and crashes where it does not get them.
    """
    for kind in BUILT_IN:
        with suppress(MissingBackend):
            get(kind)


def stated(kind: str) -> type[VectorIndex]:
    """The class of `kind`, without its library. Raises UnknownIndex and UnusableKind."""
    if (found := EXTENSIONS.get(kind)) is None:
        raise UnknownIndex(f"There is no index kind {kind!r}; the kinds are {', '.join(kinds())}.")
    return found


@dataclass(frozen=True)
class Library:
    """A module that is imported when something of it is first used. Raises MissingBackend."""

    name: str
    remedy: str

    def __call__(self) -> Any:
        """The module."""
        try:
            return import_module(self.name)
        except ImportError as error:
            raise MissingBackend(
                f"This index kind needs {self.name}, which cannot be imported ({error}): "
                f"{self.remedy}, or use kind 'flat'."
            ) from error

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # which a class asks all that it holds for
            raise AttributeError(name)
        return getattr(self(), name)


faiss = Library("faiss", "pip install 'offload-decode[cpu]' (or [gpu] on a CUDA machine, never both)")
hnswlib = Library("hnswlib", "pip install 'offload-decode[hnsw]' (needs a C++ compiler)")
