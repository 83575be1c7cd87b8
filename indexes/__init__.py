"""Vector search over the keys of one (layer, KV head): maximum inner product, numpy in and numpy out."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from indexes.base import Hits, RecallRecord, VectorIndex
    from indexes.errors import VectorIndexError
    from indexes.keys import keys_digest
    from indexes.registry import get, kinds

__all__ = ["Hits", "RecallRecord", "VectorIndex", "VectorIndexError", "get", "keys_digest", "kinds"]

_HOMES = {
    **dict.fromkeys(("Hits", "RecallRecord", "VectorIndex"), "base"),
    "VectorIndexError": "errors",
    "keys_digest": "keys",
    **dict.fromkeys(("get", "kinds"), "registry"),
}


def __getattr__(name: str) -> object:
    # Imported when asked for: the errors alone, which every command needs, come without numpy.
    if name in _HOMES:
        return getattr(import_module(f"indexes.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'indexes' has no attribute '{name}'")
