"""Compiled inner loops over stored rows: widening them, inner products, and candidates for the best of these.

A candidate is one uint64: the score's bits, mapped so that larger scores are larger integers, above the
complement of the id. So the order of candidates is (score descending, id ascending), it is total, and
integer partition and sort give the same hits on every machine for the same scores.
"""

import platform
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils

from offload_decode.common.rows import encodings
from offload_decode.common.rows.arrays import BFLOAT16, Keys
from offload_decode.common.rows.compiled import features, half_to_single, intrinsic, scale_of, single, word
from offload_decode.common.rows.encodings import SCALE_BYTES

# Inner products of a few rows with a few queries at once: `[ROWS, W]` times `[QUERIES, W]`, in float32. Each
# sum is kept in one vector of the processor and added up at the end, in the same order wherever its row and
# query lie.

_X86 = platform.machine() in ("x86_64", "AMD64")
LANES = 16 if "avx512f" in features() else 8 if "avx" in features() else 4  # of a vector
QUERIES = 4
# As many as leave room for their sums in the processor's registers: 32, but 16 of older x86.
ROWS = 4 if LANES == 16 or not _X86 else 2
SUMS = max(QUERIES * ROWS, LANES)  # room for what `products` writes

_FLOAT, _INT, _LONG, _BYTE = ir.FloatType(), ir.IntType(32), ir.IntType(64), ir.IntType(8)
_VECTOR = ir.VectorType(_FLOAT, LANES)


