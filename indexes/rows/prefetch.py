"""Asking for memory before it is needed, for loops that read rows at random."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_LINE = 64  # bytes of a cache line
_POINTER = ir.IntType(8).as_pointer()


def prefetch(builder: Any, place: Any) -> None:
    """Emits the fetching of one line, to be read, into every cache."""
    word = ir.IntType(32)
    function = builder.module.declare_intrinsic(
        "llvm.prefetch", [_POINTER], ir.FunctionType(ir.VoidType(), [_POINTER, word, word, word])
    )
    builder.call(function, [place, *(ir.Constant(word, value) for value in (0, 3, 1))])


def _prefetch_row(_: Any, rows: Any, row: Any) -> Any:
    signature = types.void(rows, types.int64)

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, given[0])
        stride = builder.extract_value(array.strides, 0)
        start = builder.gep(builder.bitcast(array.data, _POINTER), [builder.mul(given[1], stride)])
        line = ir.Constant(stride.type, _LINE)
        lines = builder.udiv(builder.add(stride, ir.Constant(stride.type, _LINE - 1)), line)
        with cgutils.for_range(builder, lines) as loop:
            place = builder.gep(start, [builder.mul(loop.index, line)])
            prefetch(builder, place)
        return context.get_dummy_value()

    return signature, generate


# Called from compiled code: `prefetch_row(rows, row)` fetches `rows[row]` of a contiguous 2-D array into the
# cache; a row that does not exist does no harm.
prefetch_row: Any = intrinsic(_prefetch_row)
