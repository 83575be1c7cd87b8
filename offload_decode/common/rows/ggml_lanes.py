"""Products of many rows of activations with weights in GGUF's blocks: each row has a lane of its own.

With few rows (`ggml_products`) a vector holds the codes of neighbouring weights, and the products of every
two parts are scaled and added up for every row. Here the lanes of a vector are rows: four codes of a weight
meet four channels of all rows at once, and what a part adds up to is scaled once for all of them.
"""

from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import carray, cfunc, njit, types  # type: ignore[attr-defined]
from numba.core import cgutils
from numba.extending import intrinsic

from offload_decode.common.rows.compiled import at as address
from offload_decode.common.rows.ggml_blocks import (
    BYTE,
    CODES,
    FLOAT,
    FORMATS,
    INT,
    LINE,
    LONG,
    PART,
    SHORT,
    Format,
    add_product,
    at,
    called,
    load,
    pointers,
    same,
    variable,
)
from offload_decode.common.rows.loops import prefetch

ROWS = {"avx512": 16, "vnni": 8, "avx2": 8}
"""Rows of a group, for the forms of products that have them: a lane of 32 bits takes four codes at once."""
_TOGETHER = 4  # rows of weights that meet the same activations while these are in registers
_TILE = 16  # rows of weights whose products are turned at once, a multiple of `_TOGETHER`
_AHEAD = 4096  # bytes of blocks
WORDS = 12  # of what a loop is given


def has(kind: int, form: str) -> bool:
    """Whether there is a loop for blocks of a kind: AVX2 adds two products up in 16 bits, which those of
    codes up to 255 do not fit.
    """
    return form in ROWS and not (form == "avx2" and FORMATS[kind].signed)


class Turned(NamedTuple):
    """Rounded activations by groups of L rows. codes: int32 `[G, K / 4, L]`, four signed bytes each;
    offsets: int32 `[G, K / 32, L]`, -128 times what the codes of a part add up to, as signed codes of weights
    are multiplied as 128 more than they are; scales, sums `[G, K / 32, L]` and halves `[G, K / 16, L]`
    float32 (`quantized`).
    """

    codes: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int32]
    scales: npt.NDArray[np.float32]
    sums: npt.NDArray[np.float32]
    halves: npt.NDArray[np.float32]


@njit(nogil=True, cache=True)
def turned(codes: Any, scales: Any, sums: Any, halves: Any, lanes: int) -> Any:
    """What `quantized` has, of a multiple of L rows, by lanes."""
    groups, parts = len(codes) // lanes, scales.shape[1]
    words = codes.view(np.int32)
    found = Turned(
        np.empty((groups, words.shape[1], lanes), np.int32),
        np.empty((groups, parts, lanes), np.int32),
        np.empty((groups, parts, lanes), np.float32),
        np.empty((groups, parts, lanes), np.float32),
        np.empty((groups, 2 * parts, lanes), np.float32),
    )
    for row in range(len(codes)):
        group, lane = row // lanes, row % lanes
        for word in range(words.shape[1]):
            found.codes[group, word, lane] = words[row, word]
        for part in range(parts):
            total = np.int32(0)
            for place in range(part * PART, part * PART + PART):
                total += np.int32(codes[row, place])
            found.offsets[group, part, lane] = -128 * total
            found.scales[group, part, lane] = scales[row, part]
            found.sums[group, part, lane] = sums[row, part]
            found.halves[group, 2 * part, lane] = halves[row, 2 * part]
            found.halves[group, 2 * part + 1, lane] = halves[row, 2 * part + 1]
    return found


