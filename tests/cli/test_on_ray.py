"""Workers of a Ray cluster answer as one process: a batch, and one store of which each has a part."""

import importlib.util
import json
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from offload_decode.cli.questions import append_answers
from offload_decode.common.errors import OffloadDecodeError, StoreMismatch, StoreNotFound
from offload_decode.config import EngineConfig
from offload_decode.engine.engine import Engine
from offload_decode.planning.caps import Caps
from offload_decode.prefill_jobs.on_ray import asking, attending
from offload_decode.prefill_jobs.on_ray.asking import Asker, QuestionBatch
from offload_decode.prefill_jobs.on_ray.attending import Attender, scattered
from offload_decode.prefill_jobs.on_ray.workers import Cluster, Reply
from offload_decode.store.base import ranges
from offload_decode.store.reader import KVStore
from offload_decode.types import Answer, StepStats
from tests.cli.conftest import batch, done, lines_of, refused, run
from tests.prefill_jobs.test_ray import descendants

QUESTIONS = [{"question": f"what is the colour of thing {n}?", "id": n} for n in range(12)]


def asker(*stores: Path, **config: Any) -> Asker:
    return Asker(tuple(map(str, stores)), None, EngineConfig(**config), Caps(), 4, False, False)


def test_a_worker_answers_as_this_process_does(store):
    worker, texts = asker(store), tuple(str(question["question"]) for question in QUESTIONS[:3])
    assert worker.load().stores == {str(store)}
    given = worker.do(QuestionBatch(str(store), texts)).result
    expected = Engine.open(store).answer_many(texts, 4, 3)
    assert [one.text for one in given] == [one.text for one in expected]


def test_a_replacement_worker_loads_its_stores(store):
    worker, here = asker(store), QuestionBatch(str(store), ("Why?",))
    moved = worker.do(here)
    assert moved.stores == {str(store)}, "it may be on another machine"
    assert isinstance(moved.result, list)
    again = worker.do(here)
    assert (again.stores, isinstance(again.result, list)) == (None, True)


def test_a_replacement_worker_returns_parts_of_other_machines(tmp_path):
    none = tmp_path / "none.kv"
    assert asker(none).do(QuestionBatch(str(none), ("Why?",))) == Reply(None, frozenset())


def test_a_worker_keeps_one_model_and_the_last_stores(store, copy, monkeypatch):
    monkeypatch.setattr(asking, "OPEN", 2)
    paths = [store, copy("b.kv"), copy("c.kv")]
    worker = asker(*paths)
    worker.load()
    for path in (paths[0], paths[1], paths[0], paths[2]):
        assert isinstance(worker.do(QuestionBatch(str(path), ("Why?",))).result, list)
    assert list(worker.opened) == [str(paths[0]), str(paths[2])]
    assert len({id(engine.loaded) for engine, _ in worker.opened.values()}) == 1


def test_errors_of_a_store_are_returned(store, tmp_path):
    worker = asker(store, tmp_path / "none.kv")
    assert worker.load().stores == {str(store)}
    assert isinstance(worker.do(QuestionBatch(str(tmp_path / "none.kv"), ("Why?",))).result, StoreNotFound)
    assert isinstance(worker.do(QuestionBatch(str(store), ("Why?",))).result, list), "another one goes on"


ON_RAY = ("--workers", "ray", "--batch-size", "2")


def sorted_lines(path: Path) -> list[str]:
    return sorted(json.dumps(line, sort_keys=True) for line in lines_of(path))


