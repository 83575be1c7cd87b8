"""Inner products of 4-bit codes with 8-bit queries, sixteen keys at a time.

A block is sixteen keys of D channels, D a multiple of 8: uint8 `[D / 8, 16, 4]`, so that one 512-bit word
holds eight channels of every key. In byte b of group g, the low half is channel 8 g + b, the high half
channel 8 g + 4 + b, each an unsigned code of 0 to 15. Queries come in fours, int8 `[D / 8, 2, 4, 4]`: for
each group of channels its halves, in each half the queries, of each query four channels. Products are whole
numbers, so that every form below gives the same: AVX-512 VNNI multiplies and adds 64 codes in one
instruction, AVX2 32 codes in three, and plain vector operations serve all other processors.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from offload_decode.common.rows.compiled import features
from offload_decode.common.rows.loops import prefetch

BLOCK = 16  # keys
GROUP = 8  # channels
QUERIES = 4
WORD = 64  # bytes: a group of channels of a block
TOGETHER = 2  # blocks whose sums are added up in turns: a sum waits for its last addition

_BYTE, _SHORT, _INT, _LONG = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_FLOAT = ir.FloatType()


def _compiled(multiply: Any) -> Any:
    """`scored(codes, scales, first, count, after, groups, queries, terms, scores, masks)`: scores of `count`
    blocks from block `first`, float32 `[count, 4, 16]`, and uint16 `[count, 4]` with a bit for each above its
    threshold. As many blocks from `after` on, which come next, are fetched meanwhile.

    A score is near + (product - offset) · scale · unit: `terms` float32 `[4, 4]` are near, unit, offset and
    threshold of the four queries, `scales` float32 the keys' own. `multiply(builder, sums, codes, query)`
    adds to sixteen 32-bit sums the products of sixteen times four unsigned codes with four signed bytes.
    """

    @intrinsic
    def scored(
        _: Any,
        codes: Any,
        scales: Any,
        first: Any,
        count: Any,
        after: Any,
        groups: Any,
        queries: Any,
        terms: Any,
        scores: Any,
        masks: Any,
    ) -> Any:
        number = types.int64
        signature = types.void(codes, scales, *[number] * 4, queries, terms, scores, masks)

        def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            pointers = {
                place: builder.bitcast(
                    context.make_array(kind)(context, builder, value).data, _BYTE.as_pointer()
                )
                for place, (kind, value) in enumerate(zip(signature.args, given, strict=True))
                if isinstance(kind, types.Array)
            }
            _emit(builder, multiply, [pointers.get(place, value) for place, value in enumerate(given)])
            return context.get_dummy_value()

        return signature, generate

    return scored


def _emit(builder: Any, multiply: Any, given: Sequence[Any]) -> None:
    codes, scales, first, count, after, groups, queries, terms, scores, masks = given
    number = partial(ir.Constant, _LONG)
    floats = ir.VectorType(_FLOAT, BLOCK)
    rows = [
        [
            _splat(builder, builder.load(_at(builder, terms, number(16 * term + 4 * q), _FLOAT)), floats)
            for q in range(QUERIES)
        ]
        for term in range(4)
    ]

    def several(blocks: Any, together: int) -> None:
        ahead = builder.mul(builder.sub(after, first), builder.mul(groups, number(WORD)))
        own = builder.add(first, blocks)
        products = _products(builder, multiply, codes, own, ahead, groups, queries, together)
        for other, totals in enumerate(products):
            own = builder.add(blocks, number(other))
            place = builder.mul(builder.add(first, own), number(WORD))
            scale = builder.load(_at(builder, scales, place, floats), align=4)
            for q, (near, unit, offset, threshold) in enumerate(zip(*rows, strict=True)):
                product = builder.fsub(builder.sitofp(totals[q], floats), offset)
                score = builder.fadd(near, builder.fmul(product, builder.fmul(scale, unit)))
                line = builder.add(builder.mul(own, number(QUERIES)), number(q))
                builder.store(score, _at(builder, scores, builder.mul(line, number(WORD)), floats), align=4)
                above = builder.bitcast(builder.fcmp_ordered(">", score, threshold), _SHORT)
                builder.store(above, _at(builder, masks, builder.mul(line, number(2)), _SHORT), align=1)

    pairs = builder.udiv(count, number(TOGETHER))
    with cgutils.for_range(builder, pairs) as loop:
        several(builder.mul(loop.index, number(TOGETHER)), TOGETHER)
    with cgutils.for_range(builder, builder.urem(count, number(TOGETHER))) as loop:
        several(builder.add(builder.mul(pairs, number(TOGETHER)), loop.index), 1)


def _products(
    builder: Any, multiply: Any, codes: Any, block: Any, ahead: Any, groups: Any, queries: Any, together: int
) -> list[list[Any]]:
    """For each block from `block` on and each query: sixteen 32-bit sums, the products with its keys."""
    sixteen = ir.VectorType(_INT, BLOCK)
    low, four, zero = (ir.Constant(sixteen, [value] * BLOCK) for value in (0x0F0F0F0F, 4, 0))
    number = partial(ir.Constant, _LONG)
    sums = [[cgutils.alloca_once_value(builder, zero) for _ in range(QUERIES)] for _ in range(together)]
    for total in (total for own in sums for total in own):
        builder.store(zero, total)
    size = builder.mul(groups, number(WORD))
    starts = [builder.mul(builder.add(block, number(other)), size) for other in range(together)]
    with cgutils.for_range(builder, groups) as group:
        along = builder.mul(group.index, number(WORD))
        halves = []
        for start in starts:
            place = builder.add(start, along)
            prefetch(builder, builder.gep(codes, [builder.add(place, ahead)]))
            word = builder.load(_at(builder, codes, place, sixteen), align=1)
            halves.append((builder.and_(word, low), builder.and_(builder.lshr(word, four), low)))
        for half in range(2):
            for q in range(QUERIES):
                own = builder.add(builder.mul(group.index, number(32)), number(16 * half + 4 * q))
                query = _splat(builder, builder.load(_at(builder, queries, own, _INT), align=1), sixteen)
                for total, parts in zip(sums, halves, strict=True):
                    builder.store(multiply(builder, builder.load(total[q]), parts[half], query), total[q])
    return [[builder.load(total) for total in own] for own in sums]


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
