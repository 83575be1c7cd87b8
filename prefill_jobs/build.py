"""Store to indexes: one for each (layer, KV head), resumed where an earlier build stopped."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import indexes.registry
from indexes.base import RecallRecord, VectorIndex
from indexes.errors import VectorIndexError
from offload_decode.errors import ConfigError
from offload_decode.kv.head_indexes import index_path
from offload_decode.store.reader import KVStore

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class BuildReport:
    """What was built: sizes in bytes, time in seconds, recall@k measured on held-out prefill queries.

    `recall` is the mean over heads and `lowest_recall` the worst head; both are 1 for an exhaustive index.
    `parameters` gives the lowest and the highest search parameter that the recall target took.
    """

    kind: str
    folder: Path
    heads: int
    built: int
    reused: int
    seconds: float
    bytes: int
    recall: float
    lowest_recall: float
    parameters: dict[str, object]


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
    `indexes.errors.VectorIndexError`.
    """
    if not 0 < recall <= 1 or k < 1:
        raise ConfigError(f"recall must be above 0 and at most 1, and k at least 1, not {recall} and {k}")
    chosen = indexes.registry.get(kind)
    opened = KVStore.open(store)
    shape = opened.manifest.shape
    heads = [(layer, head) for layer in shape.full_layers for head in range(shape.kv_heads)]
    if not heads:
        raise ConfigError(f"{store} has no full-attention layers, so there is nothing to index")
    began = time.perf_counter()
    records: list[RecallRecord | None] = []
    built = 0
    progress("index", 0, len(heads))
    for done, (layer, head) in enumerate(heads, start=1):
        index = _saved(chosen, opened, layer, head, recall, k)
        if index is None:
            keys, queries = opened.keys(layer, head), opened.queries(layer, head)
            digest = opened.digest(layer, head)
            index = chosen.build(keys, queries, digest=digest, target_recall=recall, k=k)
            path = index_path(opened.path, kind, layer, head)
            path.parent.mkdir(parents=True, exist_ok=True)
            index.save(path)
            built += 1
        records.append(index.recall)
        progress("index", done, len(heads))
    measured = [1.0 if record is None else record.measured for record in records]
    folder = index_path(opened.path, kind, 0, 0).parent
    return BuildReport(
        kind=kind,
        folder=folder,
        heads=len(heads),
        built=built,
        reused=len(heads) - built,
        seconds=time.perf_counter() - began,
        bytes=sum(file.stat().st_size for file in folder.iterdir()),
        recall=sum(measured) / len(measured),
        lowest_recall=min(measured),
        parameters=_parameters(records),
    )


def _saved(
    chosen: type[VectorIndex], store: KVStore, layer: int, head: int, recall: float, k: int
) -> VectorIndex | None:
    """The index that an earlier build left, if it is whole, of these keys, and tuned for the same target."""
    path = index_path(store.path, chosen.name, layer, head)
    try:
        index = chosen.load(path, store.keys(layer, head), digest=store.digest(layer, head))
    except VectorIndexError:
        return None  # missing, damaged or of other keys: it is built anew, whichever it was
    same = index.recall is None or (index.recall.target, index.recall.k) == (recall, k)
    return index if same else None


def _parameters(records: list[RecallRecord | None]) -> dict[str, object]:
    tuned = [record for record in records if record is not None]
    if not tuned:
        return {}
    values = [record.value for record in tuned]
    return {tuned[0].parameter: (min(values), max(values))}
