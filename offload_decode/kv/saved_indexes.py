"""The indexes that lie beside a store: what they are and whether they are whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from offload_decode.indexes import files
from offload_decode.indexes.base import RecallRecord
from offload_decode.indexes.errors import VectorIndexError
from offload_decode.kv.head_indexes import (
    PARTIAL,
    class_of,
    examine,
    heads_of,
    index_path,
    indexes_folder,
    kind_folder,
    kind_folders,
    metadata_file,
    staging_folder,
)

if TYPE_CHECKING:
    from pathlib import Path

    from offload_decode.store.reader import KVStore


@dataclass(frozen=True)
class SavedIndexes:
    """One kind: bytes on disk, heads that are there and should be, and the recall that was measured at `k`.

    `recall` (mean over heads) and `lowest_recall` are None where nothing was measured, as for an exact index.
    `full_scans` heads are tuned to read every key.
    """

    kind: str
    bytes: int
    heads: int
    heads_in_all: int
    k: int | None
    recall: float | None
    lowest_recall: float | None
    full_scans: int


def saved_kinds(store: KVStore) -> list[str]:
    """Kinds that were built beside the store, or begun."""
    folder = indexes_folder(store.path)
    begun = folder.glob("*" + PARTIAL) if folder.is_dir() else ()
    return sorted({path.name for path in kind_folders(store.path)} | {path.stem for path in begun})


def describe(store: KVStore, kind: str) -> SavedIndexes:
    """Read from the small metadata files alone."""
    folder = kind_folder(store.path, kind)
    folder = folder if folder.is_dir() else staging_folder(store.path, kind)
    paths = [index_path(folder, layer, head) for layer, head in heads_of(store)]
    there = [path for path in paths if metadata_file(path).exists()]
    found = [record for record in map(_recall, there) if record is not None]
    measured = [record.measured for record in found]
    return SavedIndexes(
        kind=kind,
        bytes=sum(file.lstat().st_size for file in folder.iterdir()),
        heads=len(there),
        heads_in_all=len(paths),
        k=found[0].k if found else None,
        recall=sum(measured) / len(measured) if measured else None,
        lowest_recall=min(measured, default=None),
        full_scans=sum(record.full_scan for record in found),
    )


def unfinished(store: KVStore, kind: str) -> str | None:
    """That some heads have no index yet, and the way out; None where all of them have one."""
    built = examine(store, kind)
    return None if built is None or built.there == built.heads else built.unfinished(store.path)


def verify(
    store: KVStore, kind: str, progress: Callable[[str, int, int], None]
) -> Iterator[VectorIndexError]:
    """Read every byte of the indexes of a kind, and load them; what is wrong with each. A head that has no
    file is not wrong: a build that was stopped did not come to it.
    """
    chosen, folder, heads = class_of(store, kind), kind_folder(store.path, kind), heads_of(store)
    if not folder.is_dir():
        return
    for done, (layer, head) in enumerate(heads, 1):
        path = index_path(folder, layer, head)
        try:
            if not _is_left_out(path, chosen.suffix):
                keys, digest = store.keys(layer, head), store.digest(layer, head)
                files.read_whole(path, files.identity(kind, keys, digest), chosen.suffix)
                chosen.load(path, keys, digest=digest)
        except VectorIndexError as error:
            yield error
        progress("verify indexes", done, len(heads))


def _is_left_out(path: Path, suffix: str) -> bool:
    """Whether a head has no file at all. Kinds without native files are built in a moment: they have all."""
    native = path.with_name(path.name + suffix)
    return bool(suffix) and not metadata_file(path).exists() and not native.exists()


def _recall(path: Path) -> RecallRecord | None:
    try:
        return files.recall_of(path, files.metadata(path))
    except VectorIndexError:
        return None  # `verify` says what is wrong with it
