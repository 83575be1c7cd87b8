"""Products of float activations with weights in GGUF's quantized blocks, read where they lie.

Activations are rounded to signed bytes, one float32 scale for each 32 of them (their largest magnitude by
127, as ggml's own Q8_0), so that products of codes are whole numbers, and their sums the same on every
processor. AVX-512 multiplies and adds 64 codes in one instruction, AVX VNNI 32, AVX2 32 in two, of which the
first is unsigned: signs of codes, where a format has them, move to the activations. Plain vector operations
serve all other processors. Minima are multiplied by sums of the activations, added up once for all weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache, lru_cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import carray, cfunc, njit, types  # type: ignore[attr-defined]
from numba.core import cgutils
from numba.extending import intrinsic

from offload_decode.common.errors import ModelError
from offload_decode.common.rows.compiled import at as address
from offload_decode.common.rows.compiled import features
from offload_decode.common.rows.ggml_blocks import (
    BYTE,
    CODES,
    FLOAT,
    FORMATS,
    INT,
    INTS,
    LANES,
    LINE,
    LONG,
    PART,
    SHORT,
    Blocks,
    Format,
    add_product,
    at,
    called,
    checked,
    chosen,
    load,
    pointers,
    same,
    variable,
)
from offload_decode.common.rows.ggml_lanes import ROWS, WORDS, has, loop, turned
from offload_decode.common.rows.loops import prefetch
from offload_decode.common.rows.team import cells, fork
from offload_decode.common.rows.threads import THREADS

Float32 = npt.NDArray[np.float32]

TOGETHER = 4  # rows of activations that share the unpacked codes
_PARTS = 4
_PAIR = list(range(2 * PART))  # lanes of two parts behind each other
_AHEAD = 4096  # bytes of blocks
_TASK = 1 << 17  # bytes of blocks for one row of activations, at least: some ten microseconds
_TILE = 16  # rows of weights that meet four rows of activations while these are in the nearest cache


@njit(nogil=True, cache=True, error_model="numpy")
def _quantize(x: Any, codes: Any, scales: Any, sums: Any, halves: Any) -> None:
    bits = x.view(np.uint32)
    for row in range(x.shape[0]):
        for part in range(x.shape[1] // PART):
            most = np.uint32(0)  # of the bits: NaN is above infinity, and infinity above all numbers
            for place in range(part * PART, part * PART + PART):
                most = max(most, np.uint32(bits[row, place] & np.uint32(0x7FFFFFFF)))
            largest = np.uint32(most).view(np.float32)
            by = np.float32(127) / largest
            usable = np.float32(0) < by < np.float32(np.inf)  # zeros, or nearly so, become zeros
            scale = largest / np.float32(127)
            scales[row, part] = scale
            both = np.int32(0)
            for half in range(2):
                total = np.int32(0)
                for place in range(part * PART + 16 * half, part * PART + 16 * half + 16):
                    code = np.int32(np.rint(x[row, place] * by)) if usable else np.int32(0)
                    codes[row, place] = code
                    total += code
                halves[row, 2 * part + half] = scale * np.float32(total)
                both += total
            sums[row, part] = scale * np.float32(both)


@njit(nogil=True, cache=True)
def _lanes(count: int, table: Any) -> Any:
    """Lanes of the loops that multiply so many rows, a row a lane; 0 for others, as most would be empty."""
    lanes = table[0, 6]
    return lanes if lanes < 2 * count else 0


@njit(nogil=True, cache=True)
def padded(count: int, table: Any) -> Any:
    """Rows of activations that the loops of a `Matrices.table` take for so many."""
    lanes = _lanes(count, table)
    if lanes:
        return -(-count // lanes) * lanes
    return count if count % TOGETHER < 2 else -(-count // TOGETHER) * TOGETHER


@njit(nogil=True, cache=True)
def quantized(x: Any, rows: int) -> Any:
    """Activations `x [M, K]` float32 as signed bytes, with zeros behind up to R rows.

    Codes int8 `[R, K]` of -127 to 127, scales float32 `[R, K / 32]`, and what 32 and 16 codes times their
    scale add up to: sums float32 `[R, K / 32]` and halves float32 `[R, K / 16]`.
    """
    width = x.shape[1]
    codes = np.zeros((rows, width), np.int8)
    scales = np.zeros((rows, width // PART), np.float32)
    sums, halves = np.zeros_like(scales), np.zeros((rows, 2 * width // PART), np.float32)
    _quantize(x, codes, scales, sums, halves)
    return codes, scales, sums, halves


def _unsigned(builder: Any, codes: Any, by: Any) -> tuple[Any, Any]:
    """Codes without their signs, and activations times these. 128, of -128, is right as an unsigned byte."""
    kind = codes.type
    name = f"llvm.abs.v{kind.count}i8"
    magnitude = called(builder, name, kind, codes, ir.Constant(ir.IntType(1), 0))
    if kind == CODES:
        return magnitude, called(builder, "llvm.x86.avx2.psign.b", kind, by, codes)
    negative = builder.icmp_signed("<", codes, same(kind, 0))
    return magnitude, builder.select(negative, builder.neg(by), by)


def _with_avx512(builder: Any, codes: Any, by: Any, signed: bool) -> Any:
    wide = codes.type.count * 8
    if signed:
        codes, by = _unsigned(builder, codes, by)
    ints = ir.VectorType(INT, wide // 32)
    codes, by = (builder.bitcast(value, ints) for value in (codes, by))
    return called(builder, f"llvm.x86.avx512.vpdpbusd.{wide}", ints, same(ints, 0), codes, by)


def _with_avx2(builder: Any, codes: Any, by: Any, signed: bool) -> Any:
    """The first step adds two products up in 16 bits, which those of codes up to 128 just fit."""
    if signed:
        codes, by = _unsigned(builder, codes, by)
    shorts = ir.VectorType(SHORT, 16)
    pairs = called(builder, "llvm.x86.avx2.pmadd.ub.sw", shorts, codes, by)
    return called(builder, "llvm.x86.avx2.pmadd.wd", INTS, pairs, same(shorts, 1))


def _with_vectors(builder: Any, codes: Any, by: Any, signed: bool) -> Any:
    sums = same(INTS, 0)
    for place in range(4):
        lanes = list(range(place, PART, 4))
        code, own = (builder.sext(chosen(builder, value, lanes), INTS) for value in (codes, by))
        sums = builder.add(sums, builder.mul(code, own))
    return sums


_FORMS = {"avx512": _with_avx512, "vnni": _with_avx512, "avx2": _with_avx2, "vectors": _with_vectors}


def _multiplied(builder: Any, name: str, codes: list[Any], by: Any, signed: bool) -> Any:
    """Products of two parts, or of one, with activations: <16 x i32>, each of four codes; zeros for a part
    that is missing.
    """
    multiply = _FORMS[name]
    if len(codes) == 1:
        lower, upper = multiply(builder, codes[0], by, signed), same(INTS, 0)
    elif name == "avx512":
        return multiply(builder, chosen(builder, codes[0], _PAIR, codes[1]), by, signed)
    else:
        lower, upper = (
            multiply(builder, own, chosen(builder, by, _PAIR[start : start + PART]), signed)
            for own, start in zip(codes, (0, PART), strict=True)
        )
    return chosen(builder, lower, _PAIR[: 2 * LANES], upper)


def forms() -> list[str]:
    """The forms that this processor runs, and numba is allowed to use, the fastest first."""
    own = features()
    wide = {"avx512vnni", "avx512vl", "avx512bw"} <= own
    return [
        *["avx512"] * wide,
        *["vnni"] * (wide or "avxvnni" in own),
        *["avx2"] * ("avx2" in own),
        "vectors",
    ]


FORM = forms()[0]


def _emit_row(
    _: Any,
    kind: Any,
    name: Any,
    together: Any,
    blocks: Any,
    row: Any,
    codes: Any,
    scales: Any,
    sums: Any,
    halves: Any,
    first: Any,
    out: Any,
) -> Any:
    """Products of one row of weights with `together` rows of activations from `first` on, to `out [M, N]`."""
    form = FORMATS[kind.literal_value]

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        number = partial(ir.Constant, LONG)
        width, step = (
            builder.extract_value(
                context.make_array(signature.args[place])(context, builder, given[place]).shape, 1
            )
            for place in (5, 10)
        )
        _, _, _, base, row, *activations, first, out = pointers(context, builder, signature, given)
        length = builder.mul(builder.udiv(width, number(form.weights)), number(form.bytes))
        base = builder.gep(base, [builder.mul(row, length)])
        rows = [builder.add(first, number(other)) for other in range(together.literal_value)]
        # Bytes of a row: of codes one a weight, of scales and sums an eighth, of sums of halves a quarter.
        begins = [
            [
                builder.gep(start, [builder.mul(own, builder.udiv(width, number(by)))])
                for start, by in zip(activations, (1, 8, 8, 4), strict=True)
            ]
            for own in rows
        ]
        totals = _totals(builder, form, name.literal_value, base, width, begins)
        for own, total in zip(rows, totals, strict=True):
            place = builder.add(builder.mul(own, step), row)
            builder.store(total, at(builder, out, builder.mul(place, number(4)), FLOAT))
        return context.get_dummy_value()

    given = (kind, name, together, blocks, row, codes, scales, sums, halves, first, out)
    return types.void(*given), generate


_row: Any = intrinsic(prefer_literal=True)(_emit_row)


def _totals(
    builder: Any,
    form: Format,
    name: str,
    base: Any,
    width: Any,
    activations: Sequence[Sequence[Any]],
) -> list[Any]:
    """What the products of the row of weights at `base` with each row of activations add up to."""
    number = partial(ir.Constant, LONG)
    # Blocks of one part are read several at a time: their scales are converted and multiplied together.
    once = max(1, _PARTS // form.parts)
    lows = ir.VectorType(FLOAT, once * form.scales)
    # A sum waits for its last addition, so one row of activations has two that take parts in turns.
    turns = 2 if len(activations) == 1 else 1
    floats = ir.VectorType(FLOAT, 2 * LANES)
    products = [[variable(builder, floats) for _ in range(turns)] for _ in activations]
    added = [variable(builder, lows) for _ in activations]

    more = partial(add_product, builder)

    def several(first: Any, count: int) -> None:
        start, along = (builder.mul(first, number(size)) for size in (form.bytes, form.weights))
        own = builder.gep(base, [start])
        for line in range(0, count * form.bytes, LINE):
            prefetch(builder, builder.gep(own, [number(_AHEAD + line)]))
        read = form.read(builder, [builder.gep(own, [number(form.bytes * block)]) for block in range(count)])
        parts, each = len(read.codes), read.each
        for (codes, scales, *sums), totals, lower in zip(activations, products, added, strict=True):
            by = load(builder, scales, builder.udiv(along, number(8)), ir.VectorType(FLOAT, parts))
            by = chosen(builder, by, [part // each for part in range(parts * each)])
            by = builder.fmul(read.scales, by)
            for part in range(0, parts, 2):
                pair = read.codes[part : part + 2]
                kind = ir.VectorType(BYTE, PART * len(pair))
                own = load(builder, codes, builder.add(along, number(PART * part)), kind)
                whole = builder.sitofp(_multiplied(builder, name, pair, own, form.signed), floats)
                scale = read.scale(builder, [part, min(part + 1, parts - 1)], by)
                more(totals[part // 2 % turns], whole, scale)
            if read.minima is not None:
                own = load(builder, sums[each - 1], builder.udiv(along, number(8 // each)), by.type)
                values = [own, read.minima]
                if count < once:  # zeros behind the one of a block alone
                    wide = [min(lane, 1) for lane in range(once)]
                    values = [chosen(builder, value, wide, same(by.type, 0)) for value in values]
                more(lower, *values)

    blocks = builder.udiv(width, number(form.weights))
    groups = builder.udiv(blocks, number(once))
    with cgutils.for_range(builder, groups) as loop:
        several(builder.mul(loop.index, number(once)), once)
    if once > 1:
        with cgutils.for_range(builder, builder.urem(blocks, number(once))) as loop:
            several(builder.add(builder.mul(groups, number(once)), loop.index), 1)
    sums = []
    for totals, lower in zip(products, added, strict=True):
        total = builder.load(totals[0])
        for other in totals[1:]:
            total = builder.fadd(total, builder.load(other))
        sums.append(builder.fadd(_added(builder, total), _added(builder, builder.load(lower))))
    return sums


def _added(builder: Any, vector: Any) -> Any:
    while vector.type.count > 1:
        half = vector.type.count // 2
        lower, upper = (chosen(builder, vector, list(range(own, own + half))) for own in (0, half))
        vector = builder.fadd(lower, upper)
    return builder.extract_element(vector, ir.Constant(INT, 0))


@cache
def _loop(kind: int, form: str) -> int:
    """The address of what `team.fork` calls: rows of weights times all activations, to `out [M, rows]`."""

    @cfunc("int64(int64, int64)", cache=True)
    def multiplied(data: int, task: int) -> int:
        words = carray(address(data), WORDS, np.int64)
        rows, length, given, width = words[0], words[1], words[2], words[3]
        bounds = carray(address(words[4] + 8 * task), 2, np.int64)
        blocks = carray(address(words[5]), rows * length, np.uint8)
        codes = carray(address(words[6]), (given, width), np.int8)
        scales = carray(address(words[7]), (given, width // PART), np.float32)
        sums = carray(address(words[8]), (given, width // PART), np.float32)
        halves = carray(address(words[9]), (given, 2 * width // PART), np.float32)
        out = carray(address(words[10]), (given, rows), np.float32)
        rest = given // TOGETHER * TOGETHER
        for tile in range(bounds[0], bounds[1], _TILE):
            end = min(tile + _TILE, bounds[1])
            for own in range(0, rest, TOGETHER):
                for row in range(tile, end):
                    _row(kind, form, TOGETHER, blocks, row, codes, scales, sums, halves, own, out)
            for own in range(rest, given):
                for row in range(tile, end):
                    _row(kind, form, 1, blocks, row, codes, scales, sums, halves, own, out)
        return 0

    return multiplied.address  # type: ignore[return-value]


@njit(nogil=True, cache=True)
def products(team: Any, x: Any, table: Any) -> Any:
    """Activations `x [M, K]` float32, of at least one row, times all matrices of a `Matrices.table`: flat,
    `[R, rows]` of one behind the other, where R is `padded(M, table)`.
    """
    held, lanes = padded(len(x), table), _lanes(len(x), table)
    codes, scales, sums, halves = quantized(x, held)
    total, start = 0, 0
    for matrix in range(len(table)):
        total += held * table[matrix, 2]
    out, words = np.empty(total, np.float32), np.empty(WORDS, np.int64)
    if lanes:
        by_lanes = turned(codes, scales, sums, halves, lanes)
    for matrix in range(len(table)):
        loop, tasks, rows, length, bounds, blocks, _, loop_of_many = table[matrix]
        own = out[start : start + held * rows]
        words[0], words[1], words[2], words[3] = rows, length, held, x.shape[1]
        words[4], words[5] = bounds, blocks
        if lanes:
            words[2] = held // lanes
            words[6], words[7] = by_lanes.codes.ctypes.data, by_lanes.offsets.ctypes.data
            words[8], words[9] = by_lanes.scales.ctypes.data, by_lanes.sums.ctypes.data
            words[10], words[11] = by_lanes.halves.ctypes.data, own.ctypes.data
            fork(team, loop_of_many, words.ctypes.data, tasks)
        else:
            words[6], words[7] = codes.ctypes.data, scales.ctypes.data
            words[8], words[9], words[10] = sums.ctypes.data, halves.ctypes.data, own.ctypes.data
            fork(team, loop, words.ctypes.data, tasks)
        start += len(own)
    return out


@lru_cache(512)
def _bounds(rows: int, least: int) -> npt.NDArray[np.int64]:
    """Where tasks begin and end that share so many rows out: large ones first, which read memory in order,
    and small ones last, so that all threads end together.
    """
    ends = [0]
    while ends[-1] < rows:
        left = rows - ends[-1]
        ends.append(ends[-1] + min(left, max(1, least, 2 * left // (3 * THREADS))))
    return np.array(ends)


class Matrices:
    """Matrices of weights that meet the same activations, each given as its blocks, uint8 `[rows, bytes of K
    weights]`, and ggml's number of their type. Raises ModelError as `checked`, and where K differs.
    """

    def __init__(self, given: Iterable[tuple[Blocks, int]]) -> None:
        self.blocks, kinds = zip(*given, strict=True)
        widths = {checked(blocks, kind)[1] for blocks, kind in zip(self.blocks, kinds, strict=True)}
        if len(widths) > 1:
            raise ModelError(
                f"Rows of {' and of '.join(map(str, sorted(widths)))} weights have no activations in common."
            )
        (self.width,) = widths
        self.rows = [len(blocks) for blocks in self.blocks]
        self._bounds = [_bounds(len(own), _TASK // own.shape[1]) for own in self.blocks]
        lanes = ROWS[FORM] if all(has(kind, FORM) for kind in kinds) else 0
        self.table = np.array(
            [
                (
                    _loop(kind, FORM),
                    len(bounds) - 1,
                    *own.shape,
                    bounds.ctypes.data,
                    own.ctypes.data,
                    lanes,
                    loop(kind, FORM) if lanes else 0,
                )
                for own, kind, bounds in zip(self.blocks, kinds, self._bounds, strict=True)
            ]
        )

    def multiply(self, x: Float32) -> list[Float32]:
        """Products float32 `[M, rows]` of `x [M, K]` float32 with each of them. x is rounded to bytes once,
        and all cores share the rows.

        What is not finite in x, or in the scales of blocks, gives products that are not finite. Raises
        ModelError for other activations.
        """
        if x.dtype != np.float32 or x.ndim != 2 or x.shape[1] != self.width or not x.flags.c_contiguous:
            raise ModelError(
                f"Activations of these weights are contiguous float32 [M, {self.width}], "
                f"not {x.dtype} of shape {list(x.shape)}."
            )
        flat = products(cells(), x, self.table)
        held, found, start = padded(len(x), self.table), [], 0
        for rows in self.rows:
            found.append(flat[start : start + held * rows].reshape(held, rows)[: len(x)])
            start += held * rows
        return found

    def __deepcopy__(self, _: Any) -> Matrices:
        """Itself: its numbers do not change, and the table holds their addresses."""
        return self
