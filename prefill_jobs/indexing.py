"""Store to indexes: one for each (layer, KV head), resumed where an earlier build stopped, and searched when
all of them are there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from offload_decode.common.errors import ConfigError, IndexNotWritten, VectorIndexError
from offload_decode.common.files import remove
from offload_decode.indexes import files, registry
from offload_decode.indexes.base import RecallRecord, VectorIndex
from offload_decode.kv.indexes import (
    PARTIAL,
    examine,
    heads_of,
    index_path,
    indexes_folder,
    kind_folder,
    kind_folders,
    staging_folder,
)
from offload_decode.prefill_jobs.destinations import alone, publish, tidy
from offload_decode.store.reader import KVStore

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class BuildReport:
    """What was built: sizes in bytes, time in seconds, recall@k measured on held-out prefill queries.

    `k` is None where nothing was measured, `recall` is the mean over heads and `lowest_recall` the worst
    head; both are 1 for an exhaustive index.
    `parameters` gives the lowest and the highest search parameter that the recall target took, `full_scans`
    the number of heads that it took a full scan of the keys for.
    """

    kind: str
    folder: Path
    heads: int
    built: int
    reused: int
    seconds: float
    bytes: int
    k: int | None
    recall: float
    lowest_recall: float
    parameters: dict[str, object]
    full_scans: int


def build_indexes(
    store: Path,
    kind: str,
    *,
    recall: float = 0.98,
    k: int = 100,
    progress: Progress = lambda stage, done, total: None,
) -> BuildReport:
    """Build the `kind` of index for every head of a store; those that are there and of these keys are kept.

    `recall` is the target for recall@`k` on the stored queries. Raises `StoreError`, `ConfigError` and
    `offload_decode.common.errors.VectorIndexError`.
    """
    check_target(recall, k)
    chosen = registry.get(kind)
    opened = KVStore.open(store)
    heads = heads_of(opened)
    if not heads:
        raise ConfigError(f"{store} has no full-attention layers, so there is nothing to index")
    began = time.perf_counter()
    folder, staging = kind_folder(opened.path, kind), staging_folder(opened.path, kind)
    records: list[RecallRecord | None] = []
    kept: list[Path] = []
    staged = built = 0
    progress("index", 0, len(heads))
    with _writing(folder), alone(indexes_folder(opened.path)):
        for done, (layer, head) in enumerate(heads, start=1):
            index = _saved(chosen, opened, folder, layer, head, recall, k)
            if index is not None:
                kept.append(index_path(folder, layer, head))
            else:
                index = _saved(chosen, opened, staging, layer, head, recall, k)
                staged += 1
            if index is None:
                keys, queries = opened.keys(layer, head), opened.queries(layer, head)
                digest = opened.digest(layer, head)
                index = chosen.build(keys, queries, digest=digest, target_recall=recall, k=k)
                index.save(index_path(staging, layer, head))
                built += 1
            records.append(index.recall)
            progress("index", done, len(heads))
        if staged:
            publish(staging, folder, kept)
        else:
            remove(staging)
        tidy(folder)
    return report_of(kind, folder, records, built, began)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """IndexNotWritten for errors of the file system."""
    try:
        yield
    except OSError as error:
        raise IndexNotWritten(
            f"{folder} cannot be written ({error.strerror}): mend this, and run the same command to go on."
        ) from error


def check_target(recall: float, k: int) -> None:
    """`ConfigError` for a recall, or a number of keys to measure it on, that cannot be aimed at."""
    if not 0 < recall <= 1 or k < 1:
        raise ConfigError(f"recall must be above 0 and at most 1, and k at least 1, not {recall} and {k}")


def report_of(
    kind: str, folder: Path, records: list[RecallRecord | None], built: int, began: float
) -> BuildReport:
    """What was built into a folder since the time `began`; `records` are of every head."""
    measured = [1.0 if record is None else record.measured for record in records]
    return BuildReport(
        kind=kind,
        folder=folder,
        heads=len(records),
        built=built,
        reused=len(records) - built,
        seconds=time.perf_counter() - began,
        bytes=sum(file.stat().st_size for file in folder.iterdir()),
        k=next((record.k for record in records if record is not None), None),
        recall=sum(measured) / len(measured),
        lowest_recall=min(measured),
        parameters=_parameters(records),
        full_scans=sum(record is not None and record.full_scan for record in records),
    )


def _saved(
    chosen: type[VectorIndex], store: KVStore, folder: Path, layer: int, head: int, recall: float, k: int
) -> VectorIndex | None:
    """The index that an earlier build left in `folder`, if it is whole, of these keys, and tuned for the same
    target.
    """
    path = index_path(folder, layer, head)
    try:
        index = chosen.load(path, store.keys(layer, head), digest=store.digest(layer, head))
    except VectorIndexError:
        return None  # missing, damaged or of other keys: it is built anew, whichever it was
    same = index.recall is None or (index.recall.target, index.recall.k) == (recall, min(k, len(index)))
    return index if same else None


def _parameters(records: list[RecallRecord | None]) -> dict[str, object]:
    tuned = [record for record in records if record is not None]
    if not tuned:
        return {}
    values = [record.value for record in tuned]
    return {tuned[0].parameter: (min(values), max(values))}


# Indexes of a store that grows: extended beside the earlier ones, and published after the store itself.


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
