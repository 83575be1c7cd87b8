"""Fork and join for compiled loops that last microseconds: threads that look for work before they sleep.

Waking a thread takes longer (some 50 us) than a layer's product with one row of activations. So the threads
here stay in compiled code, and look for work for a while after the last; they give way to any other thread
meanwhile. Tasks are taken one by one from a counter, and hold neither Python's lock nor any other.

A compiled function `lead` that is called from Python shares its work out like this, where `part(task, a, b)`
is compiled too, and `cells` are those of `cells()`:

    body, data = closure(part, (a, b))
    fork(cells, body, data, tasks)

`body` may also be the address of a `numba.cfunc`, int64 of `data` and the task, that returns 0.
"""

import atexit
import os
import sys
import threading
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils

from offload_decode.common.rows.compiled import at, intrinsic
from offload_decode.common.rows.threads import THREADS

SLOTS = 4
"""Callers whose work is shared out at once; any other does all of its own."""
_PATIENCE = 200_000  # ns that a thread looks for work: longer than a model's own operations in between
_LINE = 8  # cells of a cache line, so that threads write to lines of their own
_STOP, _ASLEEP, _MUTEX, _WOKEN = 0, _LINE, 2 * _LINE, 4 * _LINE  # the two of pthreads take up to 64 bytes
_FIRST, _SIZE = 6 * _LINE, 5 * _LINE
_TAKEN, _OPEN, _NEXT, _ACTIVE, _WORK = range(0, _SIZE, _LINE)  # of a slot
_COUNT, _BODY, _DATA, _FAILED = range(_WORK, _WORK + 4)
_MONOTONIC = 6 if sys.platform == "darwin" else 1

_types: Any = types
_pointers = (_types.voidptr,) * 2


def _libc(name: str, *given: Any) -> Any:
    return _types.ExternalFunction(name, _types.int32(*given))


_lock = _libc("pthread_mutex_lock", _types.voidptr)
_unlock = _libc("pthread_mutex_unlock", _types.voidptr)
_prepare_mutex = _libc("pthread_mutex_init", *_pointers)
_prepare_condition = _libc("pthread_cond_init", *_pointers)
_wait = _libc("pthread_cond_wait", *_pointers)
_wake = _libc("pthread_cond_signal", _types.voidptr)
_give_way = _libc("sched_yield")
_clock = _libc("clock_gettime", _types.int32, _types.voidptr)


def _cell(context: Any, builder: Any, kind: Any, cells: Any, place: Any) -> Any:
    return builder.gep(context.make_array(kind)(context, builder, cells).data, [place])


