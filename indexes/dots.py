"""Inner products of 4-bit codes with 8-bit queries, sixteen keys at a time.

A block is sixteen keys of D channels, D a multiple of 8: uint8 `[D / 8, 16, 4]`, so that one 512-bit word
holds eight channels of every key. In byte b of group g, the low half is channel 8 g + b, the high half
channel 8 g + 4 + b, each an unsigned code of 0 to 15. Queries come in fours, int8 in the order of
`pack_queries`. Products are whole numbers, so that every form below gives the same: AVX-512 VNNI multiplies
and adds 64 codes in one instruction, AVX2 32 codes in three, and plain vector operations serve all other
processors.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from indexes.rows.processor import features

BLOCK = 16  # keys
GROUP = 8  # channels
QUERIES = 4
WORD = 64  # bytes: a group of channels of a block

_BYTE, _SHORT, _INT, _LONG = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_FLOAT = ir.FloatType()


@njit(nogil=True, cache=True)
def pack_queries(queries: Any, packed: Any) -> None:
    """Four queries int8 `[4, D]` to `packed` int8 `[D / 8, 2, 4, 4]`: for each group of channels its halves,
    in each half the queries, of each query four channels.
    """
    for q in range(QUERIES):
        for d in range(queries.shape[1]):
            packed[d // GROUP, (d // 4) % 2, q, d % 4] = queries[q, d]


def _compiled(multiply: Any) -> Any:
    """`scored(codes, scales, first, count, groups, queries, terms, scores, masks)`: scores of `count` blocks
    from block `first`, float32 `[count, 4, 16]`, and uint16 `[count, 4]` with a bit for each above its floor.

    A score is near + (product - offset) · scale · unit: `terms` float32 `[4, 4]` are near, unit, offset and
    floor of the four queries, `scales` float32 the keys' own. `multiply(builder, sums, codes, query)` adds to
    sixteen 32-bit sums the products of sixteen times four unsigned codes with four signed bytes.
    """

    @intrinsic
    def scored(
        _: Any,
        codes: Any,
        scales: Any,
        first: Any,
        count: Any,
        groups: Any,
        queries: Any,
        terms: Any,
        scores: Any,
        masks: Any,
    ) -> Any:
        number = types.int64
        signature = types.void(codes, scales, number, number, number, queries, terms, scores, masks)

        def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            pointers = {
                place: builder.bitcast(
                    context.make_array(kind)(context, builder, value).data, _BYTE.as_pointer()
                )
                for place, (kind, value) in enumerate(zip(signature.args, given, strict=True))
                if isinstance(kind, types.Array)
            }
            _emit(builder, multiply, *(pointers.get(place, value) for place, value in enumerate(given)))
            return context.get_dummy_value()

        return signature, generate

    return scored


def _emit(
    builder: Any,
    multiply: Any,
    codes: Any,
    scales: Any,
    first: Any,
    count: Any,
    groups: Any,
    queries: Any,
    terms: Any,
    scores: Any,
    masks: Any,
) -> None:
    sixteen, floats = ir.VectorType(_INT, BLOCK), ir.VectorType(_FLOAT, BLOCK)
    low, four, zero = (ir.Constant(sixteen, [value] * BLOCK) for value in (0x0F0F0F0F, 4, 0))
    number = partial(ir.Constant, _LONG)
    sums = [cgutils.alloca_once(builder, sixteen) for _ in range(QUERIES)]
    near, unit, offset, floor = (
        [
            _splat(builder, builder.load(_at(builder, terms, number(16 * term + 4 * q), _FLOAT)), floats)
            for q in range(QUERIES)
        ]
        for term in range(4)
    )
    with cgutils.for_range(builder, count) as blocks:
        for total in sums:
            builder.store(zero, total)
        block = builder.add(first, blocks.index)
        start = builder.mul(block, builder.mul(groups, number(WORD)))
        with cgutils.for_range(builder, groups) as group:
            place = builder.add(start, builder.mul(group.index, number(WORD)))
            word = builder.load(_at(builder, codes, place, sixteen), align=1)
            halves = builder.and_(word, low), builder.and_(builder.lshr(word, four), low)
            for q, total in enumerate(sums):
                added = builder.load(total)
                for half, part in enumerate(halves):
                    own = builder.add(builder.mul(group.index, number(32)), number(16 * half + 4 * q))
                    query = builder.load(_at(builder, queries, own, _INT), align=1)
                    added = multiply(builder, added, part, _splat(builder, query, sixteen))
                builder.store(added, total)
        scale = builder.load(_at(builder, scales, builder.mul(block, number(64)), floats), align=4)
        for q, total in enumerate(sums):
            product = builder.fsub(builder.sitofp(builder.load(total), floats), offset[q])
            score = builder.fadd(near[q], builder.fmul(product, builder.fmul(scale, unit[q])))
            own = builder.add(builder.mul(blocks.index, number(QUERIES)), number(q))
            builder.store(score, _at(builder, scores, builder.mul(own, number(64)), floats), align=4)
            above = builder.bitcast(builder.fcmp_ordered(">", score, floor[q]), _SHORT)
            builder.store(above, _at(builder, masks, builder.mul(own, number(2)), _SHORT), align=1)


def _at(builder: Any, base: Any, offset: Any, kind: Any) -> Any:
    return builder.bitcast(builder.gep(base, [offset]), kind.as_pointer())


def _splat(builder: Any, value: Any, kind: Any) -> Any:
    nothing = ir.Constant(kind, ir.Undefined)
    single = builder.insert_element(nothing, value, ir.Constant(_INT, 0))
    return builder.shuffle_vector(single, nothing, ir.Constant(ir.VectorType(_INT, BLOCK), [0] * BLOCK))


def _with_vnni(builder: Any, sums: Any, codes: Any, query: Any) -> Any:
    kind = sums.type
    name = "llvm.x86.avx512.vpdpbusd.512"
    function = builder.module.declare_intrinsic(name, (), ir.FunctionType(kind, [kind] * 3))
    return builder.call(function, [sums, codes, query])


def _with_avx2(builder: Any, sums: Any, codes: Any, query: Any) -> Any:
    """In two halves. Sums of two products of codes up to 15 fit into the 16 bits of the first step."""
    bytes32, words16, ints8 = (ir.VectorType(ir.IntType(bits), 256 // bits) for bits in (8, 16, 32))
    pairs = builder.module.declare_intrinsic(
        "llvm.x86.avx2.pmadd.ub.sw", (), ir.FunctionType(words16, [bytes32] * 2)
    )
    fours = builder.module.declare_intrinsic(
        "llvm.x86.avx2.pmadd.wd", (), ir.FunctionType(ints8, [words16] * 2)
    )
    ones = ir.Constant(words16, [1] * 16)
    added = []
    for half in range(2):
        lanes = ir.Constant(ir.VectorType(_INT, 8), [8 * half + lane for lane in range(8)])
        own, code, by = (builder.shuffle_vector(part, part, lanes) for part in (sums, codes, query))
        product = builder.call(pairs, [builder.bitcast(code, bytes32), builder.bitcast(by, bytes32)])
        added.append(builder.add(own, builder.call(fours, [product, ones])))
    every = ir.Constant(ir.VectorType(_INT, BLOCK), list(range(BLOCK)))
    return builder.shuffle_vector(*added, every)


def _with_vectors(builder: Any, sums: Any, codes: Any, query: Any) -> Any:
    """In vector operations that every processor has, or that LLVM takes apart for it."""
    bytes64 = ir.VectorType(_BYTE, WORD)
    for b in range(4):
        lanes = ir.Constant(ir.VectorType(_INT, BLOCK), list(range(b, WORD, 4)))
        code, by = (builder.bitcast(part, bytes64) for part in (codes, query))
        code = builder.zext(builder.shuffle_vector(code, code, lanes), sums.type)
        by = builder.sext(builder.shuffle_vector(by, by, lanes), sums.type)
        sums = builder.add(sums, builder.mul(code, by))
    return sums


def forms() -> dict[str, Any]:
    """The forms that this processor runs, and numba is allowed to use, the fastest first."""
    known = {"avx512vnni": _with_vnni, "avx2": _with_avx2}
    own = {name: _compiled(multiply) for name, multiply in known.items() if name in features()}
    return {**own, "vectors": _compiled(_with_vectors)}


scored = next(iter(forms().values()))
