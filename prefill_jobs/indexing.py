"""Store to indexes: one for each layer and KV head, resumed where an earlier build stopped, published
together when all are built. Indexes of a store that grows are extended beside the earlier ones and published
after the store.
"""

import os
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from offload_decode.common import files
from offload_decode.common.errors import ConfigError, IndexNotWritten, StoreBusy, StoreError, VectorIndexError
from offload_decode.indexes import files as index_files
from offload_decode.indexes import registry
from offload_decode.indexes.base import FROM_KEYS, RecallRecord, VectorIndex
from offload_decode.kv.indexes import (
    OLD,
    PARTIAL,
    attention_of,
    examine,
    heads_of,
    index_path,
    indexes_folder,
    kind_folder,
    kind_folders,
    saved_kinds,
    staging_folder,
)
from offload_decode.store.files import Progress
from offload_decode.store.reader import KVStore
from offload_decode.store.streams import as_bytes

K = 100
"""Keys that recall is measured on."""


@dataclass(frozen=True)
class BuildReport:
    """What was built: sizes in bytes, time in seconds, recall@k measured on held-out prefill queries.

    `k` is None where nothing was measured; `recall` is the mean over heads, `lowest_recall` that of the worst
    head; both are 1 for an exhaustive index. `extended`: those of the `built` that go on from an earlier one.
    `parameters`: the lowest and the highest search parameter that the recall target took; `full_scans`: how
    many heads took a full scan of the keys. The rest is `attention_of` the heads.
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
    mass: float | None = None
    low: float | None = None
    lost: float | None = None
    most_lost: float | None = None
    best: float | None = None
    least_best: float | None = None
    extended: int = 0


def build_indexes(
    store: Path,
    kind: str,
    *,
    recall: float = 0.98,
    k: int = K,
    progress: Progress = lambda stage, done, total: None,
) -> BuildReport:
    """Build the `kind` of index for every head of a store; existing ones of the same keys are kept.

    `recall` is the target for recall@`k` on the stored queries. Raises `StoreError`, `ConfigError` and
    `offload_decode.common.errors.VectorIndexError`.
    """
    check_target(recall, k)
    chosen = registry.get(kind)
    opened = KVStore.open(store)
    heads = heads_of(opened)
    if not heads:
        raise ConfigError(f"{store} has no full-attention layers, so there is nothing to index")

    def tuned(index: VectorIndex | None) -> VectorIndex | None:
        """An index that was tuned for another target is built again."""
        if index is None or index.recall is None:
            return index
        own = index.recall
        # What an earlier version built is measured or tuned otherwise, or has no summaries.
        current = index.summarized and (own.mass is not None or own.source == FROM_KEYS)
        current &= own.value >= index.least_tuned
        return index if current and (own.target, own.k) == (recall, min(k, len(index))) else None

    began = time.perf_counter()
    folder, staging = kind_folder(opened.path, kind), staging_folder(opened.path, kind)
    records: list[RecallRecord | None] = []
    kept: list[Path] = []
    built = 0
    progress("index", 0, len(heads))
    with _surfaced(folder), alone(indexes_folder(opened.path)):
        for done, (layer, head) in enumerate(heads, start=1):
            index = tuned(_saved(chosen, opened, folder, layer, head))
            if index is not None:
                kept.append(index_path(folder, layer, head))
            else:
                index = tuned(_saved(chosen, opened, staging, layer, head))
            if index is None:
                keys, queries = opened.keys(layer, head), asked_of(opened, layer, head)
                digest = opened.digest(layer, head)
                index = chosen.build(keys, queries, digest=digest, target_recall=recall, k=k)
                index.summarize(opened.values(layer, head))
                index.save(index_path(staging, layer, head))
                built += 1
            records.append(index.recall)
            progress("index", done, len(heads))
        if len(kept) < len(heads):
            publish(staging, folder, kept)
        else:
            files.remove(staging)
        _remove_old(folder)
    return _report(kind, folder, records, built, began)


@contextmanager
def _surfaced(folder: Path) -> Iterator[None]:
    """Errors of the file system as `IndexNotWritten`."""
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


def _report(
    kind: str, folder: Path, records: list[RecallRecord | None], built: int, began: float, extended: int = 0
) -> BuildReport:
    """The report of a build that `began` at that time; `records` are of every head."""
    tuned = [record for record in records if record is not None]
    measured = [1.0 if record is None else record.measured for record in records]
    values = [record.value for record in tuned]
    return BuildReport(
        kind=kind,
        folder=folder,
        heads=len(records),
        built=built,
        reused=len(records) - built,
        seconds=time.perf_counter() - began,
        bytes=sum(file.stat().st_size for file in folder.iterdir()),
        k=tuned[0].k if tuned else None,
        recall=sum(measured) / len(measured),
        lowest_recall=min(measured),
        parameters={tuned[0].parameter: (min(values), max(values))} if tuned else {},
        full_scans=sum(record.full_scan for record in tuned),
        extended=extended,
        **attention_of(tuned),
    )


def asked_of(store: KVStore, layer: int, head: int) -> npt.NDArray[Any]:
    """The stored queries `[n, D]` of a head, of such a length that attention is at the scaling of 1/sqrt(D)
    that indexes reckon with: which keys are the best depends on no length, how much attention they have does.
    """
    queries, scaling = store.queries(layer, head), store.manifest.shape.layers[layer].scaling
    if scaling is None:
        return queries
    asked: npt.NDArray[Any] = queries.astype(np.float32) * np.float32(scaling * sqrt(queries.shape[1]))
    return asked


def _saved(
    chosen: type[VectorIndex], store: KVStore, folder: Path, layer: int, head: int
) -> VectorIndex | None:
    """The index that an earlier build left in `folder`; None if missing, damaged or of other keys."""
    try:
        path = index_path(folder, layer, head)
        return chosen.load(path, store.keys(layer, head), digest=store.digest(layer, head))
    except VectorIndexError:
        return None


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Lock a store's folder of indexes, made if need be, against other builds. `StoreBusy` where one runs."""
    files.make_folders(folder)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            locked = files.lock(descriptor)
        except OSError as error:
            raise StoreError(f"{folder} cannot be built in: {error.strerror}.") from error
        if not locked:
            raise StoreBusy(
                f"Another process builds indexes in {folder}: wait for it to end, or stop it first."
            )
        yield
    finally:
        os.close(descriptor)


