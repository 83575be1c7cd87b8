"""One store, its tokens divided among the workers of a Ray cluster: each maps its own range, attends to it,
and returns an attention state, so that the memory of all machines together holds the store.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from offload_decode.common.errors import StoreMismatch
from offload_decode.config import EngineConfig
from offload_decode.engine.engine import Engine
from offload_decode.engine.step import Ask, Promised, ScatteredPrefix, StoredPrefix
from offload_decode.kv.host_cache import HostKV
from offload_decode.planning.caps import Caps, apply_caps
from offload_decode.prefill_jobs.on_ray.workers import (
    ACTOR_OPTIONS,
    Cluster,
    Lost,
    all_lost,
    connected,
    installed,
    received,
    shares,
)
from offload_decode.store.base import StoreRange, ranges
from offload_decode.store.reader import KVStore
from offload_decode.types import AttentionState, StepStats


@dataclass
class Attender:
    """In a process of its own, on any machine: it attends to tokens `start:end` of the store at an absolute
    path, which has this digest. A worker in place of a lost one opens its part again.
    """

    store: str
    digest: str
    start: int
    end: int
    config: EngineConfig
    caps: Caps

    @cached_property
    def prefix(self) -> StoredPrefix:
        apply_caps(self.caps, "cpu")
        store = KVStore.open(self.store)
        if store.store_digest != self.digest:
            raise StoreMismatch(
                f"{self.store} is another store on one of the machines: copy it there, or share it."
            )
        host = HostKV(StoreRange(store, self.start, self.end), torch.device("cpu"))
        return StoredPrefix.over(host, store.manifest.shape, self.config.selector, self.config.options)

    def open(self) -> None:
        """Raise where the part cannot be used."""
        _ = self.prefix

    def attend(
        self, layer: int, query: npt.NDArray[Any], scaling: float, softcap: float | None
    ) -> tuple[npt.NDArray[Any], npt.NDArray[Any], StepStats]:
        """Of `query [B, H, T, D]`, float32, to the part: `out [B, H, T, Dv]`, `lse [B, H, T]`, costs."""
        with torch.inference_mode():
            state = self.prefix.attend(layer, torch.from_numpy(query.copy()), scaling, softcap)
        return state.out.numpy(), state.lse.numpy(), self.prefix.take_stats()


@contextmanager
def scattered(engine: Engine, cluster: Cluster, config: EngineConfig) -> Iterator[Engine]:
    """Inside, an engine of the same store and model whose stored tokens are attended to by Ray workers.

    Raises `ConfigError` where Ray is not installed or the selector keeps a state, `OffloadDecodeError` where
    no cluster answers or a worker cannot open its part.
    """
    ray = installed("--workers ray")
    own = engine.store.manifest
    with connected(ray, cluster.address):
        count, share = shares(ray, cluster.workers, "cpu")
        path, digest = os.path.abspath(engine.store.path), engine.store.store_digest
        start = ray.remote(Attender).options(**share, **ACTOR_OPTIONS).remote
        workers = [
            start(path, digest, *part, config, cluster.caps)
            for part in ranges(own.n_tokens, count, own.page_size)
        ]
        _got(ray, [worker.open.remote() for worker in workers])
        prefix = ScatteredPrefix(engine.prefix, ask_of(ray, workers))
        apart = Engine(engine.loaded, engine.store, prefix)
        apart.admit = engine.admit
        yield apart


def ask_of(ray: Any, workers: list[Any]) -> Ask:
    def ask(layer: int, query: Tensor, scaling: float, softcap: float | None) -> Promised:
        sent = ray.put(query.numpy())
        promises = [worker.attend.remote(layer, sent, scaling, softcap) for worker in workers]

        def wait() -> list[tuple[AttentionState, StepStats]]:
            return [
                (AttentionState(torch.from_numpy(out.copy()), torch.from_numpy(lse.copy())), cost)
                for out, lse, cost in _got(ray, promises)
            ]

        return wait

    return ask


def _got(ray: Any, promises: list[Any]) -> list[Any]:
    try:
        return list(received(ray, promises))
    except Lost as lost:
        raise all_lost("attended to a part of the store", lost) from lost