@njit(nogil=True, cache=True)
def padded(queries: Any) -> Any:
    """`queries [R, D]` float32 with zeros behind, for `products`: R a multiple of QUERIES, D of LANES."""
    count, dim = queries.shape
    rows, width = -(-count // QUERIES) * QUERIES, -(-dim // LANES) * LANES
    if (rows, width) == (count, dim):
        return queries
    wide = np.zeros((rows, width), np.float32)
    wide[:count, :dim] = queries
    return wide


@intrinsic
def products(_: Any, rows: Any, queries: Any, first: Any, sums: Any) -> Any:
    """Called from compiled code: `products(rows, queries, first, sums)` writes the inner products of `rows
    [ROWS, W]` with `queries[first : first + QUERIES]` of `[R, W]`, W a multiple of LANES, to `sums [SUMS]`
    float32: ROWS of the first query, then those of the next.
    """
    signature = types.void(rows, queries, types.int64, sums)

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        own, others, out = (
            context.make_array(signature.args[place])(context, builder, given[place]) for place in (0, 1, 3)
        )
        groups = builder.udiv(builder.extract_value(own.shape, 1), ir.Constant(_LONG, LANES))
        row = [_row(builder, own, ir.Constant(_LONG, number)) for number in range(ROWS)]
        query = [
            _row(builder, others, builder.add(given[2], ir.Constant(_LONG, number)))
            for number in range(QUERIES)
        ]
        zero = ir.Constant(_VECTOR, [0.0] * LANES)
        totals = [[cgutils.alloca_once_value(builder, zero) for _ in row] for _ in query]
        for total in (total for own in totals for total in own):
            builder.store(zero, total)
        with cgutils.for_range(builder, groups) as loop:
            parts = [builder.load(builder.gep(start, [loop.index]), align=4) for start in row]
            for start, own in zip(query, totals, strict=True):
                by = builder.load(builder.gep(start, [loop.index]), align=4)
                for part, total in zip(parts, own, strict=True):
                    product = builder.fmul(part, by, flags=("contract",))
                    builder.store(builder.fadd(builder.load(total), product, flags=("contract",)), total)
        added = _added(builder, [builder.load(total) for own in totals for total in own])
        place = builder.bitcast(out.data, _VECTOR.as_pointer())
        for number, vector in enumerate(added):
            builder.store(vector, builder.gep(place, [ir.Constant(_INT, number)]), align=4)
        return context.get_dummy_value()

    return signature, generate


def _row(builder: Any, array: Any, number: Any) -> Any:
    """Where a row of a matrix begins, as vectors."""
    offset = builder.mul(number, builder.extract_value(array.strides, 0))
    place = builder.gep(builder.bitcast(array.data, _BYTE.as_pointer()), [offset])
    return builder.bitcast(place, _VECTOR.as_pointer())


def _added(builder: Any, vectors: list[Any]) -> list[Any]:
    """What each vector adds up to, in their order, in as few vectors as hold it: the second half of what is
    left of a vector is added to the first, of two vectors at a time.
    """
    kind = ir.VectorType(_INT, LANES)
    width = LANES
    while width > 1:
        half, pieces = width // 2, range(2 * LANES // width)
        lower = ir.Constant(kind, [piece * width + lane for piece in pieces for lane in range(half)])
        upper = ir.Constant(kind, [piece * width + half + lane for piece in pieces for lane in range(half)])
        seconds = vectors[1::2] or vectors  # one alone is added to nothing of use
        vectors = [
            builder.fadd(builder.shuffle_vector(a, b, lower), builder.shuffle_vector(a, b, upper))
            for a, b in zip(vectors[::2], seconds, strict=True)
        ]
        width = half
    return vectors


@njit(nogil=True, cache=True, forceinline=True)
def put(sums: Any, scores: Any, query: int, row: int, rows: int) -> None:
    """What `products` wrote of so many `rows` and the queries there are, to `scores [G, N]` from there on."""
    if rows == ROWS and query + QUERIES <= len(scores):  # of known numbers: there are no loops left
        for q in range(QUERIES):
            for r in range(ROWS):
                scores[query + q, row + r] = sums[q * ROWS + r]
    else:
        for q in range(min(QUERIES, len(scores) - query)):
            for r in range(rows):
                scores[query + q, row + r] = sums[q * ROWS + r]


FP16, BF16, FP32, INT8, INT4 = range(5)
_ENCODED = {encodings.INT8: INT8, encodings.INT4: INT4}


def layout(rows: Keys) -> int:
    """How the bits of `rows` are to be read."""
    encoding = encodings.encoding_of(rows)
    if encoding is not None:
        return _ENCODED[encoding]
    if rows.dtype == np.float32:
        return FP32
    return BF16 if rows.dtype == BFLOAT16 else FP16


def bits(rows: Keys) -> npt.NDArray[np.uint8]:
    """The memory of rows, bytes `[N, W]`, read-only: of one type, so that a loop is compiled once for all."""
    if not rows.flags.c_contiguous:
        raise ValueError("rows are read by their addresses: they must lie one behind the other")
    memory = rows.view(np.uint8) if encodings.encoding_of(rows) is None else encodings.as_raw(rows)
    memory.flags.writeable = False
    return memory


@njit(nogil=True, cache=True)
def ordered(score: Any) -> Any:
    """The bits of a score as an integer that is larger where the score is."""
    bits = np.float32(score + np.float32(0)).view(np.uint32)  # -0.0 ties with 0.0
    return np.uint32(~bits) if bits & 0x80000000 else np.uint32(bits | 0x80000000)


@njit(nogil=True, cache=True)
def candidate(score: Any, row: Any) -> Any:
    """A score and the id of its row as one candidate."""
    return (np.uint64(ordered(score)) << np.uint64(32)) | np.uint64(0xFFFFFFFF - np.int64(row))


@njit(nogil=True, cache=True)
def score_and_row(candidate: Any) -> Any:
    """The score and the row of a candidate."""
    high = np.uint32(candidate >> np.uint64(32))
    bits = np.uint32(high & 0x7FFFFFFF) if high & 0x80000000 else np.uint32(~high)
    return np.uint32(bits).view(np.float32), np.int64(0xFFFFFFFF) - np.int64(
        candidate & np.uint64(0xFFFFFFFF)
    )


@njit(nogil=True, cache=True, forceinline=True)
def widen_row(bits: Any, layout: int, out: Any) -> None:
    """One row in float32, to `out [D]`: half, bfloat16 or float32 bits (exactly, subnormals and infinities
    included), or the bytes of an encoded row.
    """
    if layout == FP16:
        _widen_fp16(bits, out)
    elif layout == BF16:
        _widen_bf16(bits, out)
    elif layout == INT8:
        _widen_int8(bits, out)
    elif layout == INT4:
        _widen_int4(bits, out)
    else:
        _widen_fp32(bits, out)


# A function for each layout: see `loops`.


@njit(nogil=True, cache=True)
def _widen_fp16(bits: Any, out: Any) -> None:
    for d in range(len(out)):
        out[d] = half_to_single(word(bits, 2 * d))


@njit(nogil=True, cache=True)
def _widen_bf16(bits: Any, out: Any) -> None:
    for d in range(len(out)):
        out[d] = np.uint32(np.uint32(word(bits, 2 * d)) << np.uint32(16)).view(np.float32)


@njit(nogil=True, cache=True)
def _widen_fp32(bits: Any, out: Any) -> None:
    for d in range(len(out)):
        out[d] = single(bits, 4 * d)


@njit(nogil=True, cache=True)
def _widen_int8(bits: Any, out: Any) -> None:
    scale = scale_of(bits)
    for d in range(len(out)):
        out[d] = np.float32(np.int8(bits[SCALE_BYTES + d])) * scale


@njit(nogil=True, cache=True)
def _widen_int4(bits: Any, out: Any) -> None:
    scale = scale_of(bits)
    for d in range(len(out) // 2):
        pair = np.int32(bits[SCALE_BYTES + d])
        out[2 * d] = np.float32((pair & 15) - 8) * scale
        out[2 * d + 1] = np.float32((pair >> 4) - 8) * scale


@njit(nogil=True, cache=True)
def widen_block(bits: Any, layout: int, dim: int, out: Any) -> None:
    """Rows of `dim` channels that lie side by side in float32, to the first of `out [>= n, >= dim]`."""
    if layout == FP16:
        _widen_block_fp16(bits, out)
    elif layout == BF16:
        _widen_block_bf16(bits, out)
    elif layout == FP32:
        _widen_block_fp32(bits, out)
    else:
        for j in range(len(bits)):
            widen_row(bits[j], layout, out[j, :dim])


@njit(nogil=True, cache=True)
def _widen_block_fp16(bits: Any, out: Any) -> None:
    for j in range(len(bits)):
        for d in range(bits.shape[1] // 2):
            out[j, d] = half_to_single(word(bits, j * bits.shape[1] + 2 * d))


@njit(nogil=True, cache=True)
def _widen_block_bf16(bits: Any, out: Any) -> None:
    for j in range(len(bits)):
        for d in range(bits.shape[1] // 2):
            bfloat16 = np.uint32(word(bits, j * bits.shape[1] + 2 * d))
            out[j, d] = np.uint32(bfloat16 << np.uint32(16)).view(np.float32)


@njit(nogil=True, cache=True)
def _widen_block_fp32(bits: Any, out: Any) -> None:
    for j in range(len(bits)):
        for d in range(bits.shape[1] // 4):
            out[j, d] = single(bits, j * bits.shape[1] + 4 * d)


@njit(nogil=True, cache=True)
def widen_rows(bits: Any, layout: int, ids: Any, out: Any) -> None:
    """The rows `ids [n]` in float32, to `out [n, D]`."""
    for j in range(len(ids)):
        widen_row(bits[ids[j]], layout, out[j])


@njit(nogil=True, cache=True)
def score_rows(bits: Any, layout: int, queries: Any, scores: Any) -> None:
    """Inner products of `queries [G, D]` with N rows to `scores [G, N]`, accumulated in float32.

    Every score is summed in the same order, wherever its key and its query lie: equal keys tie exactly.
    One thread, outside the interpreter's lock: callers search many heads at once, and a BLAS that starts
    threads of its own for each small block loses more than it gains.
    """
    _score_rows(bits, layout, padded(queries), queries.shape[1], scores)


@njit(nogil=True, cache=True)
def _score_rows(bits: Any, layout: int, queries: Any, dim: int, scores: Any) -> None:
    rows, sums = np.zeros((ROWS, queries.shape[1]), np.float32), np.empty(SUMS, np.float32)
    for first in range(0, len(bits), ROWS):
        there = min(ROWS, len(bits) - first)
        for r in range(there):
            widen_row(bits[first + r], layout, rows[r, :dim])
        for g in range(0, len(queries), QUERIES):
            products(rows, queries, g, sums)
            put(sums, scores, g, first, there)
