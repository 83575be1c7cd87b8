"""Compiled loops over one stored row, given by `scan.bits` and `scan.layout`: callers check its number."""

from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils

from offload_decode.common.rows.compiled import half_to_single, intrinsic, scale_of, single, word
from offload_decode.common.rows.encodings import SCALE_BYTES
from offload_decode.common.rows.scan import BF16, FP16, INT4, INT8

# A loop for each layout in a function of its own, and only the choice among them inlined: arrays that a loop
# within a branch reads are counted and uncounted each time, which takes eight times as long as a short row.
_compiled = partial(njit, nogil=True, cache=True)
_REASSOCIATE = {"reassoc", "contract", "nsz"}  # a sum may be vectorised; NaN and infinity keep their meaning


@_compiled(forceinline=True)
def dot_row(query: Any, bits: Any, layout: int, row: int) -> Any:
    """Inner product of `query [D]` float32 with one row, accumulated in float32."""
    if layout == FP16:
        return _dot_fp16(query, bits, row)
    if layout == BF16:
        return _dot_bf16(query, bits, row)
    if layout == INT8:
        return _dot_int8(query, bits, row)
    if layout == INT4:
        return _dot_int4(query, bits, row)
    return _dot_fp32(query, bits, row)


@_compiled(forceinline=True)
def add_row(out: Any, weight: Any, bits: Any, layout: int, row: int) -> None:
    """Adds `weight` times one row to `out [D]` float32."""
    if layout == FP16:
        _add_fp16(out, weight, bits, row)
    elif layout == BF16:
        _add_bf16(out, weight, bits, row)
    elif layout == INT8:
        _add_int8(out, weight, bits, row)
    elif layout == INT4:
        _add_int4(out, weight, bits, row)
    else:
        _add_fp32(out, weight, bits, row)


@_compiled(fastmath=_REASSOCIATE)
def _dot_fp16(query: Any, bits: Any, row: int) -> Any:
    start, total = row * bits.shape[1], np.float32(0)
    for d in range(len(query)):
        total += query[d] * half_to_single(word(bits, start + 2 * d))
    return total


@_compiled(fastmath=_REASSOCIATE)
def _dot_bf16(query: Any, bits: Any, row: int) -> Any:
    start, total = row * bits.shape[1], np.float32(0)
    for d in range(len(query)):
        total += query[d] * np.uint32(np.uint32(word(bits, start + 2 * d)) << np.uint32(16)).view(np.float32)
    return total


@_compiled(fastmath=_REASSOCIATE)
def _dot_int8(query: Any, bits: Any, row: int) -> Any:
    total = np.float32(0)
    for d in range(len(query)):
        total += query[d] * np.float32(np.int8(bits[row, SCALE_BYTES + d]))
    return total * scale_of(bits[row])


@_compiled(fastmath=_REASSOCIATE)
def _dot_int4(query: Any, bits: Any, row: int) -> Any:
    total = np.float32(0)
    for d in range(len(query) // 2):
        pair = np.int32(bits[row, SCALE_BYTES + d])
        total += query[2 * d] * np.float32((pair & 15) - 8)
        total += query[2 * d + 1] * np.float32((pair >> 4) - 8)
    return total * scale_of(bits[row])


@_compiled(fastmath=_REASSOCIATE)
def _dot_fp32(query: Any, bits: Any, row: int) -> Any:
    start, total = row * bits.shape[1], np.float32(0)
    for d in range(len(query)):
        total += query[d] * single(bits, start + 4 * d)
    return total


@_compiled(fastmath={"contract"})
def _add_fp16(out: Any, weight: Any, bits: Any, row: int) -> None:
    start = row * bits.shape[1]
    for d in range(len(out)):
        out[d] += weight * half_to_single(word(bits, start + 2 * d))


@_compiled(fastmath={"contract"})
def _add_bf16(out: Any, weight: Any, bits: Any, row: int) -> None:
    start = row * bits.shape[1]
    for d in range(len(out)):
        out[d] += weight * np.uint32(np.uint32(word(bits, start + 2 * d)) << np.uint32(16)).view(np.float32)


@_compiled(fastmath={"contract"})
def _add_int8(out: Any, weight: Any, bits: Any, row: int) -> None:
    scaled = np.float32(weight * scale_of(bits[row]))
    for d in range(len(out)):
        out[d] += scaled * np.float32(np.int8(bits[row, SCALE_BYTES + d]))


@_compiled(fastmath={"contract"})
def _add_int4(out: Any, weight: Any, bits: Any, row: int) -> None:
    scaled = np.float32(weight * scale_of(bits[row]))
    for d in range(len(out) // 2):
        pair = np.int32(bits[row, SCALE_BYTES + d])
        out[2 * d] += scaled * np.float32((pair & 15) - 8)
        out[2 * d + 1] += scaled * np.float32((pair >> 4) - 8)


@_compiled(fastmath={"contract"})
def _add_fp32(out: Any, weight: Any, bits: Any, row: int) -> None:
    start = row * bits.shape[1]
    for d in range(len(out)):
        out[d] += weight * single(bits, start + 4 * d)


_LINE = 64  # bytes of a cache line
_POINTER = ir.IntType(8).as_pointer()


def prefetch(builder: Any, place: Any) -> None:
    """Emits a prefetch of one line for reading, into every cache."""
    word = ir.IntType(32)
    function = builder.module.declare_intrinsic(
        "llvm.prefetch", [_POINTER], ir.FunctionType(ir.VoidType(), [_POINTER, word, word, word])
    )
    builder.call(function, [place, *(ir.Constant(word, value) for value in (0, 3, 1))])


@intrinsic
def prefetch_row(_: Any, rows: Any, row: Any) -> Any:
    """Called from compiled code: `prefetch_row(rows, row)` fetches `rows[row]` of a contiguous 2-D array into
    the cache; a row that does not exist does no harm.
    """
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
