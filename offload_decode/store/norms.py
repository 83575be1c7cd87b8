"""Lengths of the stored keys, which cosine scores divide by (QuoKA, §3.2)."""

from __future__ import annotations

import numpy as np

from offload_decode.store.format import Array


def row_norms(keys: Array) -> Array:
    """Euclidean lengths `[Hkv, T, 1]` float32 of `keys [Hkv, T, D]`.

    Each row is summed on its own, so that the bytes do not depend on how the tokens were grouped.
    """
    wide = keys.astype(np.float32)
    norms: Array = np.sqrt((wide * wide).sum(axis=-1, keepdims=True, dtype=np.float32))
    return norms
