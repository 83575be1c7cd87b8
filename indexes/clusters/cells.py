"""Cells: a head's keys grouped by k-means, each as 4-bit codes of its difference from the cell's mean.

A key that queries score far above the rest of its cell is a cell of its own, whose bound is its exact score.
An attention sink is one: its key is short, so that k-means puts it among ordinary keys, and for the queries
that attend to it, it lies beyond the deviations at which a cell is pruned.
"""

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from math import ceil
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from offload_decode.common.errors import InvalidIndexInput
from offload_decode.common.rows import encodings, scan, threads
from offload_decode.common.rows.arrays import Float32, Keys, drawn, float32_blocks
from offload_decode.indexes import files
from offload_decode.indexes.clusters.dot4 import BLOCK, GROUP, WORD

KEYS_PER_CELL = 256  # smaller cells are bounded tighter, and cost more to build and to bound
SEGMENT = 1 << 18  # keys that are clustered among themselves, so that building is linear beyond
_TRAINED = 1024  # training keys for each centroid that tells segments apart
_LABELLED = 1 << 16  # keys at a time
SAMPLE = 64  # training keys a cell
ITERATIONS = 4
_CHECKED = 1024  # cells at a time
APART = 3.5  # standard deviations above its cell's mean at which a query misses a key, as cells are pruned
_APART_SHARE = 1e-4  # of the attention that such queries pay to a key, on average over all queries
_APART_CELLS = 8  # one such key for so many cells at most, and as many in any case
_FAR = 20.0  # deviations beyond which a key is no further away
_ROUNDING = 1e-5  # relative, of a score: keys that are all alike lie no deviations from their mean
LARGEST = 7  # codes are -7 to 7, stored with 8 added
_MET = 4096  # rows that meet all centroids at once
_MOST = 2**31 - 1  # keys


class Wanted(NamedTuple):
    """What Q queries want most: `queries [Q, D]`, ids int64 and scores `[Q, k]` of their best keys."""

    queries: Float32
    ids: npt.NDArray[np.int64]
    scores: Float32


class Cells(NamedTuple):
    """N keys in C cells, each of whole blocks of 16 keys, the last one padded.

    starts: int64 `[C + 1]`, in blocks. counts: int32 `[C]`, keys. means, variances: float32 `[C, D]`. codes:
    uint8, flat, see `dot4`. scales: float32 `[blocks · 16]`. ids: int32 `[blocks · 16]`, -1 where
    there is no key.
    """

    starts: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int32]
    means: Float32
    variances: Float32
    codes: npt.NDArray[np.uint8]
    scales: Float32
    ids: npt.NDArray[np.int32]

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self)


def check(cells: Cells, n: int) -> bool:
    """True; raises RuntimeError unless these are n keys' cells: sizes and ids that fit, finite numbers."""
    starts, counts, ids = cells.starts, cells.counts, cells.ids
    if n == 0:
        return True
    if counts.min(initial=1) < 1 or counts.sum(dtype=np.int64) != n:
        raise RuntimeError("the sizes of its cells are not those of its keys")
    if (starts != np.concatenate([[0], _blocks(counts).cumsum()])).any() or starts[-1] * BLOCK != len(ids):
        raise RuntimeError("its cells do not begin where others end")
    named = np.zeros(n, np.bool_)
    for first in range(0, len(counts), _CHECKED):
        last = min(first + _CHECKED, len(counts))
        begin, end = int(starts[first]) * BLOCK, int(starts[last]) * BLOCK
        own = ids[begin:end]
        real = own >= 0
        held = np.add.reduceat(real, starts[first:last] * BLOCK - begin, dtype=np.int64)
        if (held != counts[first:last]).any():
            raise RuntimeError("its cells do not have as many keys as they say")
        if own.min() < -1 or own.max() >= n:
            raise RuntimeError("it names keys that there are not")
        named[own[real]] = True
        parts = (cells.means[first:last], cells.variances[first:last], cells.scales[begin:end])
        if not all(np.isfinite(part).all() for part in parts):
            raise RuntimeError("its numbers are not finite")
    if not named.all():
        raise RuntimeError("it names a key twice")
    return True


