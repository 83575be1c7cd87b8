"""Compiled loops over one stored row, read where it lies: an inner product, a weighted sum.

A row is what `indexes.rows.scan.bits` and `layout` make of it. Callers bound the row numbers: nothing here
does.
"""

from __future__ import annotations

import platform
from typing import Any

import numpy as np
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import njit, types
from numba.extending import intrinsic

from indexes.rows import encodings
from indexes.rows.scan import BRAIN, BYTES, HALF, NIBBLES

_SCALE_BYTES = encodings.SCALE_BYTES
_REASSOCIATE = {"reassoc", "contract", "nsz"}  # a sum may be vectorised; NaN and infinity keep their meaning
_EXPONENT = np.float32(2.0**112)  # between the exponents of half and single precision


@njit(forceinline=True)
def multiplied(bits: Any) -> Any:
    """A half's bits as float32, exactly: one multiplication moves the exponent, of subnormals too."""
    magnitude = np.uint32((np.uint32(bits) & np.uint32(0x7FFF)) << np.uint32(13))
    wide = np.float32(magnitude.view(np.float32) * _EXPONENT).view(np.uint32)
    if magnitude >= np.uint32(0x0F800000):  # infinity, NaN
        wide = np.uint32(wide | np.uint32(0x7F800000))
    sign = np.uint32((np.uint32(bits) & np.uint32(0x8000)) << np.uint32(16))
    return np.uint32(wide | sign).view(np.float32)


def _convert(_: Any, bits: Any) -> Any:
    """As `multiplied`, by the processor's own instruction."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), generate


converted: Any = intrinsic(_convert)


def _converts() -> bool:
    """Whether this machine has the instruction: LLVM would call a library for it that may not be there."""
    on_x86 = platform.machine() in ("x86_64", "AMD64")
    return not on_x86 or bool(get_host_cpu_features().get("f16c"))


half_to_single: Any = converted if _converts() else multiplied


@njit(nogil=True, cache=True, forceinline=True, fastmath=_REASSOCIATE)
def dot_row(query: Any, bits: Any, layout: int, row: int) -> Any:
    """Inner product of `query [D]` float32 with one row, accumulated in float32."""
    total = np.float32(0)
    if layout == HALF:
        for d in range(len(query)):
            total += query[d] * half_to_single(np.uint16(bits[row, d]))
    elif layout == BRAIN:
        for d in range(len(query)):
            total += query[d] * np.uint32(np.uint32(bits[row, d]) << np.uint32(16)).view(np.float32)
    elif layout == BYTES:
        for d in range(len(query)):
            total += query[d] * np.float32(np.int8(bits[row, _SCALE_BYTES + d]))
        total *= scale_of(bits, row)
    elif layout == NIBBLES:
        for d in range(len(query) // 2):
            pair = np.int32(bits[row, _SCALE_BYTES + d])
            total += query[2 * d] * np.float32((pair & 15) - 8)
            total += query[2 * d + 1] * np.float32((pair >> 4) - 8)
        total *= scale_of(bits, row)
    else:
        for d in range(len(query)):
            total += query[d] * np.uint32(bits[row, d]).view(np.float32)
    return total


@njit(nogil=True, cache=True, forceinline=True, fastmath={"contract"})
def add_row(out: Any, weight: Any, bits: Any, layout: int, row: int) -> None:
    """Adds `weight` times one row to `out [D]` float32."""
    if layout == HALF:
        for d in range(len(out)):
            out[d] += weight * half_to_single(np.uint16(bits[row, d]))
    elif layout == BRAIN:
        for d in range(len(out)):
            out[d] += weight * np.uint32(np.uint32(bits[row, d]) << np.uint32(16)).view(np.float32)
    elif layout == BYTES:
        scaled = np.float32(weight * scale_of(bits, row))
        for d in range(len(out)):
            out[d] += scaled * np.float32(np.int8(bits[row, _SCALE_BYTES + d]))
    elif layout == NIBBLES:
        scaled = np.float32(weight * scale_of(bits, row))
        for d in range(len(out) // 2):
            pair = np.int32(bits[row, _SCALE_BYTES + d])
            out[2 * d] += scaled * np.float32((pair & 15) - 8)
            out[2 * d + 1] += scaled * np.float32((pair >> 4) - 8)
    else:
        for d in range(len(out)):
            out[d] += weight * np.uint32(bits[row, d]).view(np.float32)


@njit(nogil=True, cache=True)
def scale_of(bits: Any, row: int) -> Any:
    """The float32 scale of an encoded row."""
    word = np.uint32(0)
    for place in range(_SCALE_BYTES):
        word |= np.uint32(np.uint32(bits[row, place]) << np.uint32(8 * place))
    return np.uint32(word).view(np.float32)
