"""The stored rows of all KV heads of a layer in one compiled call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import carray, njit  # type: ignore[attr-defined]

from offload_decode.indexes.rows.addresses import at
from offload_decode.kernels.rows import Rows


class LayerRows(NamedTuple):
    """The keys or values of the H heads of a layer, so that one function is compiled for any number of them.

    addresses: int64 `[H]`, of the heads' bits in `length` rows. like: an array of the kind of these bits,
    with no rows; layout: that of the bits.
    """

    addresses: npt.NDArray[np.int64]
    length: int
    like: npt.NDArray[Any]
    layout: int

    @classmethod
    def of(cls, heads: Sequence[Rows]) -> LayerRows:
        """Heads of one kind, as they are of one layer. They must outlive this."""
        first = heads[0]
        if any(
            (own.layout, own.bits.dtype, own.bits.shape) != (first.layout, first.bits.dtype, first.bits.shape)
            for own in heads
        ):
            raise ValueError("the heads of a layer are stored in different ways")
        if not all(own.bits.flags.c_contiguous for own in heads):
            raise ValueError("rows are read by their addresses: they must lie one behind the other")
        addresses = np.array([own.bits.ctypes.data for own in heads], np.int64)
        return cls(addresses, len(first), np.empty((0, first.bits.shape[1]), first.bits.dtype), first.layout)


@njit(nogil=True, cache=True)
def head_bits(layer: Any, head: int) -> Any:
    """The bits of the rows of one of the heads of `LayerRows`."""
    return carray(at(layer.addresses[head]), (layer.length, layer.like.shape[1]), layer.like.dtype)