def publish(staging: Path, folder: Path, kept: Iterable[Path]) -> None:
    """Put `staging` in the place of `folder`, with the indexes of `folder` that are kept (their base paths).

    After a kill at any moment either folder is complete, and the same call finishes.
    """
    for path in kept:
        for file in folder.glob(f"{path.name}.*"):
            target = staging / file.name
            target.unlink(missing_ok=True)
            try:
                os.link(file, target)
            except OSError:  # a file system without links
                shutil.copyfile(file, target)
    files.sync_tree(staging)
    _remove_old(folder)
    if folder.exists():
        files.rename(folder, folder.with_name(folder.name + OLD))
    files.rename(staging, folder)
    _remove_old(folder)


def _remove_old(folder: Path) -> None:
    """Remove what `publish` replaced."""
    files.remove(folder.with_name(folder.name + OLD))


def extend_indexes(
    earlier: KVStore, new: KVStore, path: Path, grown: bool, sure: int, progress: Progress
) -> tuple[list[BuildReport], list[str]]:
    """Extend every kind of index of the `earlier` store by the further keys of the `new` one, which will lie
    at `path`, where that has `grown` from it; where it has not, or a head has other keys or values behind the
    first `sure` tokens than it had, build anew for the same recall. The results stay in their staging
    folders there until `publish_indexes`. Returns a report of each kind, or a sentence with the reason why
    there is none.

    An interrupted call is resumed by the same one. Raises `VectorIndexError` where an index cannot be
    written.
    """
    reports, left = [], []
    for kind in saved_kinds(earlier):
        try:
            built = examine(earlier, kind)
            if built is not None and built.whole:
                reports.append(_extend(earlier, new, path, kind, grown, sure, progress))
                continue
            why = "nobody began it" if built is None else built.reason(earlier.path)
        except IndexNotWritten:
            raise
        except VectorIndexError as error:  # it cannot be searched either
            why = str(error).rstrip(".")
        left.append(f"the '{kind}' index was not {'extended' if grown else 'built anew'}, because {why}")
    return reports, left


