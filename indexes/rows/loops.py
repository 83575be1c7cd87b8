"""Compiled loops over one stored row, read where it lies: an inner product, a weighted sum.

A row is what `indexes.rows.scan.bits` and `layout` make of it. Callers bound the row numbers: nothing here
does.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from indexes.rows.encodings import SCALE_BYTES
from indexes.rows.numbers import half_to_single, scale_of
from indexes.rows.scan import BRAIN, BYTES, HALF, NIBBLES

_REASSOCIATE = {"reassoc", "contract", "nsz"}  # a sum may be vectorised; NaN and infinity keep their meaning


@njit(nogil=True, cache=True, forceinline=True, fastmath=_REASSOCIATE)
def dot_row(query: Any, bits: Any, layout: int, row: int) -> Any:
    """Inner product of `query [D]` float32 with one row, accumulated in float32."""
    total = np.float32(0)
    if layout == HALF:
        for d in range(len(query)):
            total += query[d] * half_to_single(np.uint16(bits[row, d]))
    elif layout == BRAIN:
        for d in range(len(query)):
            total += query[d] * np.uint32(np.uint32(bits[row, d]) << np.uint32(16)).view(np.float32)
    elif layout == BYTES:
        for d in range(len(query)):
            total += query[d] * np.float32(np.int8(bits[row, SCALE_BYTES + d]))
        total *= scale_of(bits[row])
    elif layout == NIBBLES:
        for d in range(len(query) // 2):
            pair = np.int32(bits[row, SCALE_BYTES + d])
            total += query[2 * d] * np.float32((pair & 15) - 8)
            total += query[2 * d + 1] * np.float32((pair >> 4) - 8)
        total *= scale_of(bits[row])
    else:
        for d in range(len(query)):
            total += query[d] * np.uint32(bits[row, d]).view(np.float32)
    return total


@njit(nogil=True, cache=True, forceinline=True, fastmath={"contract"})
def add_row(out: Any, weight: Any, bits: Any, layout: int, row: int) -> None:
    """Adds `weight` times one row to `out [D]` float32."""
    if layout == HALF:
        for d in range(len(out)):
            out[d] += weight * half_to_single(np.uint16(bits[row, d]))
    elif layout == BRAIN:
        for d in range(len(out)):
            out[d] += weight * np.uint32(np.uint32(bits[row, d]) << np.uint32(16)).view(np.float32)
    elif layout == BYTES:
        scaled = np.float32(weight * scale_of(bits[row]))
        for d in range(len(out)):
            out[d] += scaled * np.float32(np.int8(bits[row, SCALE_BYTES + d]))
    elif layout == NIBBLES:
        scaled = np.float32(weight * scale_of(bits[row]))
        for d in range(len(out) // 2):
            pair = np.int32(bits[row, SCALE_BYTES + d])
            out[2 * d] += scaled * np.float32((pair & 15) - 8)
            out[2 * d + 1] += scaled * np.float32((pair >> 4) - 8)
    else:
        for d in range(len(out)):
            out[d] += weight * np.uint32(bits[row, d]).view(np.float32)
