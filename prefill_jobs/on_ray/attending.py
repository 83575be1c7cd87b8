"""One store, its tokens divided among the workers of a Ray cluster: each maps its own range, attends to it,
and returns an attention state, so that the memory of all machines together holds the store.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from offload_decode.common.errors import OffloadDecodeError, StoreMismatch
from offload_decode.config import EngineConfig
from offload_decode.engine.distributed import Ask, Promised, ScatteredPrefix
from offload_decode.engine.engine import Engine
from offload_decode.engine.step import StoredPrefix
from offload_decode.kv.host_cache import HostKV
from offload_decode.planning.caps import Caps, apply_caps
from offload_decode.prefill_jobs.on_ray.workers import TRIES, Cluster, connected, installed, shares
from offload_decode.store.base import StoreRange, ranges
from offload_decode.store.reader import KVStore
from offload_decode.types import AttentionState, StepStats

Arrays = tuple[npt.NDArray[Any], npt.NDArray[Any], StepStats]


@dataclass(frozen=True)
class How:
    """A worker's part: tokens `start:end` of the store at an absolute path, which has this digest."""

    store: str
    digest: str
    start: int
    end: int
    config: EngineConfig
    caps: Caps


class Attender:
    """In a process of its own, on any machine. A worker in place of a lost one opens its part again; errors
    of this project are returned, because Ray wraps those that are raised.
    """

    def __init__(self, how: How) -> None:
        self.how = how
        self.prefix: StoredPrefix | None = None

    def open(self) -> OffloadDecodeError | None:
        """Map the part; an error where it cannot be used."""
        how = self.how
        try:
            apply_caps(how.caps, "cpu")
            store = KVStore.open(how.store)
            if store.store_digest != how.digest:
                raise StoreMismatch(
                    f"{how.store} is another store on one of the machines: copy it there, or share it."
                )
            host = HostKV(StoreRange(store, how.start, how.end), torch.device("cpu"))
            shape, config = store.manifest.shape, how.config
            self.prefix = StoredPrefix.over(host, shape, config.selector, config.options)
        except OffloadDecodeError as error:
            return error
        return None

    def attend(
        self, layer: int, query: npt.NDArray[Any], scaling: float, softcap: float | None
    ) -> Arrays | OffloadDecodeError:
        """Of `query [B, H, T, D]`, float32, to the part: `out [B, H, T, Dv]`, `lse [B, H, T]`, costs."""
        if self.prefix is None and (error := self.open()):
            return error
        assert self.prefix is not None
        try:
            with torch.inference_mode():
                state = self.prefix.attend(layer, torch.from_numpy(query.copy()), scaling, softcap)
        except OffloadDecodeError as error:
            return error
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
        options = {
            **share,
            "max_restarts": -1,
            "max_task_retries": TRIES - 1,
            "scheduling_strategy": "SPREAD",
        }
        path, digest = os.path.abspath(engine.store.path), engine.store.store_digest
        workers = [
            ray.remote(Attender).options(**options).remote(How(path, digest, *part, config, cluster.caps))
            for part in ranges(own.n_tokens, count, own.page_size)
        ]
        for problem in _got(ray, [worker.open.remote() for worker in workers]):
            if problem is not None:
                raise problem
        prefix = ScatteredPrefix(engine.prefix, ask_of(ray, workers))
        apart = Engine(engine.loaded, engine.store, prefix)
        apart.admit = engine.admit
        yield apart


def ask_of(ray: Any, workers: list[Any]) -> Ask:
    """How `ScatteredPrefix` asks the workers."""

    def ask(layer: int, query: Tensor, scaling: float, softcap: float | None) -> Promised:
        sent = ray.put(query.numpy())
        promises = [worker.attend.remote(layer, sent, scaling, softcap) for worker in workers]

        def wait() -> list[tuple[AttentionState, StepStats]]:
            found = _got(ray, promises)
            for part in found:
                if isinstance(part, OffloadDecodeError):
                    raise part
            return [
                (AttentionState(torch.from_numpy(out.copy()), torch.from_numpy(lse.copy())), cost)
                for out, lse, cost in found
            ]

        return wait

    return ask


def _got(ray: Any, promises: list[Any]) -> list[Any]:
    try:
        return list(ray.get(promises))
    except ray.exceptions.RayTaskError:
        raise
    except ray.exceptions.RayError as error:
        reason = str(error).strip().splitlines()[0]
        raise OffloadDecodeError(
            f"{TRIES} Ray workers were lost while they attended to a part of the store, the last with: "
            f"{reason}; see that their machines have the memory for it"
        ) from error
