"""Attention that is notable, summed over rows. Compiled: a row that is watched has hundreds of tokens in
every layer, of which a few are notable.
"""

from __future__ import annotations

import math
from typing import Any

from numba import njit


@njit(nogil=True, cache=True)
def add_notable(mass: Any, ids: Any, logits: Any, lse: Any, least: Any) -> None:
    """Add to `mass`, float32 `[N]`, the share of attention of each token in `ids`, int64 `[H, R, K]` (those
    below 0 are none), by its logit and the log-sum-exp of its row, `lse [H, R]`, where the logarithm of the
    share is at `least` so much.
    """
    heads, rows, count = ids.shape
    for head in range(heads):
        for row in range(rows):
            whole = lse[head, row]
            for place in range(count):
                token, share = ids[head, row, place], logits[head, row, place] - whole
                if token >= 0 and share >= least:
                    mass[token] += math.exp(share)
