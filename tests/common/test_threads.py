"""The threads that compiled loops run on."""

import multiprocessing
import threading
import time

import pytest

from offload_decode.common.rows import threads


def test_every_task_is_done_once_and_the_last_on_the_calling_thread() -> None:
    done: dict[int, int] = {}
    threads.run(lambda task: done.update({task: threading.get_ident()}), range(7))
    assert sorted(done) == list(range(7))
    assert done[6] == threading.get_ident()


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_is_raised_when_no_task_runs_any_more(failing: int) -> None:
    ended = threading.Event()

    def work(task: int) -> None:
        if task == failing:
            raise ValueError("no")
        time.sleep(0.2)
        ended.set()

    with pytest.raises(ValueError, match="no"):
        threads.run(work, range(2))
    assert ended.is_set()


def test_a_forked_child_has_threads_of_its_own() -> None:
    threads.run(lambda _: None, range(3))
    child = multiprocessing.get_context("fork").Process(target=threads.run, args=(int, range(3)))
    child.start()
    child.join(20)
    assert child.exitcode == 0


@pytest.mark.parametrize(
    ("told", "cores"),
    [("200000 100000", 2), ("150000 100000", 2), ("5000 100000", 1), ("max 100000", None), ("1 0", None)],
)
def test_a_containers_quota_bounds_the_threads(told, cores, tmp_path):
    (tmp_path / "cpu.max").write_text(told)
    assert threads.quota(tmp_path / "cpu.max") == cores
    assert threads.quota(tmp_path / "nothing") is None