def test_a_batch_writes_answers_in_order_of_arrival_and_names_failures(
    store, copy, questions, tmp_path, monkeypatch
):
    """Answers come from the last part to the first; one part fails, and is asked again by the next run."""
    other, failing = copy("other.kv"), [True]

    def answer_there(batches: list[QuestionBatch], *_: Any) -> Iterator[tuple[int, Any]]:
        for number, one in reversed(list(enumerate(batches))):
            if number == 1 and failing:
                yield number, OffloadDecodeError("lost")
            else:
                yield number, [Answer(f"to {text}", (1, 2), StepStats(), "stop") for text in one.questions]

    monkeypatch.setattr(asking, "answer_on_ray", answer_there)
    out = tmp_path / "out.jsonl"
    ran = batch(questions, out, store, other, *ON_RAY)
    assert ran.code == 1
    assert f"error: lost (unanswered: 2 questions to {store})" in ran.err
    assert [line["id"] for line in lines_of(out)][:2] == [10, 11], "as they come"
    failing.clear()
    ran = batch(questions, out, store, other, *ON_RAY)
    assert ran.err.splitlines()[-1] == f"{out}: 2 answers, 22 there already"
    found = [(line["store"], line["id"], line["answer"]) for line in lines_of(out)]
    wanted = [(str(path), q["id"], f"to {q['question']}") for path in (store, other) for q in QUESTIONS]
    assert sorted(found) == sorted(wanted)
    assert batch(questions, out, store, other, *ON_RAY).err == f"{out}: 0 answers, 24 there already\n"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--worker-count", "2"], "--worker-count needs --workers"),
        (["--workers", "ray", "--server", "http://127.0.0.1:1"], "--workers and --server"),
        (["--workers", "dask"], "--workers is ray or ray://HOST:PORT"),
    ],
)
def test_options_that_do_not_go_together_are_refused(store, questions, tmp_path, options, told):
    files = ("--questions", questions, "--out", tmp_path / "out.jsonl")
    assert told in refused(2, "batch", store, *files, *options)
    assert told in refused(2, "ask", store, "Why?", *options)


@contextmanager
def killing(title: str, most: int, pause: Callable[[random.Random], float]) -> Iterator[list[int]]:
    """Meanwhile processes of that title are killed with SIGKILL, `most` of them, each after a pause."""
    rng, over, killed = random.Random(0), threading.Event(), list[int]()

    def kill() -> None:
        while len(killed) < most and not over.wait(pause(rng)):
            if workers := [pid for pid, name in descendants(os.getpid()).items() if title in name]:
                killed.append(rng.choice(workers))
                os.kill(killed[-1], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        yield killed
    finally:
        over.set()
        killer.join()


STORES = int(os.environ.get("OFFLOAD_DECODE_BATCH_STORES", "5"))
KILLS = 2 + STORES // 2


@pytest.mark.slow
def test_workers_killed_at_random_and_a_machine_that_goes(store, copy, questions, tmp_path, monkeypatch):
    """On three machines: a worker is killed with SIGKILL every few seconds, whatever it does, and after the
    first answers a machine goes for good.
    """
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    stores, out = [store, *(copy(f"{number}.kv") for number in range(1, STORES))], tmp_path / "out.jsonl"
    machines = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    going = [machines.add_node(num_cpus=1), machines.add_node(num_cpus=1)][:1]

    def append_and_lose_a_machine(path: Path, answers: list[dict[str, Any]]) -> None:
        append_answers(path, answers)
        if going:
            machines.remove_node(going.pop())

    monkeypatch.setattr("offload_decode.cli.batch.append_answers", append_and_lose_a_machine)
    on_three = (*stores, *ON_RAY, "--worker-count", "3")
    monkeypatch.setenv("RAY_ADDRESS", machines.address)
    try:
        with killing("ray::Asker", KILLS, lambda rng: rng.expovariate(1 / 4)) as killed:
            ran = batch(questions, out, *on_three)
        assert ran.code == 0, ran.err
        assert killed
        assert not going
    finally:
        machines.shutdown()
    assert (
        batch(questions, out, *on_three).err == f"{out}: 0 answers, {STORES * len(QUESTIONS)} there already\n"
    )
    plain = tmp_path / "plain.jsonl"
    assert batch(questions, plain, *stores).code == 0
    assert sorted_lines(out) == sorted_lines(plain), "nothing lost, nothing twice"


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
