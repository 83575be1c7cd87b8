"""Channel-wise minimum and maximum of the keys of each page (Quest, arXiv 2406.10774, §3.3)."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from offload_decode.store.format import Array


class OpenPage(NamedTuple):
    """Bounds `[Hkv, D]` of the page that is being filled, as order-preserving integers."""

    lower: Array
    upper: Array


def fold_pages(
    open_page: OpenPage | None, start: int, keys: Array, page_size: int, n_tokens: int
) -> tuple[Array, Array, OpenPage | None]:
    """Bounds of the pages that `keys [Hkv, T, D]`, the tokens from `start` on, complete.

    Returns `(lower, upper)`, both `[Hkv, pages, D]` in the dtype of the keys, and the page left open.
    The page that ends with the last of `n_tokens` is complete, however short it is.
    """
    rows, end = _ordered(keys), start + keys.shape[1]
    ahead = min(-start % page_size, keys.shape[1])
    whole = (keys.shape[1] - ahead) // page_size * page_size
    inner = rows[:, ahead : ahead + whole].reshape(len(rows), whole // page_size, page_size, rows.shape[2])
    lower, upper = [inner.min(axis=2)], [inner.max(axis=2)]
    if ahead:
        open_page = _merged(open_page, rows[:, :ahead])
        if (start + ahead) % page_size == 0:
            lower.insert(0, open_page.lower[:, None])
            upper.insert(0, open_page.upper[:, None])
            open_page = None
    if ahead + whole < keys.shape[1]:
        open_page = _merged(None, rows[:, ahead + whole :])
    if end == n_tokens and open_page is not None:
        lower.append(open_page.lower[:, None])
        upper.append(open_page.upper[:, None])
        open_page = None
    return (
        _floats(np.concatenate(lower, axis=1), keys),
        _floats(np.concatenate(upper, axis=1), keys),
        open_page,
    )


def rounded_outward(lower: Array, upper: Array, dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """Bounds in another dtype, of fewer bits or the same, never inside what they were."""
    if lower.dtype == dtype:
        return lower, upper
    below, above = lower.astype(dtype), upper.astype(dtype)
    infinity = np.array(np.inf, dtype)
    with np.errstate(over="ignore"):  # beyond the largest number is taken where that is inside
        next_below, next_above = np.nextafter(below, -infinity), np.nextafter(above, infinity)
    return (
        np.where(below.astype(np.float32) > lower, next_below, below),
        np.where(above.astype(np.float32) < upper, next_above, above),
    )


def _merged(page: OpenPage | None, rows: Array) -> OpenPage:
    lower, upper = rows.min(axis=1), rows.max(axis=1)
    if page is None:
        return OpenPage(lower, upper)
    return OpenPage(np.minimum(page.lower, lower), np.maximum(page.upper, upper))


def _ordered(floats: Array) -> Array:
    """The floats as integers in the same order.

    -0 sorts below +0, so that the bytes of a bound do not depend on how the tokens were grouped; and numpy
    reduces 16-bit integers ten times faster than float16.
    """
    bits = np.ascontiguousarray(floats).view(f"<i{floats.itemsize}")
    return _flip_negatives(bits)


def _floats(ordered: Array, like: Array) -> Array:
    return _flip_negatives(ordered).view(like.dtype)


def _flip_negatives(bits: Array) -> Array:
    width = 8 * bits.itemsize - 1
    flipped: Array = bits ^ ((bits >> width) & bits.dtype.type(2**width - 1))
    return flipped
