"""Stores long enough that an index of clusters leaves cells out, of made-up keys: no model runs over them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from offload_decode.indexes.clusters.index import ClusteredIndex
from offload_decode.models.loading import LoadedModel
from offload_decode.prefill_jobs.indexing import build_indexes
from offload_decode.store.reader import KVStore
from tests.store.jobs import FULL, make_job

TOKENS = 8200  # ragged against blocks and pages
KEYS_IN_CLUSTERS = 40
# (dtype, how keys and values are stored)
FORMS = [
    ("float16", "auto"),
    ("bfloat16", "auto"),
    ("float32", "auto"),
    ("float32", "int8"),
    ("float32", "int4-values"),
]


def long_store(path: Path, dtype: str, kv: str, loaded: LoadedModel | None = None) -> KVStore:
    """Two layers of two KV heads of 64 channels with their clusters built; of `loaded`, if it is given."""
    shape = None if loaded is None else loaded.shape
    job = make_job(TOKENS, dtype, (FULL, FULL), query_samples=256, kv=kv, shape=shape)
    manifest = job.manifest
    if loaded is not None:
        manifest = replace(
            manifest,
            model_config_hash=loaded.config_hash,
            weights_hash=loaded.weights_hash,
            tokenizer_hash=loaded.tokenizer_hash,
        )
    rng = np.random.default_rng(1)
    centres = rng.standard_normal((2, 2, KEYS_IN_CLUSTERS, 64), np.float32)
    labels = rng.integers(0, KEYS_IN_CLUSTERS, TOKENS)
    keys = centres[:, :, labels] + 0.5 * job.keys.astype(np.float32)
    job = replace(job, manifest=manifest, keys=keys.astype(manifest.numpy_dtype))
    store = job.write(path, [TOKENS])
    build_indexes(store, "clusters", k=64)
    return KVStore.open(store)


def cells_read(index: ClusteredIndex, query: npt.NDArray[np.float32], k: int) -> int:
    """How many of the index's cells a search for `query [D]` reads: what is spoilt in any other is not seen.

    The index is one that was built and not loaded: its arrays are written to.
    """
    own, found = index.cells, index.search(query[None], k)
    read = 0
    for start, stop in zip(own.starts[:-1] * 16, own.starts[1:] * 16, strict=True):
        kept, changed = (own.scales[start:stop].copy(), own.ids[start:stop].copy()), False
        own.scales[start:stop] = np.inf
        for spoilt in (found.ids[0, 0], -1):  # the best key, again and again; none
            own.ids[start:stop] = spoilt
            hits = index.search(query[None], k)
            changed |= not (np.array_equal(hits.ids, found.ids) and np.array_equal(hits.scores, found.scores))
        own.scales[start:stop], own.ids[start:stop] = kept
        read += changed
    return read


def rebuilt(store: KVStore, layer: int, head: int, k: int = 64) -> Any:
    """The index of a head as `long_store` built it, in memory."""
    keys, queries = store.keys(layer, head), store.queries(layer, head)
    return ClusteredIndex.build(keys, queries, target_recall=0.98, k=k)
