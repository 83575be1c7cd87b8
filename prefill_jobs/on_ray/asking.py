"""Questions to stores, spread over the machines of a Ray cluster.

Each worker keeps one model and the stores that it asked last. It gets questions to stores on its machine, or
fetches the stores. The driver alone writes answers: those that a lost worker had not returned are asked
again, and nothing is written twice.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from offload_decode.common.errors import OffloadDecodeError
from offload_decode.common.memory import own_memory
from offload_decode.config import EngineConfig
from offload_decode.engine.engine import Engine
from offload_decode.kv.indexes import default_kind
from offload_decode.models.loading import LoadedModel, load
from offload_decode.models.size_estimate import outline
from offload_decode.planning.caps import Caps, admit_question, apply_caps, check_ask, planned_ask
from offload_decode.prefill_jobs.buckets.collections import RemoteStores
from offload_decode.prefill_jobs.on_ray.store_workers import StoreWorker, routed
from offload_decode.prefill_jobs.on_ray.workers import (
    Cluster,
    Pool,
    TaskProgress,
    connected,
    installed,
    shares,
)
from offload_decode.store.reader import KVStore
from offload_decode.types import CitedDocument, StepStats

OPEN = 4
"""Stores that a worker keeps open."""


@dataclass(frozen=True)
class How:
    """What all workers get. `stores`: the absolute paths of all stores to ask or, where they are `far`, their
    URLs.
    """

    stores: tuple[str, ...]
    far: RemoteStores | None
    config: EngineConfig
    caps: Caps
    max_new_tokens: int
    cites: bool


@dataclass(frozen=True)
class Part:
    """Questions to one store, answered in one batch."""

    store: str
    questions: tuple[str, ...]


@dataclass(frozen=True)
class Given:
    """An answer; `tokens`: their number."""

    text: str
    tokens: int
    finish: str
    citations: tuple[CitedDocument, ...] | None
    stats: StepStats


Answered = list[Given] | OffloadDecodeError


class Opened(NamedTuple):
    """An open store. `held` keeps it in the cache."""

    engine: Engine
    held: ExitStack


class Asker(StoreWorker):
    """Answers questions, with one model and the stores that were asked last; it stands at bytes of a fetched
    store.
    """

    def __init__(self, how: How) -> None:
        super().__init__(how.stores, how.far)
        self.how = how
        self.before = 0
        self.model: tuple[tuple[str, str, str], LoadedModel] | None = None
        self.opened: OrderedDict[str, Opened] = OrderedDict()
        self.most = OPEN if how.far is None else 1  # an open store cannot leave the cache

    def begin(self) -> None:
        """Apply the caps; the model is loaded for the first store."""
        apply_caps(self.how.caps, self.how.config.device)
        self.before = own_memory()

    def done(self, task: Part) -> list[Given]:
        """Greedy answers."""
        given = self._engine(task.store).answer_many(
            task.questions, self.how.max_new_tokens, len(task.questions), self.how.cites
        )
        return [Given(one.text, len(one.tokens), one.finish, one.citations, one.stats) for one in given]

    def _engine(self, store: str) -> Engine:
        """An open store with its model; the least recently asked one is closed."""
        if store not in self.opened:
            self._close(self.most - 1)
            with ExitStack() as held:
                engine = self._open(held.enter_context(self.held(store)))
                self.opened[store] = Opened(engine, held.pop_all())
        self.opened.move_to_end(store)
        return self.opened[store].engine

    def _close(self, left: int) -> None:
        """Close the least recently asked stores until so many are left."""
        while len(self.opened) > left:
            self.opened.popitem(last=False)[1].held.close()

    def _open(self, path: str) -> Engine:
        config, caps = self.how.config, self.how.caps
        store = KVStore.open(path)
        named = store.manifest.model_id if config.model is None else config.model
        index = default_kind(store)
        given = outline(named), store.manifest, config, caps, self.before
        check_ask(*given, index=index)
        wanted = named, store.manifest.dtype, config.weights_after(store.manifest.weights)
        if self.model is None or self.model[0] != wanted:
            self._close(0)
            self.model = None
            self.model = wanted, load(wanted[0], config.device, *wanted[1:])
        engine = Engine.open(store, self.model[1], config)
        engine.admit = partial(admit_question, planned_ask(*given, index=index), caps)
        return engine


def answer_on_ray(
    parts: Sequence[Part],
    cluster: Cluster,
    config: EngineConfig,
    max_new_tokens: int,
    cites: bool = False,
    far: RemoteStores | None = None,
    watch: Callable[[TaskProgress], None] = lambda standing: None,
) -> Iterator[tuple[int, Answered]]:
    """The number of each part with its answers or an error, in order of completion. With `far`, stores are
    URLs; else paths on the workers' machines. `watch` gets the fetched bytes of the stores of the parts at
    work.

    Raises `ConfigError` where Ray is not installed, `OffloadDecodeError` where no cluster answers.
    """
    ray = installed("--workers ray")
    if far is None:
        parts = [Part(os.path.abspath(part.store), part.questions) for part in parts]
    stores = tuple(dict.fromkeys(part.store for part in parts))
    how = How(stores, far, config, cluster.caps, max_new_tokens, cites)
    with connected(ray, cluster.address):
        count, share = shares(ray, cluster.workers, config.device, grows=True)
        pool = Pool(ray, Asker, how, min(count, len(parts)), share)
        yield from routed(pool, parts, watch, "answered", far is not None)
