"""`Rows`: the stored keys or values of one KV head, plain or encoded, read where they lie.

What travels to a device is a row's own bytes; they become floats there. On a host a compiled loop reads them
where they lie, in one pass: torch converts single bytes many times slower. Only rows that are asked for are
ever decoded.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from numba import carray, njit  # type: ignore[attr-defined]
from torch import Tensor

from offload_decode.common.rows import encodings, threads
from offload_decode.common.rows.compiled import at
from offload_decode.common.rows.scan import INT4, INT8, bits, layout, widen_rows


class Rows:
    """N rows of `dim` channels in host memory, over an `array` `[N, D]` of floats or `[N]` of encoded rows.

    bits, layout: what `scan.widen_row` takes. raw: `[N, W]`, the floats, or the bytes of encoded
    rows. row_bytes: what travels for a row.
    """

    def __init__(self, array: npt.NDArray[Any]):
        self.array = array
        self.dim = encodings.dim(array)
        self.layout = layout(array)
        self.bits = bits(array)
        self.row_bytes: int = self.bits.itemsize * self.bits.shape[1]
        self.encoded = self.layout in (INT8, INT4)
        self.raw = tensor_view(self.bits if self.encoded else array)

    def __len__(self) -> int:
        return len(self.bits)

    @property
    def dtype(self) -> torch.dtype:
        """Of the floats that `floats` makes: the stored dtype, or float32 of encoded rows."""
        return torch.float32 if self.encoded else self.raw.dtype

    def floats(self, raw: Tensor) -> Tensor:
        """Rows `[..., W]` of `raw`, on any device, as floats `[..., D]` of `dtype`."""
        if not self.encoded:
            return raw
        scale = raw[..., : encodings.SCALE_BYTES].clone(memory_format=torch.contiguous_format)
        codes = raw[..., encodings.SCALE_BYTES :]
        if self.layout == INT8:
            return codes.view(torch.int8).float() * scale.view(torch.float32)
        halves = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)
        return (halves.float() - 8) * scale.view(torch.float32)

    def read(self, which: slice | Tensor, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
        """Some rows, a slice or int64 ids `[n]` on the host, as `dtype` on a device: `[n, D]`."""
        if self.encoded and device.type == "cpu":
            ids = np.arange(*which.indices(len(self))) if isinstance(which, slice) else which.numpy()
            if len(ids) and not 0 <= ids.min() <= ids.max() < len(self):
                raise IndexError(f"an id is not of the {len(self):,} rows that there are")
            out = torch.empty(len(ids), self.dim)
            widen_rows(self.bits, self.layout, ids, out.numpy())
            return out.to(dtype)
        chosen = self.raw[which] if isinstance(which, slice) else self.raw.index_select(0, which)
        if device.type == "cuda":
            chosen = chosen.pin_memory()
        return self.floats(chosen.to(device, non_blocking=True)).to(dtype)


def tensor_view(array: npt.NDArray[Any]) -> Tensor:
    """A tensor over the same memory. Read-only maps are welcome: nothing here writes to a prefix."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")
        if array.dtype.name == "bfloat16":
            return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
        return torch.from_numpy(array)


def numpy_view(tensor: Tensor) -> npt.NDArray[Any]:
    """A numpy array over a CPU tensor; bfloat16 becomes `ml_dtypes.bfloat16`."""
    tensor = tensor.detach().contiguous().cpu()
    if tensor.dtype is torch.bfloat16:
        import ml_dtypes

        return tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


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
        if isinstance(heads, HeadRows):
            return heads.compiled
        first = heads[0]
        if len({(own.layout, own.bits.dtype, own.bits.shape) for own in heads}) > 1:
            raise ValueError("the heads of a layer are stored in different ways")
        if not all(own.bits.flags.c_contiguous for own in heads):
            raise ValueError("rows are read by their addresses: they must lie one behind the other")
        addresses = np.array([own.bits.ctypes.data for own in heads], np.int64)
        return cls(addresses, len(first), np.empty((0, first.bits.shape[1]), first.bits.dtype), first.layout)


class HeadRows(tuple[Rows, ...]):
    """The keys or values of the heads of a layer, which compiled calls take again and again."""

    @cached_property
    def compiled(self) -> LayerRows:
        """`LayerRows.of` these, made once."""
        return LayerRows.of([*self])


@njit(nogil=True, cache=True)
def head_bits(layer: Any, head: int) -> Any:
    """The bits of the rows of one of the heads of `LayerRows`."""
    return carray(at(layer.addresses[head]), (layer.length, layer.like.shape[1]), layer.like.dtype)


def run(work: Callable[[int, slice], None], heads: int, length: int) -> None:
    """`work(head, part)` over all of `range(length)` for every head.

    About two tasks a thread, so that none waits long for the last.
    """
    parts = max(1, 2 * threads.THREADS // max(1, heads))
    step = max(1, -(-length // parts))
    bounds = [slice(start, min(start + step, length)) for start in range(0, length, step)]
    if heads and bounds:
        threads.run(lambda task: work(*task), [(head, part) for head in range(heads) for part in bounds])
