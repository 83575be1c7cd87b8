"""Weights in GGUF's quantized blocks: how codes, scales and minima lie in each format, and unpacking them.

A row of K weights is K / W blocks of W weights. Every format is read here 32 weights at a time, as codes of
one byte, one scale for each 16 or 32 of them, and mostly a minimum for each scale: a weight is scale · code +
minimum. Formats that take a number off their codes have that many scales below 0 as their minimum, which is
the same: a scale of float16, or some integers times it, has so few bits that nothing is rounded.
Layouts: ggml-common.h of https://github.com/ggml-org/ggml, and dequantize_row_* of its ggml-quants.c.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from offload_decode.common.errors import ModelError
from offload_decode.common.rows import threads
from offload_decode.common.rows.compiled import converts
from offload_decode.common.rows.loops import prefetch

Blocks = npt.NDArray[np.uint8]

PART = 32  # weights that are read at once, and share a scale of the activations
LANES = 8  # 32-bit lanes of a vector of 32 bytes: lane i has the codes 4 i to 4 i + 3
LINE = 64  # bytes of a cache line

BYTE, SHORT, INT, LONG = (ir.IntType(bits) for bits in (8, 16, 32, 64))
FLOAT = ir.FloatType()
CODES = ir.VectorType(BYTE, PART)
INTS = ir.VectorType(INT, LANES)
FLOATS = ir.VectorType(FLOAT, LANES)


class Parts(NamedTuple):
    """Emitted values of n parts of 32 weights: for each its codes <32 x i8>; scales, one or two for each,
    <n x float> or <2 n x float>; and as many minima, or None.
    """

    codes: list[Any]
    scales: Any
    minima: Any

    @property
    def each(self) -> int:
        """Scales of a part."""
        return int(self.scales.type.count) // len(self.codes)

    def scale(self, builder: Any, parts: list[int], scales: Any = None) -> Any:
        """Of each four codes of some parts, <8 x float> each: their own scales, or others in order."""
        lanes = [part * self.each + half for part in parts for half in (0, self.each - 1) for _ in range(4)]
        return chosen(builder, self.scales if scales is None else scales, lanes)


@dataclass(frozen=True)
class Format:
    """A block: its weights, bytes and scales, whether its codes are signed, and how blocks are read from
    pointers to them. Blocks of more than one part are read one at a time.
    """

    name: str
    weights: int
    bytes: int
    scales: int
    signed: bool
    read: Callable[[Any, list[Any]], Parts]

    @property
    def parts(self) -> int:
        return self.weights // PART


def at(builder: Any, base: Any, offset: Any, kind: Any) -> Any:
    """A pointer to `kind`, so many bytes (a number or an emitted one) behind a pointer to bytes."""
    offset = ir.Constant(LONG, offset) if isinstance(offset, int) else offset
    return builder.bitcast(builder.gep(base, [offset]), kind.as_pointer())


def load(builder: Any, base: Any, offset: Any, kind: Any) -> Any:
    return builder.load(at(builder, base, offset, kind), align=1)


def same(kind: Any, value: float) -> Any:
    """A vector of one constant."""
    return ir.Constant(kind, [value] * kind.count)


def chosen(builder: Any, vector: Any, lanes: list[int], other: Any = None) -> Any:
    """These lanes of a vector, or of two behind each other."""
    mask = ir.Constant(ir.VectorType(INT, len(lanes)), lanes)
    return builder.shuffle_vector(
        vector, ir.Constant(vector.type, ir.Undefined) if other is None else other, mask
    )


def variable(builder: Any, kind: Any) -> Any:
    """Zeros to add to, in a register; set where it stands, as it may stand in a loop."""
    total = cgutils.alloca_once(builder, kind)
    builder.store(same(kind, 0.0), total)
    return total


def add_product(builder: Any, total: Any, a: Any, b: Any) -> None:
    """Adds a product to a `variable`, in one operation where there is one."""
    product = builder.fmul(a, b, flags=("contract",))
    builder.store(builder.fadd(builder.load(total), product, flags=("contract",)), total)


def called(builder: Any, name: str, kind: Any, *given: Any) -> Any:
    """An instruction by LLVM's name: a value of this kind from others."""
    form = ir.FunctionType(kind, [value.type for value in given])
    return builder.call(builder.module.declare_intrinsic(name, (), form), given)


