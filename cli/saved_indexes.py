"""The indexes that lie beside a store: what they are and whether they are whole."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from indexes.errors import VectorIndexError
from offload_decode.kv.head_indexes import index_path, indexes_folder

if TYPE_CHECKING:
    from offload_decode.store.reader import KVStore


@dataclass(frozen=True)
class SavedIndexes:
    """One kind: bytes on disk, heads that are there and should be, and the recall that was measured at `k`.

    `recall` (mean over heads) and `lowest_recall` are None where nothing was measured, as for an exact index.
    """

    kind: str
    bytes: int
    heads: int
    heads_in_all: int
    k: int | None
    recall: float | None
    lowest_recall: float | None


def saved_kinds(store: KVStore) -> list[str]:
    """Kinds with a folder beside the store."""
    folder = indexes_folder(store.path)
    return sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []


def describe(store: KVStore, kind: str) -> SavedIndexes:
    """Read from the small metadata files alone: nothing is checked."""
    there = [path for path in map(_metadata, _paths(store, kind)) if path.exists()]
    recalls = [found for found in map(_recall, there) if found is not None]
    measured = [float(found["measured"]) for found in recalls]
    return SavedIndexes(
        kind=kind,
        bytes=sum(file.stat().st_size for file in (indexes_folder(store.path) / kind).iterdir()),
        heads=len(there),
        heads_in_all=len(_paths(store, kind)),
        k=int(recalls[0]["k"]) if recalls else None,
        recall=sum(measured) / len(measured) if measured else None,
        lowest_recall=min(measured, default=None),
    )


def verify(
    store: KVStore, kind: str, progress: Callable[[str, int, int], None]
) -> Iterator[VectorIndexError]:
    """Load every head's index, which reads all of its bytes; what is wrong with each."""
    from indexes.registry import get

    chosen = get(kind)
    heads = _heads(store)
    for done, (layer, head) in enumerate(heads, 1):
        path = index_path(store.path, kind, layer, head)
        try:
            chosen.load(path, store.keys(layer, head), digest=store.digest(layer, head))
        except VectorIndexError as error:
            yield error
        progress("verify indexes", done, len(heads))


def _heads(store: KVStore) -> list[tuple[int, int]]:
    shape = store.manifest.shape
    return [(layer, head) for layer in shape.full_layers for head in range(shape.kv_heads)]


def _paths(store: KVStore, kind: str) -> list[Path]:
    return [index_path(store.path, kind, layer, head) for layer, head in _heads(store)]


def _metadata(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def _recall(metadata: Path) -> dict[str, float] | None:
    try:
        recall = json.loads(metadata.read_bytes()).get("recall")
        measured = isinstance(recall["k"], int) and isinstance(recall["measured"], int | float)
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
        return None  # none was measured, or `verify` says what is wrong with it
    return recall if measured else None
