"""Building blocks of compiled loops: the processor's instructions, floats from bits, an exponential."""

import platform
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import extending, njit, types
from numba.core import cgutils, config
from numba.core.codegen import get_host_cpu_features

from offload_decode.common.rows.encodings import SCALE_BYTES


def features() -> frozenset[str]:
    """What numba compiles for, by LLVM's names: this processor's own instructions, or those alone that
    NUMBA_CPU_FEATURES names (none with NUMBA_CPU_NAME=generic). LLVM ends the process for any other.
    """
    named = getattr(config, "CPU_FEATURES", None)
    listed: str = get_host_cpu_features() if named is None else named  # type: ignore[no-untyped-call]
    return frozenset(name[1:] for name in listed.split(",") if name.startswith("+"))


# Numba types what it makes of a function as called with the compiler's arguments, not with the caller's.
intrinsic: Callable[..., Any] = extending.intrinsic


@intrinsic
def at(_: Any, address: Any) -> Any:
    """What `numba.carray` makes an array of: `at(address)`."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return builder.inttoptr(given[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


def _reader(kind: Any, of: Any) -> Any:
    def read(_: Any, memory: Any, place: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            array = context.make_array(signature.args[0])(context, builder, given[0])
            start = builder.gep(builder.bitcast(array.data, cgutils.voidptr_t), [given[1]])
            return builder.load(builder.bitcast(start, of.as_pointer()), align=1)

        return kind(memory, types.int64), generate

    return intrinsic(read)


# `word(memory, place)` and `single(memory, place)`: what lies so many bytes into an array of bytes. Numba's
# own view of a row as other numbers takes ten times as long as a short row.
word: Any = _reader(types.uint16, ir.IntType(16))
single: Any = _reader(types.float32, ir.FloatType())

_EXPONENT = np.float32(2.0**112)  # from the exponents of float16 to those of float32


@njit(forceinline=True)
def multiplied(bits: Any) -> Any:
    """float16 bits as float32, exactly: one multiplication moves the exponent, of subnormals too."""
    magnitude = np.uint32((np.uint32(bits) & np.uint32(0x7FFF)) << np.uint32(13))
    wide = np.float32(magnitude.view(np.float32) * _EXPONENT).view(np.uint32)
    if magnitude >= np.uint32(0x0F800000):  # infinity, NaN
        wide = np.uint32(wide | np.uint32(0x7F800000))
    sign = np.uint32((np.uint32(bits) & np.uint32(0x8000)) << np.uint32(16))
    return np.uint32(wide | sign).view(np.float32)


@intrinsic
def converted(_: Any, bits: Any) -> Any:
    """As `multiplied`, by the processor's conversion instruction."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), generate


def converts() -> bool:
    """Whether the processor has the instruction; without it LLVM calls a library that may be missing."""
    on_x86 = platform.machine() in ("x86_64", "AMD64")
    return not on_x86 or "f16c" in features()


half_to_single: Any = converted if converts() else multiplied


@njit(nogil=True, cache=True, forceinline=True)
def scale_of(row: Any) -> Any:
    """The float32 scale of an encoded row, given as its bytes."""
    word = np.uint32(0)
    for place in range(SCALE_BYTES):
        word |= np.uint32(np.uint32(row[place]) << np.uint32(8 * place))
    return np.uint32(word).view(np.float32)


_LEAST = np.float32(-87.0)  # below it the result is 0
_TO_TWO = np.float32(1.44269504)  # log2(e)
_LN2, _LN2_REST = np.float32(0.693359375), np.float32(-2.12194440e-4)  # in two parts, the first of few bits


@njit(nogil=True, cache=True, forceinline=True, fastmath={"contract"})
def exponential(x: Any) -> Any:
    """e to the x <= 0, to two units in the last place (the polynomial of Cephes' expf); NaN stays NaN."""
    whole = np.floor(x * _TO_TWO + np.float32(0.5))
    part = x - whole * _LN2 - whole * _LN2_REST
    series = np.float32(1.9875691500e-4)
    for term in _SERIES:
        series = series * part + term
    power = series * part * part + part + np.float32(1)
    scale = np.int32((whole + np.float32(127)) * np.float32(1 << 23)).view(np.float32)
    return np.float32(0) if x < _LEAST else np.float32(power * scale)


_SERIES = tuple(
    np.float32(term)
    for term in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
)