def _halves(builder: Any, bases: list[Any], offset: int) -> Any:
    """The float16 at each place as float32, exactly."""
    lanes = len(bases)
    halves, floats, ints = (ir.VectorType(of, lanes) for of in (SHORT, FLOAT, INT))
    bits = ir.Constant(halves, ir.Undefined)
    for lane, base in enumerate(bases):
        bits = builder.insert_element(bits, load(builder, base, offset, SHORT), ir.Constant(INT, lane))
    if converts():
        return builder.fpext(builder.bitcast(bits, ir.VectorType(ir.HalfType(), lanes)), floats)
    # As `compiled.multiplied`: one multiplication moves the exponent, of subnormals too.
    wide = builder.zext(bits, ints)
    magnitude = builder.shl(builder.and_(wide, same(ints, 0x7FFF)), same(ints, 13))
    moved = builder.bitcast(builder.fmul(builder.bitcast(magnitude, floats), same(floats, 2.0**112)), ints)
    endless = builder.icmp_unsigned(">=", magnitude, same(ints, 0x0F800000))
    moved = builder.or_(moved, builder.select(endless, same(ints, 0x7F800000), same(ints, 0)))
    sign = builder.shl(builder.and_(wide, same(ints, 0x8000)), same(ints, 16))
    return builder.bitcast(builder.or_(moved, sign), floats)


def _nibbles(builder: Any, base: Any, offset: int) -> Any:
    """32 codes from 16 bytes: all low halves, then all high ones."""
    pairs = load(builder, base, offset, ir.VectorType(BYTE, 16))
    low = builder.and_(pairs, same(pairs.type, 15))
    return chosen(builder, low, list(range(PART)), builder.lshr(pairs, same(pairs.type, 4)))


def _fifth(builder: Any, base: Any, offset: int) -> Any:
    """16 or 0 for each of 32 codes, from the bits of an integer."""
    bits = builder.bitcast(load(builder, base, offset, INT), ir.VectorType(ir.IntType(1), PART))
    return builder.select(bits, same(CODES, 16), same(CODES, 0))


def _moved(builder: Any, codes: Any, left: int, mask: int) -> Any:
    """The bits of every byte moved to the left, or to the right by a negative number, and masked. They move
    in wider lanes, as x86 has no shift of bytes; what comes from a neighbour is masked.
    """
    wide = builder.bitcast(codes, INTS)
    by = same(INTS, abs(left))
    wide = builder.shl(wide, by) if left > 0 else builder.lshr(wide, by) if left < 0 else wide
    return builder.and_(builder.bitcast(wide, CODES), same(CODES, mask))


def _small(fifth: bool, minimum: bool) -> Callable[[Any, list[Any]], Parts]:
    """Q4_0, Q4_1, Q5_0, Q5_1: a scale, a minimum, the fifth bits, 16 bytes of low and high halves."""

    def read(builder: Any, bases: list[Any]) -> Parts:
        high, parts = 4 if minimum else 2, []
        for base in bases:
            codes = _nibbles(builder, base, high + (4 if fifth else 0))
            if fifth:
                codes = builder.or_(codes, _fifth(builder, base, high))
            parts.append(codes)
        scales = _halves(builder, bases, 0)
        if minimum:
            return Parts(parts, scales, _halves(builder, bases, 2))
        return Parts(parts, scales, builder.fmul(scales, same(scales.type, -16 if fifth else -8)))

    return read


def _eight(builder: Any, bases: list[Any]) -> Parts:
    """Q8_0: a scale and signed bytes."""
    return Parts([load(builder, base, 2, CODES) for base in bases], _halves(builder, bases, 0), None)


def _six_bits(builder: Any, base: Any, offset: int) -> tuple[Any, Any]:
    """Eight scales and eight minima <8 x float> of six bits each, from twelve bytes: the first four bytes
    hold scales and the next four minima in their low six bits; above these lie the high two bits of four more
    of each, whose low bits are the halves of the last four bytes.
    """
    number = partial(ir.Constant, INT)
    scales, minima, lows = (load(builder, base, offset + 4 * word, INT) for word in range(3))

    def eight(first: Any, lows: Any) -> Any:
        highs = builder.and_(builder.lshr(first, number(2)), number(0x30303030))
        later = builder.or_(builder.and_(lows, number(0x0F0F0F0F)), highs)
        words = ir.Constant(ir.VectorType(INT, 2), ir.Undefined)
        words = builder.insert_element(words, builder.and_(first, number(0x3F3F3F3F)), number(0))
        words = builder.insert_element(words, later, number(1))
        return builder.uitofp(builder.bitcast(words, ir.VectorType(BYTE, LANES)), FLOATS)

    return eight(scales, lows), eight(minima, builder.lshr(lows, number(4)))


