"""Index kinds by name. A kind's module is imported when it is asked for, its library when it is used."""

from __future__ import annotations

from importlib import import_module
from typing import cast

from indexes.base import VectorIndex
from indexes.errors import UnknownIndex

_CLASSES = {
    "clusters": "indexes.clusters:ClusteredIndex",
    "flat": "indexes.flat:FlatIndex",
    "faiss-ivf": "indexes.faiss_ivf:FaissIVF",
    "faiss-hnsw": "indexes.faiss_hnsw:FaissHNSW",
    "hnswlib": "indexes.hnswlib:HnswlibIndex",
}


def kinds() -> tuple[str, ...]:
    """Every kind that `get` knows, installed or not."""
    return tuple(_CLASSES)


def get(kind: str) -> type[VectorIndex]:
    """The class of `kind`. Raises UnknownIndex, or MissingBackend when its library is not installed."""
    found = stated(kind)
    found.need_library()
    return found


def stated(kind: str) -> type[VectorIndex]:
    """The class of `kind` for what it states of itself, without its library. Raises UnknownIndex."""
    if kind not in _CLASSES:
        raise UnknownIndex(f"There is no index kind {kind!r}; the kinds are {', '.join(_CLASSES)}.")
    module, name = _CLASSES[kind].split(":")
    return cast(type[VectorIndex], getattr(import_module(module), name))