def _emit_rows(
    _: Any,
    kind: Any,
    name: Any,
    together: Any,
    blocks: Any,
    row: Any,
    codes: Any,
    offsets: Any,
    scales: Any,
    sums: Any,
    halves: Any,
    group: Any,
    out: Any,
    place: Any,
) -> Any:
    """Products of `together` rows of weights from `row` on with a group of activations, to `out [., L]` from
    `place` on.
    """
    form, own = FORMATS[kind.literal_value], together.literal_value
    wide = 4 * ROWS[name.literal_value]

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        number = partial(ir.Constant, LONG)
        words = builder.extract_value(context.make_array(codes)(context, builder, given[5]).shape, 1)
        _, _, _, base, row, *turned, group, out, place = pointers(context, builder, signature, given)
        count = builder.udiv(words, number(form.weights // 4))
        length = builder.mul(count, number(form.bytes))
        bases = [
            builder.gep(base, [builder.mul(builder.add(row, number(other)), length)]) for other in range(own)
        ]
        # Bytes of a group: a word a lane of codes for each four channels, of the rest for each 32, or 16.
        size = builder.mul(group, builder.mul(words, number(wide)))
        begins = [
            builder.gep(start, [builder.udiv(size, number(by))])
            for start, by in zip(turned, (1, 8, 8, 8, 4), strict=True)
        ]
        totals = _totals(builder, form, name.literal_value, bases, count, begins)
        for other, total in enumerate(totals):
            where = builder.mul(builder.add(place, number(other)), number(wide))
            builder.store(total, at(builder, out, where, total.type), align=4)
        return context.get_dummy_value()

    given = (kind, name, together, blocks, row, codes, offsets, scales, sums, halves, group, out, place)
    return types.void(*given), generate


_rows: Any = intrinsic(prefer_literal=True)(_emit_rows)


def _totals(
    builder: Any, form: Format, name: str, bases: list[Any], count: Any, begins: list[Any]
) -> list[Any]:
    """What the products of the rows of weights at `bases`, of so many blocks, add up to."""
    number, lanes = partial(ir.Constant, LONG), ROWS[name]
    ints, floats = ir.VectorType(INT, lanes), ir.VectorType(FLOAT, lanes)
    codes, offsets, scales, sums, halves = begins
    each, wide = form.scales // form.parts, 4 * lanes
    held = [_Held(builder, form) for _ in bases]
    totals = [variable(builder, floats) for _ in bases]

    more = partial(add_product, builder)
    with cgutils.for_range(builder, count) as blocks:
        for base, own in zip(bases, held, strict=True):
            own.unpack(builder.gep(base, [builder.mul(blocks.index, number(form.bytes))]))
        with cgutils.for_range(builder, number(form.parts)) as parts:
            part = builder.add(builder.mul(blocks.index, number(form.parts)), parts.index)
            along = builder.mul(part, number(wide))
            scale = load(builder, scales, along, floats)
            for half in range(each):
                start = load(builder, offsets, along, ints) if form.signed else same(ints, 0)
                products = [start] * len(bases)
                for word in range(half * 8 // each, (half + 1) * 8 // each):
                    by = load(
                        builder, codes, builder.add(builder.mul(along, number(8)), number(wide * word)), ints
                    )
                    at_word = builder.add(builder.mul(parts.index, number(PART)), number(4 * word))
                    products = [
                        _added(
                            builder,
                            name,
                            product,
                            _spread(builder, load(builder, own.codes, at_word, INT), lanes),
                            by,
                        )
                        for product, own in zip(products, held, strict=True)
                    ]
                at_scale = builder.mul(
                    builder.add(builder.mul(parts.index, number(each)), number(half)), number(4)
                )
                for product, own, total in zip(products, held, totals, strict=True):
                    by = builder.fmul(
                        _spread(builder, load(builder, own.scales, at_scale, FLOAT), lanes), scale
                    )
                    more(total, builder.sitofp(product, floats), by)
                if held[0].minima is not None:
                    summed = load(
                        builder,
                        halves if each > 1 else sums,
                        builder.add(builder.mul(along, number(each)), number(wide * half)),
                        floats,
                    )
                    for own, total in zip(held, totals, strict=True):
                        more(
                            total, _spread(builder, load(builder, own.minima, at_scale, FLOAT), lanes), summed
                        )
    return [builder.load(total) for total in totals]


class _Held:
    """A block of one row of weights, unpacked to memory that stays in the nearest cache."""

    def __init__(self, builder: Any, form: Format) -> None:
        self.builder, self.form = builder, form

        def room(kind: Any, count: int) -> Any:
            place = cgutils.alloca_once(builder, ir.ArrayType(kind, count))  # type: ignore[no-untyped-call]
            return builder.bitcast(place, BYTE.as_pointer())

        self.codes, self.scales = room(BYTE, form.weights), room(FLOAT, form.scales)
        self.minima = None if form.signed else room(FLOAT, form.scales)

    def unpack(self, base: Any) -> None:
        builder, form = self.builder, self.form
        for line in range(0, form.bytes, LINE):
            prefetch(builder, builder.gep(base, [ir.Constant(LONG, _AHEAD + line)]))
        read = form.read(builder, [base])
        for number, codes in enumerate(read.codes):
            if form.signed:  # above 0, as the instruction takes them
                codes = builder.xor(codes, same(CODES, -128))
            builder.store(codes, at(builder, self.codes, PART * number, CODES), align=1)
        builder.store(read.scales, at(builder, self.scales, 0, read.scales.type), align=4)
        if self.minima is not None:
            builder.store(read.minima, at(builder, self.minima, 0, read.minima.type), align=4)


def _spread(builder: Any, value: Any, lanes: int) -> Any:
    kind = ir.VectorType(value.type, lanes)
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(INT, 0))
    return builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), same(ir.VectorType(INT, lanes), 0))


