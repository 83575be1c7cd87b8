"""Channel-wise minimum and maximum of the keys of each page (Quest, arXiv 2406.10774, §3.3)."""

from typing import Any

import numpy as np

from offload_decode.store.format import Array


def fold_pages(
    open_page: Array | None, start: int, keys: Array, page_size: int, n_tokens: int
) -> tuple[Array, Array, Array | None]:
    """Bounds of the pages that `keys [Hkv, T, D]`, the tokens from `start` on, complete.

    Returns `(lower, upper)`, both `[Hkv, pages, D]` in the dtype of the keys, and the page left open: bounds
    `[2, Hkv, 1, D]` as order-preserving integers. The page that ends with the last of `n_tokens` is complete,
    however short it is.
    """
    # As integers -0 sorts below +0, so that a bound does not depend on how the tokens were grouped; and numpy
    # reduces 16-bit integers ten times faster than float16.
    rows = _flip_negatives(np.ascontiguousarray(keys).view(f"<i{keys.itemsize}"))
    tokens = keys.shape[1]
    ahead = min(-start % page_size, tokens)
    whole = (tokens - ahead) // page_size * page_size
    inner = rows[:, ahead : ahead + whole].reshape(len(rows), whole // page_size, page_size, rows.shape[2])
    pages = [_bounds(inner, None)]
    if ahead:
        open_page = _bounds(rows[:, None, :ahead], open_page)
        if (start + ahead) % page_size == 0:
            pages, open_page = [open_page, *pages], None
    if ahead + whole < tokens:
        open_page = _bounds(rows[:, None, ahead + whole :], None)
    if start + tokens == n_tokens and open_page is not None:
        pages, open_page = [*pages, open_page], None
    lower, upper = _flip_negatives(np.concatenate(pages, axis=2)).view(keys.dtype)
    return lower, upper, open_page


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


def _bounds(pages: Array, before: Array | None) -> Array:
    """`[2, Hkv, P, D]` of `pages [Hkv, P, T, D]`, and of the tokens that had these bounds `before`."""
    lower, upper = pages.min(axis=2), pages.max(axis=2)
    if before is not None:
        lower, upper = np.minimum(before[0], lower), np.maximum(before[1], upper)
    return np.stack([lower, upper])


def _flip_negatives(bits: Array) -> Array:
    width = 8 * bits.itemsize - 1
    flipped: Array = bits ^ ((bits >> width) & bits.dtype.type(2**width - 1))
    return flipped