def _large(fifth: bool) -> Callable[[Any, list[Any]], Parts]:
    """Q4_K, Q5_K: a scale of scales, one of minima, both in six bits a part, fifth bits, halves of bytes. 32
    bytes have a part in their low halves and the next in the high ones; bit j of 32 others is of part j.
    """

    def read(builder: Any, bases: list[Any]) -> Parts:
        (base,) = bases
        scales, minima = (
            builder.fmul(six, chosen(builder, _halves(builder, bases, place), [0] * LANES))
            for six, place in zip(_six_bits(builder, base, 4), (0, 2), strict=True)
        )
        bits = load(builder, base, 16, CODES) if fifth else None
        parts = []
        for part in range(8):
            pairs = load(builder, base, (48 if fifth else 16) + PART * (part // 2), CODES)
            codes = _moved(builder, pairs, -4 * (part % 2), 0x0F)
            if fifth:
                codes = builder.or_(codes, _moved(builder, bits, 4 - part, 0x10))
            parts.append(codes)
        return Parts(parts, scales, builder.fneg(minima))

    return read


def _six(builder: Any, bases: list[Any]) -> Parts:
    """Q6_K: 128 bytes of low halves, 64 of high bits, sixteen signed scales, and the scale of these."""
    (base,) = bases
    whole = builder.sitofp(load(builder, base, 192, ir.VectorType(BYTE, 16)), ir.VectorType(FLOAT, 16))
    scales = builder.fmul(whole, chosen(builder, _halves(builder, bases, 208), [0] * 16))
    parts = []
    for part in range(8):
        half, quarter = divmod(part, 4)
        lows = load(builder, base, 64 * half + PART * (quarter % 2), CODES)
        bits = load(builder, base, 128 + PART * half, CODES)
        low = _moved(builder, lows, -4 * (quarter // 2), 0x0F)
        codes = builder.or_(low, _moved(builder, bits, 4 - 2 * quarter, 0x30))
        parts.append(codes)
    return Parts(parts, scales, builder.fmul(scales, same(scales.type, -32)))


FORMATS = {
    2: Format("Q4_0", 32, 18, 1, False, _small(fifth=False, minimum=False)),
    3: Format("Q4_1", 32, 20, 1, False, _small(fifth=False, minimum=True)),
    6: Format("Q5_0", 32, 22, 1, False, _small(fifth=True, minimum=False)),
    7: Format("Q5_1", 32, 24, 1, False, _small(fifth=True, minimum=True)),
    8: Format("Q8_0", 32, 34, 1, True, _eight),
    12: Format("Q4_K", 256, 144, 8, False, _large(fifth=False)),
    13: Format("Q5_K", 256, 176, 8, False, _large(fifth=True)),
    14: Format("Q6_K", 256, 210, 16, False, _six),
}


def checked(blocks: Blocks, kind: int) -> tuple[Format, int]:
    """The format of `blocks`, uint8 `[rows, bytes]`, and the weights K of a row.

    Raises ModelError for a kind that is not known, rows that are no whole number of blocks, and arrays that
    are not contiguous bytes. What the bytes hold is not looked at: any are read without harm.
    """
    if kind not in FORMATS:
        known = ", ".join(f"{form.name} ({number})" for number, form in FORMATS.items())
        raise ModelError(f"Blocks of ggml's type {kind} cannot be read; the known types are {known}.")
    form = FORMATS[kind]
    if not isinstance(blocks, np.ndarray) or blocks.dtype != np.uint8 or blocks.ndim != 2:
        raise ModelError(f"Blocks of {form.name} must be bytes, uint8 of shape [rows, bytes of a row].")
    if not blocks.flags.c_contiguous:
        raise ModelError(f"Rows of {form.name} must lie behind each other in memory.")
    if not blocks.shape[1] or blocks.shape[1] % form.bytes:
        raise ModelError(
            f"A row of {form.name} is made of blocks of {form.bytes} bytes, which {blocks.shape[1]} are not."
        )
    return form, blocks.shape[1] // form.bytes * form.weights


def as_bytes(blocks: Blocks) -> Blocks:
    """All bytes in one row that is not to be written, of numpy's own class: loops are compiled once, for
    mapped files too.
    """
    flat = blocks.reshape(-1).view(np.ndarray)
    flat.flags.writeable = False
    return flat


def pointers(context: Any, builder: Any, signature: Any, given: Any) -> list[Any]:
    """What an intrinsic was given: numbers as they are, arrays as pointers to their bytes."""
    return [
        builder.bitcast(context.make_array(kind)(context, builder, value).data, BYTE.as_pointer())
        if isinstance(kind, types.Array)
        else value
        for kind, value in zip(signature.args, given, strict=True)
    ]


def _emit_block(_: Any, kind: Any, blocks: Any, start: Any, out: Any, place: Any) -> Any:
    """Unpacks the block that begins at byte `start`, to `out` from weight `place` on: float32 or bfloat16."""
    form, wide = FORMATS[kind.literal_value], out.dtype == types.float32

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        _, base, start, out, place = pointers(context, builder, signature, given)
        base = builder.gep(base, [start])
        out = builder.gep(out, [builder.mul(place, ir.Constant(LONG, 4 if wide else 2))])
        for line in range(0, form.bytes, LINE):
            prefetch(builder, builder.gep(base, [ir.Constant(LONG, _AHEAD + line)]))
        read = form.read(builder, [base])
        for number, codes in enumerate(read.codes):
            scales = read.scale(builder, [number])
            minima = None if read.minima is None else read.scale(builder, [number], read.minima)
            for eight in range(0, PART, LANES):
                some = chosen(builder, codes, list(range(eight, eight + LANES)))
                wider = builder.sitofp(some, FLOATS)
                # Multiplied and added apart, as ggml's own code does: one fused operation rounds otherwise.
                weights = builder.fmul(wider, chosen(builder, scales, [eight // 4] * LANES))
                if minima is not None:
                    weights = builder.fadd(weights, chosen(builder, minima, [eight // 4] * LANES))
                bits = weights if wide else _rounded(builder, weights)
                builder.store(
                    bits, at(builder, out, (PART * number + eight) * (4 if wide else 2), bits.type), align=1
                )
        return context.get_dummy_value()

    return types.void(kind, blocks, start, out, place), generate


_unpack: Any = intrinsic(prefer_literal=True)(_emit_block)
_AHEAD = 1024  # bytes that are fetched before they are unpacked


def _rounded(builder: Any, floats: Any) -> Any:
    """bfloat16 bits of float32, rounded to the nearest, or to even; NaN stays NaN."""
    bits = builder.bitcast(floats, INTS)
    last = builder.and_(builder.lshr(bits, same(INTS, 16)), same(INTS, 1))
    nearest = builder.add(bits, builder.add(last, same(INTS, 0x7FFF)))
    lost = builder.fcmp_unordered("uno", floats, floats)
    nearest = builder.select(lost, same(INTS, 0x7FC00000), nearest)
    return builder.trunc(builder.lshr(nearest, same(INTS, 16)), ir.VectorType(SHORT, LANES))


@cache
def _unpacking(kind: int) -> Any:
    size, weights = FORMATS[kind].bytes, FORMATS[kind].weights

    @njit(nogil=True, cache=True)
    def unpacked(blocks: Any, out: Any, first: int, last: int) -> None:
        """Blocks `first` to `last` of all rows."""
        for block in range(first, last):
            _unpack(kind, blocks, block * size, out, block * weights)

    return unpacked


_TASK = 1 << 18  # weights: some tens of microseconds, beside which the start of a task is nothing
_LEAST = 1 << 14  # which are unpacked before another thread has woken up


def unpack(blocks: Blocks, kind: int, out: npt.NDArray[Any]) -> None:
    """The weights of `blocks`, uint8 `[rows, bytes]`, written to `out [rows, K]`: float32, which equal what
    the gguf package dequantizes, or the same rounded to bfloat16 as uint16 bits (of a tensor of torch:
    `tensor.view(torch.uint16).numpy()`). On all threads of the pool, so not to be called from one.

    Raises ModelError as `checked`, and for an `out` of another shape or dtype, or not contiguous.
    """
    form, width = checked(blocks, kind)
    if (
        out.shape != (len(blocks), width)
        or out.dtype not in (np.float32, np.uint16)
        or not out.flags.c_contiguous
    ):
        raise ModelError(
            f"{form.name} of {len(blocks)} rows unpacks to contiguous float32, or bfloat16 as uint16, of "
            f"shape {[len(blocks), width]}, not to {out.dtype} of shape {list(out.shape)}."
        )
    loop, count = _unpacking(kind), len(blocks) * width // form.weights
    step = max(_LEAST // form.weights, min(_TASK // form.weights, -(-count // threads.THREADS)))
    tasks = [(first, min(first + step, count)) for first in range(0, count, step)]
    if tasks:
        given, flat = as_bytes(blocks), out.reshape(-1)
        threads.run(lambda task: loop(given, flat, *task), tasks)
