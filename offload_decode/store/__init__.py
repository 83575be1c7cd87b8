"""The KV store on disk: what a prefill writes once and every question reads (layout: `docs/formats.md`).

`format` (the manifest), `layout` (what lies where), `writer`, `reader` (`KVStore`), `opening` (checks),
`growth` (appends and renewals), `memory` (a store without files). It may import `attention` and what lies
below it; no torch, no model.
"""

from offload_decode.store.base import Store
from offload_decode.store.format import FORMAT_VERSION, Manifest, token_hash
from offload_decode.store.layout import sample_plan
from offload_decode.store.memory import MemoryStore
from offload_decode.store.reader import KVStore, verify_store
from offload_decode.store.writer import KVStoreWriter

__all__ = [
    "FORMAT_VERSION",
    "KVStore",
    "KVStoreWriter",
    "Manifest",
    "MemoryStore",
    "Store",
    "sample_plan",
    "token_hash",
    "verify_store",
]
