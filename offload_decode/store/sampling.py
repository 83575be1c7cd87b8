"""Which prefill queries a store keeps: such that those of a longer corpus are, of its beginning, all kept."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]

_GOLDEN = 2654435769  # 2^32 divided by the golden ratio: its multiples are spread evenly modulo 2^32


def sample_plan(n_tokens: int, group: int, n: int) -> tuple[Int64s, Int64s]:
    """Positions and heads (within the GQA group) of `n` queries spread evenly over `n_tokens` tokens.

    Both are int64 `[min(n, n_tokens * group)]`, ordered by position, then head; no pair comes twice. The
    pairs of a longer corpus that lie in a shorter one are pairs of the shorter one too, for as many samples.
    """
    each, more = divmod(min(n, n_tokens * group), n_tokens)
    every = np.arange(n_tokens * each, dtype=np.int64)
    positions = np.concatenate([every // max(each, 1), _spread(n_tokens, more)])
    turns = np.concatenate([every % max(each, 1), np.full(more, each)])
    first = ((positions * _GOLDEN) % 2**32 * group) >> 32
    pairs = np.sort(positions * group + (first + turns) % group)
    return pairs // group, pairs % group


def _spread(m: int, n: int) -> Int64s:
    """`n` of the numbers below `m`, in order: the first n of them in an order that does not depend on `m`.

    Counted from 1, the multiples of a power of two come first; between them, those of its half, which are
    themselves taken in that order.
    """
    if n in (0, m):
        return np.arange(n, dtype=np.int64)
    step = 1 << (m // (n + 1)).bit_length()  # the smallest power of two with m // step <= n
    regular, half = np.arange(step - 1, m, step), step // 2
    between = half * (2 * _spread(m // half - len(regular), n - len(regular)) + 1) - 1
    return np.sort(np.concatenate([regular, between]))
