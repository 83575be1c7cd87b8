"""Which of the tasks that wait is next."""

from __future__ import annotations

import random
from collections import Counter

from offload_decode.prefill_jobs.on_ray.pool import Waiting


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
