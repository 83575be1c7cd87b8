"""Which of the tasks that wait is next."""

from __future__ import annotations

import random
from collections import Counter

from offload_decode.prefill_jobs.on_ray.asking import Part
from offload_decode.prefill_jobs.on_ray.waiting import Fetching, InOrder, Nearest


def parts_of(stores: str) -> list[Part]:
    return [Part(store, ("?",)) for store in stores]


def test_in_order_what_comes_back_is_last() -> None:
    waiting = InOrder("abc")
    assert waiting.take(None, None) == 0
    waiting.add(0)
    assert [waiting.take(None, None) for _ in range(4)] == [1, 2, 0, None]
    assert len(waiting) == 0


def test_a_worker_stays_with_its_store_and_else_takes_the_one_with_most_left() -> None:
    waiting = Nearest(parts_of("xabbcbbc"))
    worker = waiting.known(frozenset("abc"))
    assert waiting.take(worker, None) == 2, "of b"
    assert waiting.take(worker, 4) == 4, "of c, as its last"
    assert waiting.take(worker, 0) == 3, "its last is not there any more"
    assert waiting.take(worker, 1) == 1
    assert [waiting.take(worker, 1) for _ in range(4)] == [5, 6, 7, None], "most left, then as given"
    assert len(waiting) == 1


def test_a_worker_is_given_no_store_that_is_not_on_its_machine() -> None:
    waiting = Nearest(parts_of("xab"))
    assert waiting.take(waiting.known(frozenset("y")), None) is None
    assert waiting.take(waiting.known(frozenset("bx")), 1) == 0


def test_first_what_lies_here_then_what_lies_nowhere() -> None:
    waiting = Fetching(parts_of("bdaacc"))
    assert waiting.take(waiting.known(frozenset("bc")), None) == 4, "it lies on the worker's machine"
    elsewhere = waiting.known(frozenset())
    assert waiting.take(elsewhere, None) == 2, "on none, and the one with most left"
    assert waiting.take(elsewhere, None) == 1, "on none, and on its way to none"
    assert waiting.take(elsewhere, 0) == 0, "all are somewhere"
    assert sorted(waiting.take(elsewhere, None) or 0 for _ in range(2)) == [3, 5]
    assert waiting.take(elsewhere, None) is None


def test_of_many_choices_each_is_that_with_most_left_though_some_come_back() -> None:
    for seed in range(50):
        rng = random.Random(seed)
        parts = parts_of("".join(rng.choices("abcdefgh", k=40)))
        waiting, left = Nearest(parts), set(range(40))
        machines = [frozenset(rng.sample("abcdefgh", 5)) for _ in range(3)]
        workers = [waiting.known(stores) for stores in machines]
        while left:
            number = rng.randrange(3)
            last = rng.choice([None, rng.randrange(40)])
            taken = waiting.take(workers[number], last)
            there = Counter(parts[one].store for one in left if parts[one].store in machines[number])
            if taken is None:
                assert not there
                left -= {one for one in left if parts[one].store not in frozenset().union(*machines)}
                continue
            left.remove(taken)
            store = parts[taken].store
            if last is not None and parts[last].store in there:
                assert store == parts[last].store
            else:
                assert there[store] == max(there.values())
            if rng.random() < 0.2:
                waiting.add(taken)
                left.add(taken)


class Looked:
    """A task that counts how often its store is looked at."""

    times = 0

    @property
    def store(self) -> str:
        Looked.times += 1
        return "a"


def test_no_choice_looks_at_all_that_wait() -> None:
    waiting = Nearest([Looked() for _ in range(100)])
    worker = waiting.known(frozenset("a"))
    assert sorted(waiting.take(worker, None) or 0 for _ in range(100)) == [*range(100)]
    assert Looked.times == 100
