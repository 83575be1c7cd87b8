"""Indexes of a store that grows: extended beside the earlier ones, and published after the store itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from offload_decode.indexes import files, registry
from offload_decode.indexes.base import RecallRecord, VectorIndex
from offload_decode.indexes.errors import IndexNotWritten, VectorIndexError
from offload_decode.kv.head_indexes import (
    PARTIAL,
    examine,
    heads_of,
    index_path,
    indexes_folder,
    kind_folder,
    kind_folders,
    staging_folder,
)
from offload_decode.prefill_jobs.build import BuildReport, report_of
from offload_decode.prefill_jobs.publishing import alone, publish, tidy
from offload_decode.store.reader import KVStore

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Extended:
    """The kinds of index that were extended, and a sentence on each that was not."""

    reports: tuple[BuildReport, ...] = ()
    left: tuple[str, ...] = ()


def extend_indexes(earlier: KVStore, grown: KVStore, progress: Progress) -> Extended:
    """Extend every kind beside the `earlier` store by the further keys of the `grown` one, of which these are
    the first. They lie in their staging folders then: `publish_indexes` puts them in their places.

    A call that was interrupted goes on. Raises `VectorIndexError` where an index cannot be written.
    """
    reports, left = [], []
    for folder in kind_folders(earlier.path):
        kind = folder.name
        try:
            built = examine(earlier, kind)
            if built is not None and built.whole:
                reports.append(_extend(earlier, grown, kind, progress))
                continue
            why = "nobody began it" if built is None else built.reason(earlier.path)
        except IndexNotWritten:
            raise
        except VectorIndexError as error:  # it could not be searched either
            why = str(error).rstrip(".")
        left.append(f"the '{kind}' index was not extended, because {why}")
    return Extended(tuple(reports), tuple(left))


def publish_indexes(store: KVStore) -> None:
    """Put the extended indexes of a store in their places: the kinds all of whose staged indexes are of its
    keys. Others stay where they are.
    """
    folder = indexes_folder(store.path)
    if not folder.is_dir():
        return
    with alone(folder):
        for staging in sorted(folder.glob("*" + PARTIAL)):
            kind = staging.name.removesuffix(PARTIAL)
            if kind in registry.kinds() and _is_of(store, staging, kind):
                publish(staging, kind_folder(store.path, kind), ())
        for built in kind_folders(store.path):
            tidy(built)


def _extend(earlier: KVStore, grown: KVStore, kind: str, progress: Progress) -> BuildReport:
    chosen = registry.get(kind)
    folder, staging = kind_folder(earlier.path, kind), staging_folder(earlier.path, kind)
    heads, began = heads_of(earlier), time.perf_counter()
    records: list[RecallRecord | None] = []
    made = 0
    progress("index", 0, len(heads))
    with alone(indexes_folder(earlier.path)):
        for done, (layer, head) in enumerate(heads, start=1):
            keys, digest, path = (
                grown.keys(layer, head),
                grown.digest(layer, head),
                index_path(staging, layer, head),
            )
            index = _staged(chosen, path, keys, digest)
            if index is None:
                first = chosen.load(
                    index_path(folder, layer, head),
                    earlier.keys(layer, head),
                    digest=earlier.digest(layer, head),
                )
                index = first.extended(keys, grown.queries(layer, head), digest=digest)
                index.save(path)
                made += 1
            records.append(index.recall)
            progress("index", done, len(heads))
    return replace(report_of(kind, staging, records, made, began), folder=folder)


def _staged(chosen: type[VectorIndex], path: Path, keys: object, digest: str) -> VectorIndex | None:
    try:
        return chosen.load(path, keys, digest=digest)  # type: ignore[arg-type]
    except VectorIndexError:
        return None  # missing, damaged or of other keys: it is made anew, whichever it was


def _is_of(store: KVStore, staging: Path, kind: str) -> bool:
    try:
        suffix = registry.stated(kind).suffix
        for layer, head in heads_of(store):
            identity = files.identity(kind, store.keys(layer, head), store.digest(layer, head))
            files.check(index_path(staging, layer, head), identity, suffix)
    except VectorIndexError:
        return False
    return True
