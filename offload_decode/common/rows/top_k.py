"""The best of many candidates, by digits of their scores: comparisons would be guessed wrong."""

from typing import Any

import numpy as np
from numba import njit

from offload_decode.common.rows.scan import candidate, ordered, score_and_row

_DIGIT = 11  # bits of a score that are looked at together
_MASK = (1 << _DIGIT) - 1
_PLACES = 3  # digits of a score


@njit(nogil=True, cache=True)
def keep_largest(best: Any, places: Any, fill: int, wanted: int) -> Any:
    """Keeps exactly the `wanted` largest of more, by the first 22 bits of their order; how many."""
    edge, room = np.uint32(0), wanted
    held = np.empty(1 << _DIGIT, np.int64)
    for turn in range(2):
        shift = 32 - (turn + 1) * _DIGIT
        held[:] = 0
        for i in range(fill):
            bits = ordered(best[i]) >> shift
            held[bits & _MASK] += bits >> _DIGIT == edge
        digit = _MASK
        while held[digit] < room:
            room -= held[digit]
            digit -= 1
        edge = np.uint32((edge << _DIGIT) | digit)
    kept = 0
    for i in range(fill):
        score = best[i]
        bits = ordered(score) >> shift
        room -= int(bits == edge)
        keep = int(bits > edge) | (int(bits == edge) & int(room >= 0))
        best[kept], places[kept] = score, places[i]
        kept += keep
    return kept


@njit(nogil=True, cache=True)
def sort(best: Any, places: Any, found: Any, scores: Any) -> None:
    """The best of all candidates in order, of equal scores the lower id first: by digits, from the last."""
    count = len(best)
    turns = np.empty((2, count), np.uint64)
    starts = np.zeros((_PLACES, _MASK + 2), np.int32)
    for i in range(count):
        turns[0, i] = ~candidate(best[i], places[i])
        for place in range(_PLACES):
            starts[place, 1 + _digit(turns[0, i], place)] += 1
    for place in range(_PLACES):
        for digit in range(_MASK):
            starts[place, digit + 1] += starts[place, digit]
        given, taken = turns[place % 2], turns[1 - place % 2]
        for i in range(count):
            digit = _digit(given[i], place)
            taken[starts[place, digit]] = given[i]
            starts[place, digit] += 1
    done = turns[_PLACES % 2]
    start = 0
    for i in range(1, count + 1):
        if i == count or done[i] >> np.uint64(32) != done[start] >> np.uint64(32):
            if i > start + 1:
                done[start:i].sort()
            start = i
    for j in range(min(len(found), count)):
        scores[j], found[j] = score_and_row(~done[j])


@njit(nogil=True, cache=True)
def join(ids: Any, scores: Any, counts: Any, found: Any, joined: Any) -> None:
    """What was found in P parts of a head's keys, `ids` and `scores [P, H, R, k]` of which `counts [P, H, R]`
    are there, as one search gives it: to `found` and `joined [H, R, k]`.
    """
    parts, heads, rows, k = ids.shape
    best, places = np.empty(parts * k, np.float32), np.empty(parts * k, np.int32)
    for head in range(heads):
        for row in range(rows):
            fill = 0
            for part in range(parts):
                count = counts[part, head, row]
                best[fill : fill + count] = scores[part, head, row, :count]
                places[fill : fill + count] = ids[part, head, row, :count]
                fill += count
            sort(best[:fill], places[:fill], found[head, row], joined[head, row])


@njit(nogil=True, cache=True, inline="always")
def _digit(turned: Any, place: int) -> Any:
    return (turned >> np.uint64(32 + _DIGIT * place)) & np.uint64(_MASK)