def _blocks(counts: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    return -(-counts.astype(np.int64) // BLOCK)


def build(keys: Keys, wanted: Wanted | None = None) -> Cells:
    """Cells of `keys [N, D]`, or `[N]` of encoded rows; with `wanted`, keys far from their cell along queries
    that want them are cells of their own. Raises InvalidIndexInput unless the keys are finite.

    Beyond a segment they lie in temporary files, so that memory grows by only twelve bytes a key before the
    first segment and four from then on.
    """
    if len(keys) > _MOST:
        raise InvalidIndexInput(f"At most {_MOST:,} keys can be clustered, got {len(keys):,}; split them.")
    if len(keys) <= SEGMENT:
        return _of_a_segment(keys, wanted)
    with ExitStack() as open_:
        parts = {name: open_.enter_context(tempfile.TemporaryFile()) for name in Cells._fields}
        blocks = 0
        for segment in _segments(keys, np.arange(len(keys), dtype=np.int32)):
            own = _of_a_segment(keys[segment], wanted and _within(wanted, segment))
            moved = own._replace(
                starts=blocks + own.starts[1 if blocks else 0 :],
                ids=np.where(own.ids < 0, -1, segment[own.ids]),
            )
            for file, part in zip(parts.values(), moved, strict=True):
                file.write(np.ascontiguousarray(part).data)
            blocks += int(own.starts[-1])
        return Cells(**{name: _mapped(parts[name], part) for name, part in own._asdict().items()})


def _segments(keys: Keys, ids: npt.NDArray[np.int32]) -> Iterator[npt.NDArray[np.int32]]:
    """The keys `ids` in segments of similar ones: cells bound these tighter than stretches of the text."""
    if len(ids) <= SEGMENT:
        yield ids
        return
    rng, count = np.random.default_rng(0), 2 * ceil(len(ids) / SEGMENT)
    centroids = _centroids(drawn(keys, _TRAINED * count, rng, ids), count, rng)
    labels = np.empty(len(ids), np.int32)
    for first in range(0, len(ids), _LABELLED):
        part = slice(first, first + _LABELLED)
        labels[part] = nearest(encodings.decode(keys[ids[part]]), centroids)[0]
    groups = [ids[labels == label] for label in np.unique(labels)]
    if len(groups) == 1:  # all are alike
        groups = np.array_split(ids, count)
    del ids, labels  # a segment that is yielded is at work for long
    while groups:
        yield from _segments(keys, groups.pop())


def _mapped(file: IO[bytes], like: npt.NDArray[Any]) -> npt.NDArray[Any]:
    file.flush()
    rows: npt.NDArray[Any] = np.memmap(file, like.dtype, "r").reshape(-1, *like.shape[1:])
    return rows


def _within(wanted: Wanted, segment: npt.NDArray[np.int32]) -> Wanted:
    """With the places of keys in a segment, whose ids ascend, for ids; -1 for keys that are elsewhere."""
    places = np.searchsorted(segment, wanted.ids).clip(max=len(segment) - 1)
    return wanted._replace(ids=np.where(segment[places] == wanted.ids, places, -1))


def _of_a_segment(keys: Keys, wanted: Wanted | None) -> Cells:
    used, labels = np.unique(_labels(keys), return_inverse=True)
    if wanted is not None and len(keys):
        counts = np.bincount(labels, minlength=len(used)).astype(np.int32)
        apart = _apart(labels, *_moments(keys, labels, counts), wanted)
        labels[apart] = len(used) + np.arange(len(apart))
        used, labels = np.unique(labels, return_inverse=True)
    counts = np.bincount(labels, minlength=len(used)).astype(np.int32)
    means, variances = _moments(keys, labels, counts)
    starts = np.concatenate([[0], _blocks(counts).cumsum()])
    ids = np.full(starts[-1] * BLOCK, -1, np.int32)
    order = np.argsort(labels, kind="stable")
    first = np.concatenate([[0], counts.cumsum(dtype=np.int64)])[:-1]
    ids[np.arange(len(keys)) + np.repeat(starts[:-1] * BLOCK - first, counts)] = order
    codes, scales = _encoded(keys, means, starts, ids)
    return Cells(starts, counts, means, variances, codes, scales, ids)


def _apart(
    labels: npt.NDArray[np.int64], means: Float32, variances: Float32, wanted: Wanted
) -> npt.NDArray[np.int64]:
    """The keys that are to be cells of their own: first those that lose the most attention, times how many
    deviations they lie beyond those at which a query misses them. More deviations, which all cells then take,
    find those that lie just beyond; of a sink that few queries want they would be many.
    """
    queries, ids, scores = wanted
    weights = np.exp((scores - scores.max(axis=1, keepdims=True)) / np.sqrt(means.shape[1]))
    weights /= weights.sum(axis=1, keepdims=True) * len(queries)
    own = labels[ids]
    near = np.take_along_axis(queries @ means.T, own, 1)
    spread = np.take_along_axis(np.sqrt(queries**2 @ variances.T), own, 1)
    least = _ROUNDING * np.abs(scores) + np.finfo(np.float32).tiny
    beyond = (scores - near) / np.maximum(spread, least) - APART
    missed = (beyond > 0) & (ids >= 0)
    weights, beyond, ids = weights[missed], np.minimum(beyond[missed], _FAR), ids[missed]
    lost = np.bincount(ids, weights, minlength=len(labels))
    urgent = np.bincount(ids, weights * beyond, minlength=len(labels))
    most = len(means) // _APART_CELLS + _APART_CELLS
    listed = np.flatnonzero(lost > _APART_SHARE)
    return listed[np.argsort(-urgent[listed], kind="stable")[:most]]


def joined(first: Cells, more: Cells) -> Cells:
    """The cells of keys, and those of the keys that follow them."""
    n = int(first.counts.sum(dtype=np.int64))
    together = {
        name: np.concatenate([one, other])
        for name, one, other in zip(Cells._fields, first, more, strict=True)
    }
    together["starts"] = np.concatenate([first.starts, first.starts[-1] + more.starts[1:]])
    together["ids"] = np.concatenate([first.ids, np.where(more.ids < 0, -1, more.ids + np.int32(n))])
    return Cells(**together)


def _labels(keys: Keys) -> npt.NDArray[np.int64]:
    if not len(keys):
        return np.zeros(0, np.int64)
    count = max(1, round(len(keys) / KEYS_PER_CELL))
    rng = np.random.default_rng(0)
    centroids = _centroids(drawn(keys, SAMPLE * count, rng), count, rng)
    return np.concatenate([nearest(block, centroids)[0] for _, block in float32_blocks(keys)])


def _centroids(sample: Float32, count: int, rng: np.random.Generator) -> Float32:
    return lloyd(sample, sample[np.sort(rng.choice(len(sample), count, replace=False))], ITERATIONS)


def lloyd(rows: Float32, centroids: Float32, iterations: int) -> Float32:
    """Centroids `[C, D]` moved to the means of the `rows [n, D]` nearest to them; an empty one stays. It is
    Euclidean: this estimated attention as well as clusters of unit vectors did, and needs no norms.
    """
    centroids = centroids.copy()
    for _ in range(iterations):
        labels, _ = nearest(rows, centroids)
        order = np.argsort(labels, kind="stable")
        sizes = np.bincount(labels, minlength=len(centroids))
        filled = sizes > 0
        first = np.concatenate([[0], sizes.cumsum()])[:-1][filled]
        centroids[filled] = np.add.reduceat(rows[order], first, axis=0) / sizes[filled, None]
    return centroids


def nearest(block: Float32, centroids: Float32) -> tuple[npt.NDArray[np.int64], Float32]:
    """The centroid c at the smallest distance from each row k, and k·c − |c|²/2: `[n]` each."""
    labels, best = np.empty(len(block), np.int64), np.empty(len(block), np.float32)
    norms = 0.5 * np.einsum("cd,cd->c", centroids, centroids)
    for first in range(0, len(block), _MET):
        part = slice(first, first + _MET)
        closeness = block[part] @ centroids.T
        closeness -= norms
        labels[part] = closeness.argmax(axis=1)
        best[part] = np.take_along_axis(closeness, labels[part, None], 1)[:, 0]
    return labels, best


def _moments(
    keys: Keys, labels: npt.NDArray[np.int64], counts: npt.NDArray[np.int32]
) -> tuple[Float32, Float32]:
    sums = np.zeros((len(counts), encodings.dim(keys)), np.float64)
    squares = np.zeros_like(sums)
    for first, block in float32_blocks(keys):
        _accumulate(block, labels[first : first + len(block)], sums, squares)
    means = sums / counts[:, None]
    variances = np.maximum(squares / counts[:, None] - means**2, 0)
    return means.astype(np.float32), variances.astype(np.float32)


def _encoded(
    keys: Keys, means: Float32, starts: npt.NDArray[np.int64], ids: npt.NDArray[np.int32]
) -> tuple[npt.NDArray[np.uint8], Float32]:
    groups = -(-means.shape[1] // GROUP)
    codes = files.aligned(np.zeros(len(ids) // BLOCK * groups * WORD, np.uint8))
    scales = np.zeros(len(ids), np.float32)
    bits, layout = scan.bits(keys), scan.layout(keys)
    bounds = np.linspace(0, len(means), 8 * threads.THREADS + 1).astype(np.int64)

    def encode(part: int) -> None:
        _encode_cells(
            bits, layout, means, starts, ids, int(bounds[part]), int(bounds[part + 1]), codes, scales
        )

    threads.run(encode, range(len(bounds) - 1))
    return codes, scales


@njit(nogil=True, cache=True)
def _accumulate(block: Any, labels: Any, sums: Any, squares: Any) -> None:
    for row in range(len(block)):
        for d in range(block.shape[1]):
            value = np.float64(block[row, d])
            sums[labels[row], d] += value
            squares[labels[row], d] += value * value


@njit(nogil=True, cache=True)
def _encode_cells(
    bits: Any, layout: int, means: Any, starts: Any, ids: Any, first: int, last: int, codes: Any, scales: Any
) -> None:
    """Codes and scales of cells `first:last`; a channel that no key has is coded as zero."""
    dim = means.shape[1]
    groups = -(-dim // GROUP)
    rest = np.zeros(groups * GROUP, np.float32)
    for c in range(first, last):
        for place in range(starts[c] * BLOCK, starts[c + 1] * BLOCK):
            rest[:] = 0
            largest = np.float32(0)
            if ids[place] >= 0:
                scan.widen_row(bits[ids[place]], layout, rest[:dim])
                for d in range(dim):
                    rest[d] -= means[c, d]
                    largest = max(largest, abs(rest[d]))
            scale = largest / np.float32(LARGEST)
            scales[place] = scale
            inverse = np.float32(1) / scale if scale > 0 else np.float32(0)
            base = place // BLOCK * groups * WORD + 4 * (place % BLOCK)
            for g in range(groups):
                for b in range(4):
                    low = np.int32(np.rint(rest[GROUP * g + b] * inverse)) + 8
                    high = np.int32(np.rint(rest[GROUP * g + 4 + b] * inverse)) + 8
                    codes[base + g * WORD + b] = low | (high << 4)
