"""Store to indexes: one for each (layer, KV head), resumed where an earlier build stopped, and searched when
all of them are there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from offload_decode.errors import ConfigError
from offload_decode.indexes import registry
from offload_decode.indexes.base import RecallRecord, VectorIndex
from offload_decode.indexes.errors import IndexNotWritten, VectorIndexError
from offload_decode.indexes.plain_files import remove
from offload_decode.kv.head_indexes import heads_of, index_path, indexes_folder, kind_folder, staging_folder
from offload_decode.prefill_jobs.publishing import alone, publish, tidy
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
    `offload_decode.indexes.errors.VectorIndexError`.
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