def _added(builder: Any, name: str, total: Any, codes: Any, by: Any) -> Any:
    """The sums of four products a lane, of unsigned codes and signed activations, added to the total."""
    if name != "avx2":
        return called(builder, f"llvm.x86.avx512.vpdpbusd.{32 * ROWS[name]}", total.type, total, codes, by)
    bytes_of, shorts = (ir.VectorType(of, 4 // size * ROWS[name]) for of, size in ((BYTE, 1), (SHORT, 2)))
    codes, by = (builder.bitcast(value, bytes_of) for value in (codes, by))
    pairs = called(builder, "llvm.x86.avx2.pmadd.ub.sw", shorts, codes, by)
    return builder.add(total, called(builder, "llvm.x86.avx2.pmadd.wd", total.type, pairs, same(shorts, 1)))


@cache
def loop(kind: int, form: str) -> int:
    """The address of what `team.fork` calls: rows of weights times all groups, to `out [G * L, rows]`."""
    lanes = ROWS[form]

    @cfunc("int64(int64, int64)", cache=True)
    def multiplied(data: int, task: int) -> int:
        words = carray(address(data), WORDS, np.int64)
        rows, length, groups, width = words[0], words[1], words[2], words[3]
        bounds = carray(address(words[4] + 8 * task), 2, np.int64)
        blocks = carray(address(words[5]), rows * length, np.uint8)
        codes = carray(address(words[6]), (groups, width // 4, lanes), np.int32)
        offsets = carray(address(words[7]), (groups, width // PART, lanes), np.int32)
        scales = carray(address(words[8]), (groups, width // PART, lanes), np.float32)
        sums = carray(address(words[9]), (groups, width // PART, lanes), np.float32)
        halves = carray(address(words[10]), (groups, 2 * width // PART, lanes), np.float32)
        out = carray(address(words[11]), (groups * lanes, rows), np.float32)
        tile = np.empty((_TILE, lanes), np.float32)
        for first in range(bounds[0], bounds[1], _TILE):
            count = min(_TILE, bounds[1] - first)
            whole = count - count % _TOGETHER
            for group in range(groups):
                for row in range(0, whole, _TOGETHER):
                    _rows(
                        kind,
                        form,
                        _TOGETHER,
                        blocks,
                        first + row,
                        codes,
                        offsets,
                        scales,
                        sums,
                        halves,
                        group,
                        tile,
                        row,
                    )
                for row in range(whole, count):
                    _rows(
                        kind,
                        form,
                        1,
                        blocks,
                        first + row,
                        codes,
                        offsets,
                        scales,
                        sums,
                        halves,
                        group,
                        tile,
                        row,
                    )
                for lane in range(lanes):
                    for row in range(count):
                        out[group * lanes + lane, first + row] = tile[row, lane]
        return 0

    return multiplied.address  # type: ignore[return-value]
