"""The vector indexes of a store: one for each (layer, KV head), kept in `STORE.indexes/KIND/` beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt

import indexes.registry
from indexes.base import Hits, VectorIndex
from offload_decode.errors import ConfigError
from offload_decode.store.reader import KVStore

AUTO = "auto"


def index_path(store: Path, kind: str, layer: int, head: int) -> Path:
    """Base path (without suffix) of one index's files."""
    return indexes_folder(store) / kind / f"layer-{layer:03d}-head-{head:03d}"


def indexes_folder(store: Path) -> Path:
    """Where the indexes of a store lie."""
    return store.with_name(store.name + ".indexes")


def default_kind(store: KVStore) -> str:
    """`clusters` where they were built, be it in part, else `flat`, which needs no files."""
    return "clusters" if (indexes_folder(store.path) / "clusters").is_dir() else "flat"


class HeadIndexes:
    """Indexes of one kind, `auto` for the `default_kind`, loaded when first searched."""

    def __init__(self, store: KVStore, kind: str):
        self.store = store
        self.kind = default_kind(store) if kind == AUTO else kind
        self._class = indexes.registry.get(self.kind)
        self._loaded: dict[tuple[int, int], VectorIndex] = {}
        if self.kind != "flat" and not (indexes_folder(store.path) / self.kind).is_dir():
            raise ConfigError(
                f"there is no '{kind}' index beside {store.path}: build it with "
                f"`offload-decode index {store.path} --kind {kind}`, or search with -o index=flat"
            )

    def get(self, layer: int, head: int) -> VectorIndex:
        """The index of one head; raises `indexes.errors.VectorIndexError` when it is missing, damaged or
        another's.
        """
        if (layer, head) not in self._loaded:
            keys, digest = self.store.keys(layer, head), self.store.digest(layer, head)
            if self.kind == "flat":
                index = self._class.build(keys, digest=digest)
            else:
                index = self._class.load(
                    index_path(self.store.path, self.kind, layer, head), keys, digest=digest
                )
            self._loaded[layer, head] = index
        return self._loaded[layer, head]

    def search(self, layer: int, heads: Sequence[int], queries: npt.NDArray[Any], k: int) -> Hits:
        """The k best keys of some KV heads for their `queries [heads, R, D]`, in one call."""
        return self._class.search_heads([self.get(layer, head) for head in heads], queries, k)
