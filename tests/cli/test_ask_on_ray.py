"""One store asked through workers that have a part of its tokens each: the answer is that of one process."""

import importlib.util
import json
import os
import signal
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from offload_decode.common.errors import OffloadDecodeError, StoreMismatch, StoreNotFound
from offload_decode.config import EngineConfig
from offload_decode.engine.engine import Engine
from offload_decode.planning.caps import Caps
from offload_decode.prefill_jobs.on_ray import attending
from offload_decode.prefill_jobs.on_ray.attending import Attender, scattered
from offload_decode.prefill_jobs.on_ray.workers import Cluster
from offload_decode.store.base import ranges
from offload_decode.store.reader import KVStore
from tests.cli.conftest import done, refused, run
from tests.prefill_jobs.test_ray import descendants

CONFIG = EngineConfig(selector="dense", device="cpu")


class LostError(Exception):
    pass


class RayTaskError(LostError):
    cause = StoreMismatch("damaged")


class Here:
    """Ray, with workers in this process; `lost`: what is raised where a result is waited for."""

    def __init__(self, lost: Exception | None = None) -> None:
        self.lost = lost
        self.started: list[Attender] = []
        self.exceptions = SimpleNamespace(RayError=LostError, RayTaskError=RayTaskError)
        self.nodes = lambda: [{"Alive": True, "Resources": {"CPU": 2.0}}]
        self.init = self.shutdown = lambda **_: None
        self.put = lambda value: value

    def remote(self, kind: type[Attender]) -> Any:
        return SimpleNamespace(
            options=lambda **_: SimpleNamespace(remote=lambda *part: self._start(kind(*part)))
        )

    def _start(self, worker: Attender) -> Any:
        self.started.append(worker)
        return SimpleNamespace(
            open=SimpleNamespace(remote=worker.open), attend=SimpleNamespace(remote=worker.attend)
        )

    def get(self, promises: list[Any]) -> list[Any]:
        if self.lost and any(promise is not None for promise in promises):
            raise self.lost
        return promises


def use(ray: Here, monkeypatch: pytest.MonkeyPatch) -> Here:
    monkeypatch.setattr(attending, "installed", lambda option: ray)
    return ray


def test_two_workers_answer_as_one_process(store, monkeypatch):
    ray, engine = use(Here(), monkeypatch), Engine.open(store, config=CONFIG)
    with scattered(engine, Cluster("ray", 2, Caps()), CONFIG) as apart:
        given = apart.answer("Why?", 6)
    alone = engine.answer("Why?", 6)
    assert given.tokens == alone.tokens
    assert (given.stats.selected, given.stats.rows) == (alone.stats.selected, alone.stats.rows)
    assert [(one.start, one.end) for one in ray.started] == ranges(
        engine.prefix.length, 2, engine.store.manifest.page_size
    )


def test_a_worker_in_place_of_a_lost_one_opens_its_part(store):
    opened = KVStore.open(store)
    own = opened.manifest
    worker = Attender(str(store), opened.store_digest, 0, own.page_size, CONFIG, Caps())
    query = np.zeros((1, own.shape.query_heads, 1, own.shape.head_dim), np.float32)
    found = worker.attend(own.shape.full_layers[0], query, 1.0, None)
    assert np.allclose(found[1], np.log(own.page_size)), "every token counts alike for a query of zeros"


def test_a_worker_that_finds_another_store_says_so(store, tmp_path):
    worker = Attender(str(store), "another", 0, 16, CONFIG, Caps())
    with pytest.raises(StoreMismatch):
        worker.open()
    with pytest.raises(StoreNotFound):
        replace(worker, store=str(tmp_path / "none.kv")).open()


def test_errors_and_losses_of_workers_are_sentences(store, monkeypatch):
    engine = Engine.open(store, config=CONFIG)
    use(Here(LostError("gone for good\nmore")), monkeypatch)
    with (
        scattered(engine, Cluster("ray", 2, Caps()), CONFIG) as apart,
        pytest.raises(OffloadDecodeError, match=r"lost while they attended.*gone for good; see that"),
    ):
        apart.answer("Why?", 2)
    ray = use(Here(), monkeypatch)
    with scattered(engine, Cluster("ray", 2, Caps()), CONFIG) as apart:
        ray.lost = RayTaskError("Ray's own words")
        with pytest.raises(StoreMismatch, match=r"^damaged$"):
            apart.answer("Why?", 2)


def test_citations_of_several_workers_are_refused(store):
    assert "--workers and --cite" in refused(2, "ask", store, "Why?", "--workers", "ray", "--cite")


@pytest.mark.slow
def test_two_workers_of_a_real_cluster_one_of_which_is_killed(store, monkeypatch):
    if importlib.util.find_spec("ray") is None:  # imported before the command, it would write to stdout
        pytest.skip("Ray is not installed")
    killed: list[int] = []
    plain_ask = attending.ask_of

    def ask_and_kill(ray: Any, workers: list[Any]) -> Any:
        ask = plain_ask(ray, workers)

        def asked(layer: int, *given: Any) -> Any:
            if not killed:
                found = [pid for pid, title in descendants(os.getpid()).items() if "ray::Attender" in title]
                killed.append(found[0])
                os.kill(killed[0], signal.SIGKILL)
            return ask(layer, *given)

        return asked

    monkeypatch.setattr(attending, "ask_of", ask_and_kill)
    command = ("ask", store, "Why?", "-s", "dense", "--max-new-tokens", "5", "--json")
    apart = done(*command, "--workers", "ray", "--worker-count", "2")
    assert killed
    alone = json.loads(run(*command).out)
    found = json.loads(apart.out)
    assert (found["answer"], found["tokens"]) == (alone["answer"], alone["tokens"])
    assert found["stats"]["selected"] == alone["stats"]["selected"]
