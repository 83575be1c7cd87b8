"""Marks: what a prefill needs to go on in the middle of a store, kept every so many tokens.

Full attention is kept token by token; windows, recurrent states and the errors of encoding are those of the
end. So that a renewed corpus need not begin anew, they are kept in between too: a row of bytes for each mark
of a layer, of its window (`[Hkv, W - 1, D + Dv]`, a key and its value, zeros before the first token), its
states and the sums of its `EncodingLoss`, float64, of keys and of values.
"""

from collections.abc import Mapping
from itertools import accumulate
from math import prod
from typing import NamedTuple

import numpy as np

from offload_decode.common.rows import encodings
from offload_decode.store.format import Array, Manifest, numpy_dtype
from offload_decode.types import LayerKind, LayerShape

SHARE = 4
"""Marks take at most one part in so many of what full attention takes."""
Sums = tuple[float, float, float]
_SUMS_BYTES = 3 * 8


class Kept(NamedTuple):
    """Of one layer after some token: its window (keys and values `[Hkv, w, …]`), its states, and by kind the
    sums of an `EncodingLoss`; each is empty where it has none.
    """

    window: tuple[Array, ...] = ()
    states: tuple[Array, ...] = ()
    errors: Mapping[str, Sums] = {}


def marks_for(manifest: Manifest) -> int | None:
    """Tokens from one mark to the next: the chunk of the prefill, doubled until marks take at most their
    `SHARE`. None where there is no full attention.
    """
    shape, step = manifest.shape, int(manifest.prefill["chunk"])
    mark = sum(row_bytes(manifest, own) for own in shape.layers)
    token = 0
    for kind, dim in (("keys", shape.head_dim), ("values", shape.value_dim))[: 2 - shape.latent]:
        encoding = manifest.encoding(kind)
        width = encodings.row_bytes(encoding, dim) if encoding else dim * manifest.numpy_dtype.itemsize
        token += len(shape.full_layers) * shape.kv_heads * width
    if not token:
        return None
    while step * token < SHARE * mark:
        step *= 2
    return step


def row_bytes(manifest: Manifest, own: LayerShape) -> int:
    """Bytes of a mark of one layer."""
    return sum(_sizes(manifest, own))


def pack(manifest: Manifest, own: LayerShape, kept: Kept) -> Array:
    """The row of a mark, uint8."""
    parts: list[Array] = []
    if kept.window:
        block = np.concatenate(kept.window, axis=2)
        before = (own.window or 0) - 1 - block.shape[1]
        parts.append(np.pad(block, ((0, 0), (before, 0), (0, 0))))
    parts += [*kept.states, *(np.array(kept.errors[kind]) for kind in _marked(manifest, own))]
    return np.concatenate([np.ascontiguousarray(part).reshape(-1).view(np.uint8) for part in parts])


def unpack(manifest: Manifest, own: LayerShape, row: Array, tokens: int) -> Kept:
    """What `pack` was given after so many tokens, as copies."""
    ends = list(accumulate(_sizes(manifest, own)))
    parts = [part.copy() for part in np.split(row, ends[:-1])]
    window: list[Array] = []
    if own.local:
        rows = parts.pop(0).view(manifest.numpy_dtype).reshape(own.kv_heads, -1, own.key_dim + own.value_dim)
        window = np.split(rows[:, max(0, rows.shape[1] - tokens) :], [own.key_dim], axis=2)
    states = [parts.pop(0).view(numpy_dtype(one.dtype)).reshape(one.shape) for one in own.states]
    errors: dict[str, Sums] = {}
    for kind, part in zip(_marked(manifest, own), parts, strict=True):
        squares, power, largest = part.view(np.float64).tolist()
        errors[kind] = squares, power, largest
    return Kept(tuple(window), tuple(states), errors)


def _marked(manifest: Manifest, own: LayerShape) -> list[str]:
    """The kinds of rows whose errors are marked."""
    return manifest.encoded if own.kind is LayerKind.FULL else []


def _sizes(manifest: Manifest, own: LayerShape) -> list[int]:
    """Bytes of each part of a row."""
    sizes = [prod(one.shape) * numpy_dtype(one.dtype).itemsize for one in own.states]
    if own.local:
        width = own.kv_heads * (own.key_dim + own.value_dim) * manifest.numpy_dtype.itemsize
        sizes.insert(0, ((own.window or 0) - 1) * width)
    return sizes + [_SUMS_BYTES] * len(_marked(manifest, own))
