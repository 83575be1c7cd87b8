"""Vector search over the keys of one (layer, KV head): maximum inner product, numpy in and numpy out.

`base` (`VectorIndex`), `approximate` (what kinds share that are tuned: `ApproximateIndex`), `registry` (a
line a kind), `flat`, `faiss`, `hnswlib`, `clusters/` (the default), `files`. It may import `common`; no
torch, no model.
"""

if __name__ != "offload_decode.indexes":
    raise ImportError(f"import offload_decode.indexes: as {__name__} its modules would exist twice")

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offload_decode.common.errors import VectorIndexError
    from offload_decode.common.rows.arrays import keys_digest
    from offload_decode.indexes.base import Hits, RecallRecord, VectorIndex
    from offload_decode.indexes.registry import get, kinds

__all__ = ["Hits", "RecallRecord", "VectorIndex", "VectorIndexError", "get", "keys_digest", "kinds"]

_HOMES = {
    **dict.fromkeys(("Hits", "RecallRecord", "VectorIndex"), "offload_decode.indexes.base"),
    "VectorIndexError": "offload_decode.common.errors",
    "keys_digest": "offload_decode.common.rows.arrays",
    **dict.fromkeys(("get", "kinds"), "offload_decode.indexes.registry"),
}


def __getattr__(name: str) -> object:
    # Imported when asked for: the errors alone, which every command needs, come without numpy.
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
