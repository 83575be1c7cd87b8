"""Inner products of a few rows with a few queries at once: `[ROWS, W]` times `[QUERIES, W]`, in float32.

Every sum is kept in one vector of the processor, channel by channel, and all of them are added up together at
the end. Every inner product is summed in the same order, wherever its row and its query lie.
"""

from __future__ import annotations

import platform
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from offload_decode.indexes.rows.processor import features

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
    """`queries [R, D]` float32 with zeros behind, as `products` takes them: R a multiple of QUERIES, D of
    LANES.
    """
    count, dim = queries.shape
    rows, width = -(-count // QUERIES) * QUERIES, -(-dim // LANES) * LANES
    if (rows, width) == (count, dim):
        return queries
    wide = np.zeros((rows, width), np.float32)
    wide[:count, :dim] = queries
    return wide


def _products(_: Any, rows: Any, queries: Any, first: Any, sums: Any) -> Any:
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


# Called from compiled code: `products(rows, queries, first, sums)` writes the inner products of `rows [ROWS,
# W]` with `queries[first : first + QUERIES]` of `[R, W]`, W a multiple of LANES, to `sums [SUMS]` float32:
# ROWS of the first query, then those of the next.
products: Any = intrinsic(_products)


@njit(nogil=True, cache=True, forceinline=True)
def put(sums: Any, scores: Any, query: int, row: int, rows: int) -> None:
    """What `products` wrote, to `scores [G, N]` from the query and the row on: of so many rows, and of the
    queries that there are.
    """
    if rows == ROWS and query + QUERIES <= len(scores):  # of known numbers: there are no loops left
        for q in range(QUERIES):
            for r in range(ROWS):
                scores[query + q, row + r] = sums[q * ROWS + r]
    else:
        for q in range(min(QUERIES, len(scores) - query)):
            for r in range(rows):
                scores[query + q, row + r] = sums[q * ROWS + r]
