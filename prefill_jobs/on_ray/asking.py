"""Questions to stores, spread over the machines of a Ray cluster.

Each worker keeps one model and the stores that it asked last, and is given questions to those alone that lie
on its machine. What it answers comes back to the driver, which alone writes: what a lost worker had not yet
handed over is asked again, and nothing is written twice.
"""

from __future__ import annotations

import os
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from offload_decode.config import EngineConfig
from offload_decode.engine.engine import Engine
from offload_decode.errors import OffloadDecodeError, StoreNotFound
from offload_decode.kv.head_indexes import default_kind
from offload_decode.memory import own_memory
from offload_decode.models.loading import LoadedModel, load
from offload_decode.models.outline import outline
from offload_decode.planning.caps import Caps, admit_question, apply_caps, check_ask, planned_ask
from offload_decode.store.reader import KVStore
from offload_decode.types import CitedDocument
from prefill_jobs.on_ray.cluster import Cluster, connected, installed, shares
from prefill_jobs.on_ray.pool import TRIES, Lost, Moved, Pool, Standing

OPEN = 4
"""Stores that a worker keeps open."""


@dataclass(frozen=True)
class How:
    """What all workers are told. `stores`: absolute paths of all that may be asked."""

    stores: tuple[str, ...]
    config: EngineConfig
    caps: Caps
    max_new_tokens: int
    cites: bool


@dataclass(frozen=True)
class Part:
    """Questions to one store, answered in one forward pass."""

    store: str
    questions: tuple[str, ...]


@dataclass(frozen=True)
class Given:
    """An answer; `tokens`: how many."""

    text: str
    tokens: int
    finish: str
    citations: tuple[CitedDocument, ...] | None


Answered = list[Given] | OffloadDecodeError


class Asker:
    """In a process of its own, on any machine; see `pool.Worker`."""

    def __init__(self, how: How) -> None:
        self.how = how
        self.before: int | None = None
        self.model: tuple[tuple[str, str, str], LoadedModel] | None = None
        self.engines: OrderedDict[str, Engine] = OrderedDict()

    def load(self) -> frozenset[str] | OffloadDecodeError:
        """Under the caps; the stores that lie on this machine."""
        try:
            apply_caps(self.how.caps, self.how.config.device)
        except OffloadDecodeError as error:
            return error
        self.before = own_memory()
        return frozenset(filter(os.path.exists, self.how.stores))

    def do(self, part: Part) -> Answered | Moved:
        """The answers to a part, greedy. One in place of a lost worker looks first which stores it has."""
        if self.before is not None:
            return self._answered(part)
        here = self.load()
        if isinstance(here, OffloadDecodeError):
            return here
        return Moved(here, self._answered(part) if part.store in here else None)

    def _answered(self, part: Part) -> Answered:
        try:
            given = self._engine(part.store).answer_many(
                part.questions, self.how.max_new_tokens, len(part.questions), self.how.cites
            )
        except OffloadDecodeError as error:
            return error
        return [Given(one.text, len(one.tokens), one.finish, one.citations) for one in given]

    def standing(self) -> tuple[int, int]:
        """A part is answered as a whole."""
        return 0, 0

    def _engine(self, path: str) -> Engine:
        """An open store, with its model; the one that was asked longest ago goes."""
        if path not in self.engines:
            while len(self.engines) >= OPEN:
                self.engines.popitem(last=False)
            self.engines[path] = self._opened(path)
        self.engines.move_to_end(path)
        return self.engines[path]

    def _opened(self, path: str) -> Engine:
        config, caps = self.how.config, self.how.caps
        store = KVStore.open(path)
        named = store.manifest.model_id if config.model is None else config.model
        index = default_kind(store)
        assert self.before is not None
        given = outline(named), store.manifest, config, caps, self.before
        check_ask(*given, index=index)
        wanted = named, store.manifest.dtype, config.weights_after(store.manifest.weights)
        if self.model is None or self.model[0] != wanted:
            self.engines.clear()
            self.model = None
            self.model = wanted, load(wanted[0], config.device, *wanted[1:])
        engine = Engine.open(store, self.model[1], config)
        engine.admit = partial(admit_question, planned_ask(*given, index=index), caps)
        return engine


def nearest(here: frozenset[str], last: Part | None, waiting: Sequence[Part]) -> int | None:
    """The next part for a worker on a machine that has these stores: of the store that it has just asked,
    else of the one with the most parts left.
    """
    places = [place for place, part in enumerate(waiting) if part.store in here]
    stores = [waiting[place].store for place in places]
    if not places:
        return None
    wanted = last.store if last and last.store in stores else Counter(stores).most_common(1)[0][0]
    return places[stores.index(wanted)]


def answer_on_ray(
    parts: Sequence[Part],
    cluster: Cluster,
    config: EngineConfig,
    max_new_tokens: int,
    cites: bool = False,
    watch: Callable[[int], None] = lambda at_work: None,
) -> Iterator[tuple[int, Answered]]:
    """The number of each part with its answers, or what stood in their way, in the order in which they come.
    `watch` is told how many parts are at work.

    Raises `ConfigError` where Ray is not installed, `OffloadDecodeError` where no cluster answers.
    """
    ray = installed("--workers ray")
    here = [Part(os.path.abspath(part.store), part.questions) for part in parts]
    how = How(tuple(dict.fromkeys(part.store for part in here)), config, cluster.caps, max_new_tokens, cites)
    with connected(ray, cluster.address):
        count, share = shares(ray, cluster.workers, config.device)
        pool = Pool(ray, Asker, how, min(count, len(here)), share)
        yield from answered(pool, here, lambda standing: watch(len(standing)))


def answered(
    pool: Pool, parts: Sequence[Part], watch: Callable[[Standing], None]
) -> Iterator[tuple[int, Answered]]:
    """`answer_on_ray`, by the workers of a pool."""
    seen = set()
    for number, result in pool.run(parts, watch, nearest):
        seen.add(number)
        if isinstance(result, Lost):
            result = OffloadDecodeError(
                f"{TRIES} Ray workers were lost while they answered, the last with: {result}; see that their "
                "machines have the memory for it, and run the same command again to go on"
            )
        yield number, result
    for number, part in enumerate(parts):
        if number not in seen:
            problem = f"no Ray worker finds a store at {part.store}"
            yield number, StoreNotFound(f"{problem}: it must lie there on a machine of the cluster")