def publish_indexes(store: KVStore) -> None:
    """Publish the extended indexes of a store: every kind of which all staged indexes are of the store's
    keys. Raises `StoreBusy` and `IndexNotWritten`.
    """
    folder = indexes_folder(store.path)
    if not folder.is_dir():
        return
    with _surfaced(folder), alone(folder):
        for staging in sorted(folder.glob("*" + PARTIAL)):
            kind = staging.name.removesuffix(PARTIAL)
            if kind in registry.kinds() and _is_of(store, staging, kind):
                publish(staging, kind_folder(store.path, kind), ())
        for built in kind_folders(store.path):
            _remove_old(built)


def _extend(
    earlier: KVStore, new: KVStore, path: Path, kind: str, grown: bool, sure: int, progress: Progress
) -> BuildReport:
    chosen = registry.get(kind)
    folder, staging = kind_folder(earlier.path, kind), staging_folder(path, kind)
    heads, began = heads_of(earlier), time.perf_counter()
    records: list[RecallRecord | None] = []
    made = extended = 0
    progress("index", 0, len(heads))
    with alone(indexes_folder(path)):
        for done, (layer, head) in enumerate(heads, start=1):
            index = _saved(chosen, new, staging, layer, head)
            if index is None:
                keys, digest = earlier.keys(layer, head), earlier.digest(layer, head)
                first = chosen.load(index_path(folder, layer, head), keys, digest=digest)
                keys, digest = new.keys(layer, head), new.digest(layer, head)
                queries = asked_of(new, layer, head)
                own = first.recall
                few = own is not None and own.k == len(first)  # than recall is to be measured on
                extends = grown and not few and _stay(earlier, new, layer, head, sure)
                if extends:
                    index = first.extended(keys, queries, digest=digest)
                else:
                    target: dict[str, Any] = {}
                    if own is not None:
                        target = {"target_recall": own.target, "k": K if few else own.k}
                    index = chosen.build(keys, queries, digest=digest, **target)
                index.summarize(new.values(layer, head))
                if extends:
                    index.share(first, stays=path != earlier.path)
                index.save(index_path(staging, layer, head))
                made, extended = made + 1, extended + extends
            records.append(index.recall)
            progress("index", done, len(heads))
    report = _report(kind, staging, records, made, began, extended)
    return replace(report, folder=kind_folder(path, kind))


def _stay(earlier: KVStore, new: KVStore, layer: int, head: int, sure: int) -> bool:
    """Whether the rows of a head of the `earlier` store behind the first `sure` stand in the `new` one."""
    rows = slice(sure, earlier.manifest.n_tokens)
    pairs = ((store.keys(layer, head)[rows], store.values(layer, head)[rows]) for store in (earlier, new))
    return all(as_bytes(ours) == as_bytes(theirs) for ours, theirs in zip(*pairs, strict=True))


def _is_of(store: KVStore, staging: Path, kind: str) -> bool:
    try:
        suffix = registry.stated(kind).suffix
        for layer, head in heads_of(store):
            identity = index_files.identity(kind, store.keys(layer, head), store.digest(layer, head))
            index_files.check(index_path(staging, layer, head), identity, suffix)
    except VectorIndexError:
        return False
    return True
