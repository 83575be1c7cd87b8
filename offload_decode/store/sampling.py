"""Which prefill queries a store keeps."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]


def sample_plan(n_tokens: int, group: int, n: int) -> tuple[Int64s, Int64s]:
    """Positions and heads (within the GQA group) of `n` queries spread evenly over `n_tokens` tokens.

    Both are int64 `[min(n, n_tokens * group)]`; positions never decrease, and no (position, head) pair comes
    twice: a position has at most `group` samples, which follow each other and so take different heads.
    """
    n = min(n, n_tokens * group)
    sample = np.arange(n, dtype=np.int64)
    return (2 * sample + 1) * n_tokens // (2 * n), sample % group
