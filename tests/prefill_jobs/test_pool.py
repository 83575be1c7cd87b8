"""A batch on machines that are lost at random: Ray is made up, the rest is what runs on a cluster."""

import random
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from offload_decode.common.errors import BucketError, OffloadDecodeError, StoreNotFound
from offload_decode.config import EngineConfig
from offload_decode.planning.caps import Caps
from offload_decode.prefill_jobs.on_ray.asking import Asker, QuestionBatch
from offload_decode.prefill_jobs.on_ray.pool import Pool, Waiting
from offload_decode.prefill_jobs.on_ray.workers import TRIES, Reply, TryAgain
from offload_decode.types import Answer, StepStats

SETUP = (("of", "its", "machine"), None, EngineConfig(), Caps(), 4, False, False)


class OnAMachine(Asker):
    """An asker that has the stores of its machine; an answer says which machine it comes from."""

    has: str
    machine: str

    def here(self) -> frozenset[str]:
        return frozenset(self.has)

    def run(self, task: QuestionBatch) -> list[Answer]:
        assert task.store in self.has, "asked where it does not lie"
        return [
            Answer(f"{text} {task.store} {self.machine}", (1,), StepStats(), "stop")
            for text in task.questions
        ]


class Machines:
    """Ray, over machines by name with the stores that lie on each. `lost` says before every task whether the
    worker is lost; another one takes its place on a machine of Ray's choice, and is given the task. `there`
    says by its number whether there is room for a worker by now.
    """

    exceptions = SimpleNamespace(RayError=OSError, RayTaskError=RuntimeError)

    def __init__(
        self,
        has: Mapping[str, str],
        lost: Callable[[], bool] = lambda: False,
        place: Callable[[], str] = lambda: "",
        there: Callable[[int], bool] = lambda number: True,
    ):
        self.has, self.lost, self.place, self.there = has, lost, place, there
        self.started = self.given = 0
        self.number: dict[Any, int] = {}
        self.killed: list[Any] = []

    def remote(self, kind: type) -> Any:
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=partial(self._worker, kind)))

    def _worker(self, kind: type[OnAMachine], *setup: Any) -> Any:
        at = [self._at(kind, setup, list(self.has)[self.started % len(self.has)])]

        def load() -> Any:
            return at[0].load()

        self.number[load] = self.started
        self.started += 1

        def do(batch: QuestionBatch) -> Any:
            if self.lost():
                at[0] = self._at(kind, setup, self.place())
            self.given += 1
            return at[0].do(batch)

        return SimpleNamespace(
            load=SimpleNamespace(remote=lambda: load),
            do=SimpleNamespace(remote=lambda batch: lambda: do(batch)),
            progress=SimpleNamespace(remote=lambda: lambda: (0, 0)),
        )

    def _at(self, kind: type[OnAMachine], setup: Any, machine: str) -> OnAMachine:
        asker = kind(*setup)
        asker.machine, asker.has = machine, self.has[machine]
        return asker

    put = staticmethod(lambda value: value)
    get = staticmethod(lambda promise: promise())

    def kill(self, worker: Any) -> None:
        self.killed.append(worker)

    def wait(self, promises: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        assert promises, "Ray refuses to wait for nothing"
        ready = [one for one in promises if one not in self.number or self.there(self.number[one])]
        return ready[:num_returns], []


def ask(
    ray: Machines, stores: str, workers: int, kind: type[OnAMachine] = OnAMachine
) -> list[tuple[int, Any]]:
    pool = Pool(ray, kind, SETUP, workers, {"num_cpus": 1}, anywhere=False)
    batches = [QuestionBatch(store, ("?",)) for store in stores]
    return list(pool.run(batches, "answered", lambda progress: None))


def texts(results: list[tuple[int, Any]]) -> dict[int, str]:
    return {number: result[0].text for number, result in results if isinstance(result, list)}


def test_a_moved_worker_gets_only_stores_of_its_new_machine() -> None:
    """The worker of `m` is lost at its first task and comes back on `n`, which has no `a`."""
    losses = iter([True])
    ray = Machines({"m": "a", "n": "b"}, lambda: next(losses, False), lambda: "n")
    found = texts(ask(ray, "aabb", 2))
    assert found == {0: "? a m", 1: "? a m", 2: "? b n", 3: "? b n"}
    assert ray.started == 4, "new ones, as the one that could take it had been let go"


def test_stores_of_a_lost_machine_are_an_error() -> None:
    losses, gone = iter([True]), {"m": "a", "n": "b"}

    def lost() -> bool:
        gone["m"] = ""
        return next(losses, False)

    found = dict(ask(Machines(gone, lost, lambda: "n"), "ab", 2))
    assert texts(list(found.items())) == {1: "? b n"}
    assert isinstance(found[0], StoreNotFound)
    assert "no Ray worker finds a store at a:" in str(found[0])


def test_a_worker_whose_machine_comes_late_gets_work() -> None:
    ray = Machines({"m": "abcd", "n": "abcd"}, there=lambda number: number == 0 or ray.given >= 3)
    found = texts(ask(ray, "aabbccdd", 2))
    assert len(found) == 8
    assert [text.split()[2] for text in found.values()].count("n") >= 2


def test_a_worker_whose_machine_never_comes_is_not_waited_for() -> None:
    ray = Machines({"m": "ab"}, there=lambda number: number == 0)
    assert len(texts(ask(ray, "aabb", 3))) == 4
    assert len(ray.killed) == 3, "no machine need come for them any more"


class Unlucky(OnAMachine):
    """Fails on machines in capitals; its bucket is out of reach for those that are marked so too."""

    def run(self, task: QuestionBatch) -> list[Answer]:
        if self.machine.isupper():
            raise TryAgain(BucketError("out of reach"))
        return super().run(task)

    def load(self) -> Reply:
        if self.ready and self.machine == "X":
            return Reply(BucketError("out of reach"))
        return super().load()


def test_tasks_that_fail_on_one_machine_run_on_another() -> None:
    ray = Machines({"X": "ab", "m": "ab"})
    found = texts(ask(ray, "aabbab", 2, Unlucky))
    assert {text.split()[2] for text in found.values()} == {"m"}
    assert len(found) == 6


def test_tasks_that_fail_everywhere_are_errors_after_all_tries() -> None:
    ray = Machines({"M": "ab"})
    found = dict(ask(ray, "ab", 1, Unlucky))
    assert {type(result) for result in found.values()} == {BucketError}
    assert ray.given == 2 * TRIES


class Mortal(OnAMachine):
    """Every worker that is asked of `a` is lost, as Ray tells it."""

    def run(self, task: QuestionBatch) -> list[Answer]:
        if task.store == "a":
            raise Machines.exceptions.RayError("gone for good\nmore")
        return super().run(task)


def test_tasks_whose_workers_were_all_lost_are_errors() -> None:
    found = dict(ask(Machines({"m": "ab"}), "ab", 1, Mortal))
    assert texts(list(found.items())) == {1: "? b m"}
    assert isinstance(found[0], OffloadDecodeError)
    assert "Ray workers were lost while they answered, the last with: gone for good;" in str(found[0])


def test_new_workers_take_the_place_of_those_that_were_let_go() -> None:
    """Every worker of `X` fails once, and is let go as it cannot go on; the last tasks are told of it."""
    ray = Machines({"X": "ab"})
    assert {str(result) for _, result in ask(ray, "ab", 2, Unlucky)} == {"out of reach"}
    assert ray.started >= TRIES


@pytest.mark.parametrize("seed", range(20))
def test_workers_lost_at_random_lose_no_part_and_answer_none_twice(seed: int) -> None:
    """300 stores on four machines, each on one or two of them; one task in ten loses its worker."""
    rng = random.Random(seed)
    stores = [chr(256 + number) for number in range(300)]
    has = dict.fromkeys("mnop", "")
    for store in stores:
        for machine in rng.sample("mnop", rng.choice([1, 2])):
            has[machine] += store
    order = "".join(rng.sample(stores, len(stores)))
    ray = Machines(has, lambda: rng.random() < 0.1, lambda: rng.choice("mnop"))
    results = ask(ray, order, 4)
    assert set(Counter(number for number, _ in results).values()) == {1}
    for number, text in texts(results).items():
        store, machine = text.split()[1:]
        assert store == order[number]
        assert store in has[machine]
    unanswered = [result for _, result in results if not isinstance(result, list)]
    assert not unanswered


def test_tasks_without_a_place_go_to_any_worker_and_returned_ones_are_last() -> None:
    waiting = Waiting(range(3), anywhere=True)
    assert waiting.take((), None) == 0
    waiting.add(0)
    assert [waiting.take((), None) for _ in range(4)] == [1, 2, 0, None]
    assert not waiting


def test_a_worker_stays_with_its_store_and_else_takes_another_than_the_others() -> None:
    waiting, here = Waiting("xabbcbbc", anywhere=False), frozenset("abc")
    assert waiting.take(here, None) == 1, "of a"
    assert waiting.take(here, None) == 2, "of b"
    assert waiting.take(here, None) == 4, "of c, though b has more"
    assert waiting.take(here, 2) == 3, "of b, as its last"
    assert waiting.take(here, 0) == 7, "its last is not there, and c's turn is before b's"
    assert [waiting.take(here, 7) for _ in range(3)] == [5, 6, None]
    assert waiting, "x lies on no machine"


def test_a_worker_is_given_no_store_that_is_not_on_its_machine() -> None:
    waiting = Waiting("xab", anywhere=False)
    assert waiting.take(frozenset("y"), None) is None
    assert waiting.take(frozenset("bx"), 1) == 0


def test_stores_on_the_machine_come_before_stores_to_fetch() -> None:
    waiting = Waiting("bdaacc", anywhere=True)
    assert waiting.take(frozenset("c"), None) == 4, "it lies on the worker's machine"
    assert [waiting.take((), None) for _ in range(3)] == [0, 1, 2], "others are on their way to others"
    assert waiting.take(frozenset("a"), 0) == 3
    assert waiting.take((), 4) == 5
    assert waiting.take((), None) is None


def test_many_choices_lose_no_task_and_repeat_none() -> None:
    for seed in range(50):
        rng = random.Random(seed)
        stores = "".join(rng.choices("abcdefgh", k=40))
        waiting, left = Waiting(stores, anywhere=False), set(range(40))
        machines = [frozenset(rng.sample("abcdefgh", 5)) for _ in range(3)]
        while left:
            here = rng.choice(machines)
            last = rng.choice([None, rng.randrange(40)])
            taken = waiting.take(here, last)
            there = Counter(stores[one] for one in left if stores[one] in here)
            if taken is None:
                assert not there
                left -= {one for one in left if stores[one] not in frozenset().union(*machines)}
                continue
            left.remove(taken)
            assert stores[taken] in there
            if last is not None and stores[last] in there:
                assert stores[taken] == stores[last]
            if rng.random() < 0.2:
                waiting.add(taken)
                left.add(taken)


class Looked:
    """The name of a store, which counts how often it is looked up."""

    times = 0

    def __init__(self, name: int) -> None:
        self.name = name

    def __hash__(self) -> int:
        Looked.times += 1
        return hash(self.name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Looked) and other.name == self.name


def test_no_choice_looks_at_all_that_wait() -> None:
    stores = [Looked(number) for number in range(1000)]
    waiting, here = Waiting(stores, anywhere=False), frozenset(stores)
    Looked.times = 0
    assert sorted(waiting.take(here, None) or 0 for _ in range(1000)) == [*range(1000)]
    assert Looked.times < 20 * 1000
