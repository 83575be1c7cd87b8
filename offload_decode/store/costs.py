"""What a store takes on disk."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from offload_decode.store import checksums
from offload_decode.store.layout import SEAM, ArraySpec

_STATES = ("conv", "recurrent")
_KINDS = {
    "key_norms": "key norms",
    "page_min": "page bounds",
    "page_max": "page bounds",
    "window_keys": "windows",
    "window_values": "windows",
    "offsets": "documents",
    "names": "documents",
    "query_positions": "queries",
}


def bytes_by_kind(root: Path, specs: Mapping[str, ArraySpec], files: Iterable[str]) -> dict[str, int]:
    """Bytes of the store at `root` by kind of array. `files`: all of its own, by their names."""
    cost: dict[str, int] = {}
    for spec in specs.values():
        name = spec.name.rpartition("/")[2].removesuffix(SEAM)
        kind = _KINDS.get(name, "states" if name.rstrip("0123456789") in _STATES else name)
        cost[kind] = cost.get(kind, 0) + spec.chunk_bytes * sum(1 for _ in spec.files())
    small = [name for name in files if name.endswith("zarr.json")] + [checksums.SUMS, checksums.SEAL]
    cost["metadata and checksums"] = sum(os.path.getsize(root / name) for name in small)
    return cost
