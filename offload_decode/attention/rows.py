"""`Rows`: the stored keys or values of one KV head, plain or encoded, read where they lie or gathered.

What travels to a device is a row's own bytes; they become floats there. On a host a compiled loop reads them
where they lie, in one pass: torch converts single bytes many times slower. Only rows that are asked for are
ever decoded.
"""

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
        self.row_bytes: int = self.bits.shape[1]
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

    addresses: int64 `[H]`, of the heads' bits in `lengths` `[H]` rows of `row_bytes`. layout: that of the
    bits.
    """

    addresses: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    row_bytes: int
    layout: int


def rows_beside(layers: Sequence[LayerRows]) -> LayerRows:
    """The rows of several stores, of one form, one store behind the other."""
    first = layers[0]
    addresses, lengths = (np.concatenate(own) for own in list(zip(*layers, strict=True))[:2])
    return LayerRows(addresses, lengths, first.row_bytes, first.layout)


class HeadRows(tuple[Rows, ...]):
    """The keys or values of the heads of a layer, all stored in one way."""

    @cached_property
    def compiled(self) -> LayerRows:
        """What compiled functions take; these rows must outlive it."""
        bits, layout = self[0].bits, self[0].layout
        if len({(rows.layout, rows.bits.shape) for rows in self}) > 1:
            raise ValueError("the heads of a layer are stored in different ways")
        if not all(rows.bits.flags.c_contiguous for rows in self):
            raise ValueError("rows are read by their addresses: they must lie one behind the other")
        addresses = np.array([rows.bits.ctypes.data for rows in self], np.int64)
        return LayerRows(addresses, np.full(len(self), len(bits)), bits.shape[1], layout)


@njit(nogil=True, cache=True)
def head_bits(layer: Any, head: int) -> Any:
    """The bits of the rows of one of the heads of `LayerRows`."""
    return carray(at(layer.addresses[head]), (layer.lengths[head], layer.row_bytes), np.uint8)


def run(work: Callable[[int, slice], None], heads: int, length: int) -> None:
    """`work(head, part)` over all of `range(length)` for every head.

    About two tasks a thread, so that none waits long for the last.
    """
    parts = max(1, 2 * threads.THREADS // max(1, heads))
    step = max(1, -(-length // parts))
    bounds = [slice(start, min(start + step, length)) for start in range(0, length, step)]
    if heads and bounds:
        threads.run(lambda task: work(*task), [(head, part) for head in range(heads) for part in bounds])


Int64 = npt.NDArray[np.int64]


def unite(ids: Tensor, n_tokens: int) -> tuple[list[Int64], Tensor]:
    """The different tokens that the rows of each KV head name, ascending, and their places among those of all
    heads, one head behind the other.

    `ids [Hkv, R, k]` int64 on a CPU, -1 where there is none. The places have the shape of `ids`, and -1 where
    these have it.
    """
    named = ids.contiguous().numpy()
    heads, rows, k = named.shape
    union = np.empty((heads, min(rows * k, n_tokens)), np.int64)
    places, counts = np.empty_like(named), np.zeros(heads, np.int64)

    def collect(head: int, _: slice) -> None:
        counts[head] = _unite(named[head], n_tokens, union[head], places[head])

    run(collect, heads, 1)
    if (counts < 0).any():
        raise IndexError(f"an id is not of the {n_tokens:,} rows that there are")
    before = (counts.cumsum() - counts)[:, None, None]
    places = np.where(places < 0, -1, places + before)
    return [own[:count] for own, count in zip(union, counts.tolist(), strict=True)], torch.from_numpy(places)


def gather_rows(stored: Sequence[Rows], tokens: Sequence[Int64], out: Tensor) -> None:
    """The rows `tokens[h]` of every KV head's stored rows, head by head, to `out [n, row_bytes]` uint8."""
    target = out.numpy()
    ends = np.cumsum([len(own) for own in tokens])

    def copy(head: int, part: slice) -> None:
        own = tokens[head][part]
        first = ends[head] - len(tokens[head]) + part.start
        _gather(stored[head].bits, own, target[first : first + len(own)])

    run(copy, len(tokens), max(map(len, tokens), default=0))


@njit(nogil=True, cache=True)
def _unite(ids: Any, n_tokens: int, union: Any, places: Any) -> int:
    """A bit a token, and how many bits are set before each word: so a token's place is found without a sort.
    Returns how many there are, -1 for an id that is out of range.
    """
    words = np.zeros(n_tokens // 64 + 1, np.uint64)
    for r in range(len(ids)):
        for j in range(ids.shape[1]):
            if ids[r, j] >= n_tokens:
                return -1
            if ids[r, j] >= 0:
                words[ids[r, j] >> 6] |= np.uint64(1) << np.uint64(ids[r, j] & 63)
    before = np.empty(len(words), np.int64)
    count = 0
    for word in range(len(words)):
        before[word] = count
        rest = words[word]
        while rest:
            lowest = rest & (~rest + np.uint64(1))
            union[count] = word * 64 + _ones(lowest - np.uint64(1))
            count += 1
            rest ^= lowest
    for r in range(len(ids)):
        for j in range(ids.shape[1]):
            token = ids[r, j]
            if token < 0:
                places[r, j] = -1
            else:
                lower = (np.uint64(1) << np.uint64(token & 63)) - np.uint64(1)
                places[r, j] = before[token >> 6] + _ones(words[token >> 6] & lower)
    return count


@njit(nogil=True, cache=True)
def _ones(word: Any) -> Any:
    """Set bits of a uint64 (Hacker's Delight, §5-1)."""
    word -= (word >> np.uint64(1)) & np.uint64(0x5555555555555555)
    word = (word & np.uint64(0x3333333333333333)) + ((word >> np.uint64(2)) & np.uint64(0x3333333333333333))
    word = (word + (word >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return np.int64((word * np.uint64(0x0101010101010101)) >> np.uint64(56))


@njit(nogil=True, cache=True)
def _gather(bits: Any, tokens: Any, out: Any) -> None:
    for j in range(len(tokens)):
        token = tokens[j]  # outside the loop, which becomes a copy of words; ascending, it needs no prefetch
        for d in range(out.shape[1]):
            out[j, d] = bits[token, d]
