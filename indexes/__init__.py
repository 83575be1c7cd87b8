"""Vector search over the keys of one (layer, KV head): maximum inner product, numpy in and numpy out."""

from __future__ import annotations

from indexes.base import Hits, RecallRecord, VectorIndex
from indexes.errors import VectorIndexError
from indexes.keys import keys_digest
from indexes.registry import get, kinds

__all__ = ["Hits", "RecallRecord", "VectorIndex", "VectorIndexError", "get", "keys_digest", "kinds"]