@intrinsic
def _load(_: Any, cells: Any, place: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return builder.load_atomic(_cell(context, builder, signature.args[0], *given), "seq_cst", 8)

    return _types.int64(cells, _types.int64), generate


@intrinsic
def _store(_: Any, cells: Any, place: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        own = _cell(context, builder, signature.args[0], *given[:2])
        builder.store_atomic(given[2], own, "seq_cst", 8)
        return context.get_dummy_value()

    return _types.void(cells, _types.int64, _types.int64), generate


@intrinsic
def _add(_: Any, cells: Any, place: Any, value: Any) -> Any:
    """Adds to a cell, and returns what it held before."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        own = _cell(context, builder, signature.args[0], *given[:2])
        return builder.atomic_rmw("add", own, given[2], "seq_cst")

    return _types.int64(cells, _types.int64, _types.int64), generate


@intrinsic
def _at(_: Any, cells: Any, place: Any) -> Any:
    """The address of a cell."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return builder.bitcast(_cell(context, builder, signature.args[0], *given), cgutils.voidptr_t)

    return _types.voidptr(cells, _types.int64), generate


_LONG = ir.IntType(64)
_TASK = ir.FunctionType(_LONG, [_LONG, _LONG])


def _uncounted(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    """The value, with arrays that count no references: tasks that take views of an array would else write to
    one count, whose cache line then wanders between their cores at every row.
    """
    if isinstance(kind, _types.BaseTuple):
        items = zip(kind, cgutils.unpack_tuple(builder, value), strict=True)
        return context.make_tuple(builder, kind, [_uncounted(context, builder, *item) for item in items])
    if isinstance(kind, _types.Array):
        array = context.make_array(kind)(context, builder, value)
        array.meminfo = cgutils.get_null_value(array.meminfo.type)
        array.parent = cgutils.get_null_value(array.parent.type)
        return array._getvalue()
    return value


@intrinsic
def closure(typing: Any, body: Any, given: Any) -> Any:
    """The addresses of a function that calls the compiled `body(task, *given)`, and of `given`, a tuple: they
    live as long as the compiled function in which this stands runs. It must hold on to the arrays in there.
    """
    called = body.get_call_type(typing, (_types.int64, *given), {})
    compiled = body.dispatcher.overloads[called.args]

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        context.active_code_library.add_linking_library(compiled.library)
        held = cgutils.alloca_once_value(builder, _uncounted(context, builder, given, values[1]))
        name = f"task.{compiled.fndesc.mangled_name}"
        function = builder.module.globals.get(name) or ir.Function(builder.module, _TASK, name)
        if not function.blocks:
            function.linkage = "internal"
            inner = ir.IRBuilder(function.append_basic_block())
            data, task = function.args
            items = cgutils.unpack_tuple(inner, inner.load(inner.inttoptr(data, held.type)))
            native = context.declare_function(builder.module, compiled.fndesc)
            status, _ = context.call_conv.call_function(
                inner, native, called.return_type, called.args, [task, *items]
            )
            inner.ret(inner.zext(status.is_error, _LONG))
        addresses = [builder.ptrtoint(own, _LONG) for own in (function, held)]
        return context.make_tuple(builder, signature.return_type, addresses)

    return _types.UniTuple(_types.int64, 2)(body, given), generate


@intrinsic
def _failed(_: Any, body: Any, data: Any, task: Any) -> Any:
    """Does a task; 1 where it raised, else 0."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return builder.call(builder.inttoptr(given[0], _TASK.as_pointer()), given[1:])

    return _types.int64(*(_types.int64,) * 3), generate


@njit(nogil=True, cache=True)
def fork(cells: Any, body: Any, data: Any, count: Any) -> None:
    """Does tasks 0 to `count`, here and on the threads of `cells()`; returns when all are done.

    Raises RuntimeError if a task raised, which loops do only where memory runs out.
    """
    slot = _free_slot(cells) if count > 1 and len(cells) else -1
    failed = 0
    if slot < 0:
        for task in range(count):
            failed += _failed(body, data, task)
    else:
        cells[slot + _COUNT], cells[slot + _BODY], cells[slot + _DATA] = count, body, data
        cells[slot + _FAILED] = 0
        _store(cells, slot + _NEXT, 0)
        _store(cells, slot + _OPEN, 1)
        _rouse(cells, min(_load(cells, _ASLEEP), count - 1))
        _work(cells, slot)
        _store(cells, slot + _OPEN, 0)
        # Who is active from here on saw it open: what `given` points to must outlive that.
        looked = 0
        while _load(cells, slot + _ACTIVE):
            looked += 1
            if looked > 1000:  # the system may have taken a core away
                _give_way()
        failed = _load(cells, slot + _FAILED)
        _store(cells, slot + _TAKEN, 0)
    if failed:
        raise RuntimeError("a compiled loop ran out of memory")


@njit(nogil=True, cache=True)
def _rouse(cells: Any, threads: Any) -> None:
    if threads:
        _lock(_at(cells, _MUTEX))
        for _ in range(threads):
            _wake(_at(cells, _WOKEN))
        _unlock(_at(cells, _MUTEX))


@njit(nogil=True, cache=True)
def _free_slot(cells: Any) -> Any:
    for slot in range(_FIRST, _FIRST + SLOTS * _SIZE, _SIZE):
        if _load(cells, slot + _TAKEN) == 0:
            if _add(cells, slot + _TAKEN, 1) == 0:
                return slot
            _add(cells, slot + _TAKEN, -1)
    return -1


@njit(nogil=True, cache=True)
def _work(cells: Any, slot: Any) -> None:
    count, body, data = cells[slot + _COUNT], cells[slot + _BODY], cells[slot + _DATA]
    while True:
        task = _add(cells, slot + _NEXT, 1)
        if task >= count:
            return
        if _failed(body, data, task):
            _add(cells, slot + _FAILED, 1)


@njit(nogil=True, cache=True)
def _left(cells: Any, slot: Any) -> Any:
    return _load(cells, slot + _OPEN) == 1 and _load(cells, slot + _NEXT) < _load(cells, slot + _COUNT)


@njit(nogil=True, cache=True)
def _nothing(cells: Any) -> Any:
    for slot in range(_FIRST, _FIRST + SLOTS * _SIZE, _SIZE):
        if _left(cells, slot):
            return False
    return _load(cells, _STOP) == 0


@njit(nogil=True, cache=True)
def _serve(cells: Any) -> None:
    """What a thread does until it is told to stop."""
    time = np.zeros(2, np.int64)
    since = now(time)
    while _load(cells, _STOP) == 0:
        worked = False
        for slot in range(_FIRST, _FIRST + SLOTS * _SIZE, _SIZE):
            if _left(cells, slot):
                _add(cells, slot + _ACTIVE, 1)
                if _load(cells, slot + _OPEN) == 1:
                    _work(cells, slot)
                    worked = True
                _add(cells, slot + _ACTIVE, -1)
        if worked:
            since = now(time)
        elif now(time) - since < _PATIENCE:
            _give_way()
        else:
            _lock(_at(cells, _MUTEX))
            _add(cells, _ASLEEP, 1)
            while _nothing(cells):
                _wait(_at(cells, _WOKEN), _at(cells, _MUTEX))
            _add(cells, _ASLEEP, -1)
            _unlock(_at(cells, _MUTEX))
            since = now(time)


@njit(nogil=True, cache=True)
def now(time: Any) -> Any:
    """Nanoseconds of a steady clock; `time` is int64 `[2]`, to write to."""
    _clock(_MONOTONIC, time.ctypes)
    return time[0] * 1_000_000_000 + time[1]


@njit(nogil=True, cache=True)
def _prepare(cells: Any) -> None:
    _prepare_mutex(_at(cells, _MUTEX), at(0))
    _prepare_condition(_at(cells, _WOKEN), at(0))


@njit(nogil=True, cache=True)
def _stop(cells: Any) -> None:
    _store(cells, _STOP, 1)
    _rouse(cells, _load(cells, _ASLEEP))


@cache
def cells() -> npt.NDArray[np.int64]:
    """What `fork` shares with its threads, started at first use; one core has none, and needs none."""
    size = _FIRST + SLOTS * _SIZE
    own = np.zeros(size + _LINE, np.int64)
    start = -own.ctypes.data // own.itemsize % _LINE  # at the start of a cache line
    own = own[start : start + size]
    _prepare(own)
    _serve.compile("void(int64[::1])")  # here: a thread would wait for Python's lock
    others = [threading.Thread(target=_serve, args=(own,), daemon=True) for _ in range(THREADS - 1)]
    for other in others:
        other.start()

    here = os.getpid()

    def end() -> None:
        if os.getpid() == here:  # a forked child has none of these threads
            _stop(own)
            for other in others:
                other.join(1.0)

    atexit.register(end)
    return own


# Threads do not survive a fork: the child starts its own.
os.register_at_fork(after_in_child=cells.cache_clear)
