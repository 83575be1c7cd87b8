"""Questions to stores, spread over the machines of a Ray cluster.

Each worker keeps one model and the stores that it asked last. It gets questions to stores on its machine, or
fetches the stores. The driver alone writes answers: those that a lost worker had not returned are asked
again, and nothing is written twice.
"""

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from offload_decode.collections.together import Talk
from offload_decode.common.memory import own_memory
from offload_decode.config import EngineConfig
from offload_decode.engine.engine import Engine
from offload_decode.engine.grounded import check_measured
from offload_decode.planning.caps import Caps, apply_caps
from offload_decode.planning.opening import Opener
from offload_decode.prefill_jobs.buckets.collections import RemoteStores
from offload_decode.prefill_jobs.joined import opened_together
from offload_decode.prefill_jobs.on_ray.pool import TaskProgress, pool_of
from offload_decode.prefill_jobs.on_ray.workers import Cluster, Worker
from offload_decode.types import Answer

OPEN = 4
"""Stores that a worker keeps open."""


@dataclass(frozen=True)
class QuestionBatch:
    """Questions to one store, answered together."""

    store: str
    questions: tuple[str, ...]


@dataclass(frozen=True)
class JointQuestion:
    """A question to several stores, which answer as one (`collections.together`): `names` and `addresses` of
    their documents, and the `weights` with which they begin.
    """

    stores: tuple[str, ...]
    question: str
    way: str
    names: tuple[str, ...]
    addresses: tuple[str, ...]
    weights: tuple[float, ...] | None

    @property
    def store(self) -> str:
        """The one by which a machine is chosen."""
        return self.stores[0]


JointAnswer = tuple[Answer, Mapping[str, object]]
"""With what a line says of its documents."""


class Asker(Worker):
    """Answers questions, with one model and the stores that were asked last. Its progress is in bytes of a
    store that it fetches. `stores`: the absolute paths of all stores to ask or, where they are `remote`,
    their URLs. `least`: what an answer must be grounded by to be given.
    """

    def __init__(
        self,
        stores: Sequence[str],
        remote: RemoteStores | None,
        config: EngineConfig,
        caps: Caps,
        max_new_tokens: int,
        cites: bool,
        check: bool,
        least: float | None = None,
    ) -> None:
        super().__init__(stores, remote)
        self.least = least
        self.max_new_tokens, self.cites, self.check = max_new_tokens, cites, check
        self.opener = Opener(config, caps, release=lambda: self._close(0))
        self.opened: OrderedDict[str, tuple[Engine, ExitStack]] = OrderedDict()  # held in the cache
        self.most = OPEN if remote is None else 1  # an open store cannot leave the cache

    def begin(self) -> None:
        apply_caps(self.opener.caps, self.opener.config.device)
        self.opener.before = own_memory()

    def run(self, task: QuestionBatch | JointQuestion) -> list[Answer] | JointAnswer:
        if isinstance(task, JointQuestion):
            return self._together(task)
        questions, engine = task.questions, self._engine(task.store)
        return engine.answer_many(questions, self.max_new_tokens, len(questions), self.cites, self.check)

    def _together(self, task: JointQuestion) -> JointAnswer:
        self._close(0)
        with ExitStack() as held:
            paths = [Path(held.enter_context(self.held(store))) for store in task.stores]
            least = self.least is not None
            opened = opened_together(self.opener, paths, task.way, self.cites, least)
            joint, weigh = held.enter_context(opened), lambda question: task.weights
            talk = Talk(joint, task.way, task.names, task.addresses, weigh, self.least or 0.0)
            answer = talk.answer(task.question, self.max_new_tokens)
            return answer, talk.fields()

    def _engine(self, store: str) -> Engine:
        """An open store with its model; the least recently asked one is closed."""
        if store not in self.opened:
            self._close(self.most - 1)
            with ExitStack() as held:
                engine = self.opener.open(held.enter_context(self.held(store)))
                if self.least is not None:
                    check_measured(engine.loaded.model.config)
                self.opened[store] = engine, held.pop_all()
        self.opened.move_to_end(store)
        return self.opened[store][0]

    def _close(self, left: int) -> None:
        while len(self.opened) > left:
            self.opened.popitem(last=False)[1][1].close()


def answer_on_ray(
    batches: Sequence[QuestionBatch | JointQuestion],
    cluster: Cluster,
    config: EngineConfig,
    max_new_tokens: int,
    cites: bool = False,
    check: bool = False,
    remote: RemoteStores | None = None,
    watch: Callable[[TaskProgress], None] = lambda progress: None,
    least: float | None = None,
) -> Iterator[tuple[int, Any]]:
    """The number of each batch with its answers, as `Asker.run` returns them, or an `OffloadDecodeError`, in
    order of completion. With `remote`, stores are URLs; else paths on the workers' machines. `watch` gets the
    fetched bytes of the stores of the running batches.

    Raises as `pool_of`.
    """
    if remote is None:
        batches = [
            replace(one, store=os.path.abspath(one.store)) if isinstance(one, QuestionBatch) else one
            for one in batches
        ]
    each = [one.stores if isinstance(one, JointQuestion) else (one.store,) for one in batches]
    stores = tuple(dict.fromkeys(store for own in each for store in own))
    setup = stores, remote, config, cluster.caps, max_new_tokens, cites, check, least
    with pool_of(cluster, config.device, Asker, setup, len(batches), remote is not None) as pool:
        yield from pool.run(batches, "answered", watch)
