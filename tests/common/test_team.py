"""Fork and join for compiled loops: every task once, whoever calls, and nothing lost."""

import multiprocessing
import threading
import time

import numpy as np
import pytest
from llvmlite import ir
from numba import carray, cfunc, njit, types
from numba.extending import intrinsic

from offload_decode.common.rows import team
from offload_decode.common.rows.compiled import at
from offload_decode.common.rows.team import cells, closure, fork
from offload_decode.common.rows.threads import THREADS


@njit(nogil=True)
def count(task, counts, by):
    counts[task] += by


@njit(nogil=True)
def counted(cells, counts, by):
    body, data = closure(count, (counts, by))
    fork(cells, body, data, len(counts))


@njit(nogil=True)
def wait(task, running, most, held):
    """Notes how many run at once, for a while."""
    team._add(running, 0, 1)
    for _ in range(held):
        most[task] = max(most[task], team._load(running, 0))
    team._add(running, 0, -1)


@njit(nogil=True)
def waited(cells, running, most, held):
    body, data = closure(wait, (running, most, held))
    fork(cells, body, data, len(most))


@njit(nogil=True)
def fail(task, failing):
    if task == failing:
        raise ValueError("no")


@njit(nogil=True)
def failed(cells, failing, tasks):
    body, data = closure(fail, (failing,))
    fork(cells, body, data, tasks)


@intrinsic
def owner(_, array):
    """The address of what counts an array's references, 0 of none."""

    def generate(context, builder, signature, given):
        held = context.make_array(signature.args[0])(context, builder, given[0])
        return builder.ptrtoint(held.meminfo, ir.IntType(64))

    return types.int64(array), generate


@njit(nogil=True)
def look(task, found, pair):
    inner, _ = pair
    found[task], inner[task] = owner(inner[task:]), task


@njit(nogil=True)
def looked(cells, found, inner):
    body, data = closure(look, (found, (inner, 1)))
    fork(cells, body, data, len(found))
    return owner(inner)


def test_tasks_count_no_references_to_what_they_share():
    """A count would be a cache line that all of them write to, for every view they take."""
    found, inner = np.full(8, -1), np.zeros(8, np.int64)
    assert looked(cells(), found, inner) != 0
    assert found.tolist() == [0] * 8
    assert inner.tolist() == list(range(8))


@pytest.mark.parametrize("tasks", [0, 1, 2, 3, 1000])
def test_every_task_is_done_once(tasks):
    for pause in (0.0, 0.01):  # while the threads look for work, and when they sleep
        time.sleep(pause)
        counts = np.zeros(tasks, np.int64)
        for _ in range(50):
            counted(cells(), counts, 2)
        assert (counts == 100).all()


@pytest.mark.skipif(THREADS < 2, reason="one core")
def test_tasks_run_at_once():
    most = np.zeros(64, np.int64)
    waited(cells(), np.zeros(1, np.int64), most, 1_000_000)
    assert 2 <= most.max() <= THREADS


def test_callers_from_many_threads_do_not_mix_their_tasks():
    ours, rounds = [np.zeros(7, np.int64) for _ in range(2 * team.SLOTS)], 300
    counted(cells(), ours[0], 0)  # compiled

    def call(counts):
        for _ in range(rounds):
            counted(cells(), counts, 1)

    callers = [threading.Thread(target=call, args=(counts,)) for counts in ours]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert all((counts == rounds).all() for counts in ours)


@pytest.mark.parametrize("failing", [0, 6])
def test_a_failure_is_raised_and_the_next_call_works(failing):
    for tasks in (7, 1 + failing):
        with pytest.raises(RuntimeError, match="memory"):
            failed(cells(), failing, tasks)
    failed(cells(), -1, 7)


def test_without_threads_the_caller_does_everything():
    counts = np.zeros(5, np.int64)
    counted(np.zeros(0, np.int64), counts, 1)
    assert counts.tolist() == [1] * 5


def test_a_function_by_its_address():
    @cfunc("int64(int64, int64)")
    def double(data, task):
        carray(at(data), 9, np.int64)[task] *= 2
        return 0

    numbers = np.arange(9)
    fork(cells(), double.address, numbers.ctypes.data, 9)
    assert numbers.tolist() == list(range(0, 18, 2))


def _forked():
    counts = np.zeros(9, np.int64)
    counted(cells(), counts, 1)
    assert (counts == 1).all()


def test_a_forked_child_has_threads_of_its_own():
    _forked()
    child = multiprocessing.get_context("fork").Process(target=_forked)
    child.start()
    child.join(30)
    assert child.exitcode == 0
