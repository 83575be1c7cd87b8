"""Scores of int8 and int4 codes that lie interleaved, sixteen keys a block, for four queries at once.

AVX-512 VNNI's `vpdpbusd` multiplies 64 unsigned bytes by 64 signed ones and adds four products into each of
16 sums. Here a register holds four channels of 16 keys (eight of int4), so that each sum is a key's and no
lanes are ever added up: the densest form of a scan that reads all keys. Only what exceeds a floor leaves the
registers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import njit, types
from numba.core import cgutils
from numba.cpython.unsafe.numbers import trailing_zeros
from numba.extending import intrinsic

LANES, GROUP = 16, 4  # keys of a block; queries that share a scan
HAS_VNNI = bool(binding.get_host_cpu_features().get("avx512vnni"))

_INT32, _INT64 = ir.IntType(32), ir.IntType(64)
_SUMS, _FLOATS = ir.VectorType(_INT32, LANES), ir.VectorType(ir.FloatType(), LANES)


@njit(nogil=True, cache=True)
def collect(
    codes: Any,
    scales: Any,
    length: int,
    queries: Any,
    bits: int,
    floor: Any,
    ids: Any,
    scores: Any,
    found: Any,
) -> None:
    """Ids, ascending, and scores of the keys above `floor [4]`, as many as `ids [4, capacity]` takes.

    codes: uint8 `[blocks, words, 16, 4]`: codes with 128 (int8) or 8 (int4) added, an int4 word with channels
    8w to 8w + 3 in the low halves of its bytes and the next four in the high ones. scales: float32
    `[blocks, 16]`. queries: int8 `[4, D]`. found: int64 `[4]`, zero, then how many there are.
    """
    offsets = np.zeros(4, np.int32)
    for g in range(4):
        for d in range(queries.shape[1]):
            offsets[g] -= np.int32(1 << (bits - 1)) * np.int32(queries[g, d])
    block = np.empty((4, 16), np.float32)
    for at in range(len(codes)):
        if bits == 8:
            above = _score_block(codes, scales, queries, offsets, floor, block, at, (0,))
        else:
            above = _score_block(codes, scales, queries, offsets, floor, block, at, (0, 0))
        while above:
            place = np.int64(trailing_zeros(above))  # type: ignore[call-arg]
            above &= above - np.uint64(1)
            g, lane = place >> 4, place & 15
            if found[g] < ids.shape[1] and 16 * at + lane < length:
                ids[g, found[g]] = 16 * at + lane
                scores[g, found[g]] = block[g, lane]
                found[g] += 1


@njit(nogil=True, cache=True)
def score_block_plainly(
    codes: Any, scales: Any, queries: Any, offsets: Any, floor: Any, block: Any, at: int, parts: Any
) -> Any:
    """What `_by_bytes` does, for a processor without byte dot products."""
    above = np.uint64(0)
    for g in range(4):
        for lane in range(16):
            total = offsets[g]
            for word in range(codes.shape[1]):
                for place in range(4):
                    code = np.int32(codes[at, word, lane, place])
                    if len(parts) == 1:
                        total += code * np.int32(queries[g, 4 * word + place])
                    else:
                        total += (code & 15) * np.int32(queries[g, 8 * word + place])
                        total += (code >> 4) * np.int32(queries[g, 8 * word + 4 + place])
            block[g, lane] = np.float32(total) * scales[at, lane]
            if block[g, lane] > floor[g]:
                above |= np.uint64(1) << np.uint64(16 * g + lane)
    return above


@intrinsic
def _by_bytes(
    context: Any,
    codes: Any,
    scales: Any,
    queries: Any,
    offsets: Any,
    floor: Any,
    block: Any,
    at: Any,
    parts: Any,
) -> Any:
    """Scores `[4, 16]` of a block, and the bits `16 g + lane` of those above `floor [4]`.

    parts: a tuple as long as a byte has codes.
    """
    signature = types.uint64(codes, scales, queries, offsets, floor, block, at, parts)

    def generate(target: Any, build: Any, signature: Any, arguments: Any) -> Any:
        arrays = [
            target.make_array(kind)(target, build, value)
            for kind, value in zip(signature.args[:6], arguments[:6], strict=True)
        ]
        words = build.extract_value(arrays[0].shape, 1)
        codes, scales, queries, offsets, floor, block = (
            build.bitcast(array.data, ir.IntType(8).as_pointer()) for array in arrays
        )
        at, parts = arguments[6], signature.args[7].count
        dot = cgutils.get_or_insert_function(  # type: ignore[no-untyped-call]
            build.module, ir.FunctionType(_SUMS, [_SUMS] * 3), "llvm.x86.avx512.vpdpbusd.512"
        )

        def load(base: Any, offset: Any, kind: Any) -> Any:
            return build.load(build.bitcast(build.gep(base, [offset]), kind.as_pointer()), align=1)

        def spread(number: Any, kind: Any) -> Any:
            one = build.insert_element(ir.Constant(kind, ir.Undefined), number, _INT32(0))
            return build.shuffle_vector(one, one, ir.Constant(_SUMS, [0] * LANES))

        start = build.mul(build.mul(at, words), _INT64(4 * LANES))
        query_bytes = build.mul(words, _INT64(4 * parts))
        keep: Any = cgutils.alloca_once_value
        sums = [keep(build, spread(load(offsets, _INT64(4 * g), _INT32), _SUMS)) for g in range(GROUP)]
        with cgutils.for_range(build, words) as loop:
            code = load(codes, build.add(start, build.mul(loop.index, _INT64(4 * LANES))), _SUMS)
            halves = [code] if parts == 1 else _halves(build, code)
            word = build.mul(loop.index, _INT64(4 * parts))
            for g in range(GROUP):
                for part, half in enumerate(halves):
                    place = build.add(build.mul(query_bytes, _INT64(g)), build.add(word, _INT64(4 * part)))
                    query = spread(load(queries, place, _INT32), _SUMS)
                    build.store(build.call(dot, [build.load(sums[g]), half, query]), sums[g])
        scale = load(scales, build.mul(at, _INT64(4 * LANES)), _FLOATS)
        above = _INT64(0)
        for g in range(GROUP):
            score = build.fmul(build.sitofp(build.load(sums[g]), _FLOATS), scale)
            place = build.gep(block, [_INT64(4 * LANES * g)])
            build.store(score, build.bitcast(place, _FLOATS.as_pointer()), align=4)
            least = spread(load(floor, _INT64(4 * g), ir.FloatType()), _FLOATS)
            mask = build.bitcast(build.fcmp_ordered(">", score, least), ir.IntType(LANES))
            above = build.or_(above, build.shl(build.zext(mask, _INT64), _INT64(LANES * g)))
        return above

    return signature, generate


def _halves(build: Any, code: Any) -> list[Any]:
    low, four = ir.Constant(_SUMS, [0x0F0F0F0F] * LANES), ir.Constant(_SUMS, [4] * LANES)
    return [build.and_(code, low), build.and_(build.lshr(code, four), low)]


_score_block: Any = _by_bytes if HAS_VNNI else score_block_plainly
